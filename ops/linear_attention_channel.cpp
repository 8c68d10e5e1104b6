#include "ops/linear_attention_channel.h"

#include "ops/common.h"
#include "ops/delta_rule_channel.h"
#include "ops/delta_rule_checks.h"

namespace ebb {
namespace {

using namespace delta_rule;

constexpr const char* kOp = "gated_linear_attention";

// k, or in its absence 1 − e^g in the dtype of q.
Tensor key_of(const Tensor& k, const Tensor& q, const Tensor& g) {
  if (k) return k.contiguous();
  const Tensor shared = Tensor::empty(g.shape(), q.dtype(), g.device());
  if (kWithCuda && g.on_cuda())
    gpu::shared_key(g, shared);
  else
    cpu::shared_key(g, shared);
  return shared;
}

void check_inputs(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                  const Tensor& g, int dims) {
  check_heads(op, q, k ? k : q, v, dims);
  check_gate(op, "g", g, wider(v.shape().first(dims - 1), q.size(-1)), v);
  check(k.defined() || q.size(-2) == v.size(-2),
        "{}: k is shared with the decays of {} heads, q has {}; want as many", op, v.size(-2),
        q.size(-2));
}

DeltaRuleSaved forward_pass(const DeltaRuleProblem& p, const Tensor& o, const Tensor& ht) {
  if (kWithCuda && o.on_cuda()) return gpu::channel_delta_rule_fwd(p, o, ht);
  return cpu::channel_linear_attention_fwd(p, o, ht);
}

void pass_shared_key_on(const Tensor& g, const Tensor& dk, const Tensor& dg) {
  if (kWithCuda && g.on_cuda())
    gpu::shared_key_bwd(g, dk, dg);
  else
    cpu::shared_key_bwd(g, dk, dg);
}

// Saved: q, k (undefined where shared), v, g, then what the backend keeps.
void backward_pass(BackwardContext& ctx, DeltaRuleProblem p) {
  const bool shared = !ctx.saved(1).defined();
  p.q = ctx.saved(0), p.v = ctx.saved(2), p.g = ctx.saved(3);
  p.k = key_of(ctx.saved(1), p.q, p.g);
  const DeltaRuleSaved saved{ctx.saved(4), ctx.saved(5), ctx.saved(6), ctx.saved(7), ctx.saved(8)};
  const auto wanted = [&](bool on, const Tensor& like) {
    return on ? Tensor::empty_like(like) : Tensor();
  };
  DeltaRuleGradients grads;
  grads.dq = wanted(ctx.needs(0), p.q);
  grads.dk = wanted(shared ? ctx.needs(3) : ctx.needs(1), p.k);
  grads.dv = wanted(ctx.needs(2), p.v);
  grads.dg = wanted(ctx.needs(3), p.g);
  if (ctx.needs(4)) grads.dh0 = empty_state(p);
  const Tensor d_o = ctx.has_dy(0) ? ctx.dy(0).contiguous() : Tensor::zeros_like(p.v);
  const Tensor dht = ctx.has_dy(1) ? ctx.dy(1).contiguous() : Tensor();
  if (kWithCuda && d_o.on_cuda())
    gpu::channel_delta_rule_bwd(p, saved, d_o, dht, grads);
  else
    cpu::channel_linear_attention_bwd(p, saved, d_o, dht, grads);
  if (shared && grads.dk) pass_shared_key_on(p.g, grads.dk, grads.dg);
  if (grads.dq) ctx.grad(0, grads.dq);
  if (grads.dk && !shared) ctx.grad(1, grads.dk);
  if (grads.dv) ctx.grad(2, grads.dv);
  if (grads.dg) ctx.grad(3, grads.dg);
  if (grads.dh0) ctx.grad(4, grads.dh0);
}

}  // namespace

LinearAttentionOutput channel_linear_attention(const Var& q, const Var& k, const Var& v,
                                               const Var& g, const Var& h0,
                                               const LinearAttentionOptions& options) {
  check(!options.weight.defined() && !options.skip.defined() && options.memory_chunk == 0,
        "{}: weight, skip and memory_chunk belong to one decay per head; g is {}", kOp, g.shape());
  check_inputs(kOp, q.value(), k.value(), v.value(), g.value(), 4);
  check_same_device(kOp, q.value(), {&k.value(), &v.value(), &g.value(), &h0.value()});
  check(options.chunk >= 1, "{}: chunk is {}, want at least 1", kOp, options.chunk);
  DeltaRuleProblem p{
      q.value().contiguous(), {}, v.value().contiguous(), g.value().contiguous(), {}};
  p.k = key_of(k.value(), p.q, p.g);
  const bool cuda = p.q.on_cuda();
  check_sequences(kOp, p, h0.value(), {.scale = options.scale, .layout = options.layout});
  // The GPU has one length; on the CPU up to eight sub-chunks.
  if (!cuda) p.chunk = std::min<int64_t>(options.chunk, 128);
  const Tensor o = Tensor::empty_like(p.v);
  const Tensor ht = options.want_final_state ? empty_state(p) : Tensor();
  const DeltaRuleSaved saved = forward_pass(p, o, ht);
  DeltaRuleProblem sizes = sizes_of(p);
  const std::vector<Var> out =
      record(kOp, {q, k, v, g, h0},
             {p.q, k.defined() ? p.k : Tensor(), p.v, p.g, saved.a, saved.states, saved.values,
              saved.gates, saved.scores},
             {o, ht}, [sizes](BackwardContext& ctx) { backward_pass(ctx, sizes); });
  return {out[0], out[1], {}};
}

Tensor channel_linear_attention_step(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& g, const Tensor& state, double scale) {
  constexpr const char* op = "gated_linear_attention_step";
  check_inputs(op, q, k, v, g, 3);
  check_gate(op, "state", state, {v.size(0), v.size(1), q.size(2), v.size(2)}, v);
  check_same_device(op, q, {&k, &v, &g, &state});
  check(state.is_contiguous(), "{}: the state {} is updated in place and must be dense", op,
        state.shape());
  DeltaRuleProblem p{q.contiguous(), {}, v.contiguous(), g.contiguous(), {}};
  p.k = key_of(k, p.q, p.g);
  const Tensor o = Tensor::empty(v.shape(), v.dtype(), v.device());
  state.bump_version();  // before writing: read-only memory is refused here
  if (kWithCuda && o.on_cuda()) {
    gpu::delta_rule_step(step_of(op, p.q, p.k, p.v, p.g, {.scale = scale}), state, o);
    return o;
  }
  for (Tensor* t : {&p.q, &p.k, &p.v, &p.g}) *t = t->unsqueeze(1);
  p.scale = scale;
  cpu::channel_linear_attention_step(p, state, o);
  return o;
}

}  // namespace ebb
