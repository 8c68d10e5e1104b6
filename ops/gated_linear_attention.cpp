#include "ops/gated_linear_attention.h"

#include "ops/delta_rule_checks.h"
#include "ops/linear_attention_channel.h"
#include "ops/rows.h"

namespace ebb {
namespace {

using delta_rule::check_gate;
using delta_rule::check_heads;

constexpr const char* kOp = "gated_linear_attention";

Tensor empty_state(const LinearAttentionProblem& p) {
  return Tensor::empty({p.sequences(), p.heads(), p.key_dim(), p.value_dim()},
                       accumulate_type(p.v.dtype()), p.v.device());
}

// q, k or v as the backends read it.
Tensor readable(const Tensor& t) {
  Rows r;
  return t.on_cuda() && rows_in_place(t, 2, &r) ? t : t.contiguous();
}

// What does not belong to g and w.
LinearAttentionProblem checked(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& h0,
                               const LinearAttentionOptions& options) {
  const Tensor& skip = options.skip.value();
  check_heads(kOp, q, k, v, 4);
  if (skip) check_gate(kOp, "skip", skip, {v.size(2)}, v);
  check_same_device(kOp, q, {&k, &v, &h0, &skip});
  check(options.chunk >= 1, "{}: chunk is {}, want at least 1", kOp, options.chunk);
  check(options.memory_chunk >= 0 && options.memory_chunk < (1 << 30),
        "{}: memory_chunk is {}, want 1...2^30, or 0 for none", kOp, options.memory_chunk);
  LinearAttentionProblem p{.q = readable(q),
                           .k = readable(k),
                           .v = readable(v),
                           .skip = skip ? skip.contiguous() : Tensor(),
                           .scale = options.scale,
                           .layout = options.layout,
                           .chunk = options.chunk,
                           .memory_chunk = options.memory_chunk};
  p.layout.check_covers(kOp, p.batch(), p.time(), q.device());
  if (h0) {
    check_gate(kOp, "h0", h0, {p.sequences(), p.heads(), p.key_dim(), p.value_dim()}, v);
    p.h0 = h0.contiguous();
  }
  return p;
}

// Saved: q, k, v, g or dt, weight or A, skip, states, partials, gates, bias; the inputs in the same
// order, with h0 after g.
void backward_pass(BackwardContext& ctx, LinearAttentionProblem p, bool by_steps) {
  p.q = ctx.saved(0), p.k = ctx.saved(1), p.v = ctx.saved(2), p.skip = ctx.saved(5);
  const Tensor &g = ctx.saved(3), &weight = ctx.saved(4), &bias = ctx.saved(9);
  if (by_steps)
    p.gate.dt = as_rows(g), p.gate.A = weight, p.gate.bias = bias;
  else
    p.g = g, p.weight = weight;
  const LinearAttentionSaved saved{ctx.saved(6), ctx.saved(7), ctx.saved(8)};
  const auto wanted = [&](int i, const Tensor& like) {
    return ctx.needs(i) ? Tensor::empty(like.shape(), like.dtype(), like.device()) : Tensor();
  };
  LinearAttentionGradients grads{.dq = wanted(0, p.q),
                                 .dk = wanted(1, p.k),
                                 .dv = wanted(2, p.v),
                                 .dh0 = ctx.needs(4) ? empty_state(p) : Tensor(),
                                 .dskip = wanted(6, p.skip)};
  (by_steps ? grads.ddt : grads.dg) = wanted(3, g);
  (by_steps ? grads.dA : grads.dweight) = wanted(5, weight);
  if (by_steps) grads.dbias = wanted(7, bias);
  const auto upstream = [&](int i) { return ctx.has_dy(i) ? ctx.dy(i).contiguous() : Tensor(); };
  const Tensor d_o = ctx.dy(0).contiguous();
  if (kWithCuda && d_o.on_cuda())
    gpu::gated_linear_attention_bwd(p, saved, d_o, upstream(1), upstream(2), grads);
  else
    cpu::gated_linear_attention_bwd(p, saved, d_o, upstream(1), upstream(2), grads);
  const Tensor* all[] = {&grads.dq,    &grads.dk,
                         &grads.dv,    by_steps ? &grads.ddt : &grads.dg,
                         &grads.dh0,   by_steps ? &grads.dA : &grads.dweight,
                         &grads.dskip, &grads.dbias};
  for (int i = 0; i < 8; ++i)
    if (*all[i]) ctx.grad(i, *all[i]);
}

// The inputs from g on, as backward_pass names them.
struct Inputs {
  Var g, h0, weight, skip, bias = {};
};
LinearAttentionOutput run(const Var& q, const Var& k, const Var& v, const Inputs& in,
                          const LinearAttentionProblem& p, const LinearAttentionOptions& options) {
  const Tensor o = Tensor::empty_like(p.v);
  const Tensor ht = options.want_final_state ? empty_state(p) : Tensor();
  const Tensor contributions =
      p.memory_chunk
          ? Tensor::empty({p.memories(), p.heads(), p.key_dim(), p.value_dim()},
                          options.wide_contributions ? accumulate_type(p.v.dtype()) : p.v.dtype(),
                          p.v.device())
          : Tensor();
  LinearAttentionSaved saved;
  if (kWithCuda && o.on_cuda())
    saved = gpu::gated_linear_attention_fwd(p, o, ht, contributions);
  else
    saved = cpu::gated_linear_attention_fwd(p, o, ht, contributions);
  LinearAttentionProblem sizes;  // what backward captures: the problem without its tensors
  sizes.scale = p.scale, sizes.layout = p.layout;
  sizes.chunk = p.chunk, sizes.memory_chunk = p.memory_chunk;
  const bool by_steps = p.gate.dt.t.defined();
  sizes.gate = p.gate, sizes.gate.dt = {}, sizes.gate.A = {}, sizes.gate.bias = {};
  const std::vector<Var> out =
      record(kOp, {q, k, v, in.g, in.h0, in.weight, in.skip, in.bias},
             {p.q, p.k, p.v, by_steps ? p.gate.dt.t : p.g, by_steps ? p.gate.A : p.weight, p.skip,
              saved.states, saved.partials, saved.gates, p.gate.bias},
             {o, ht, contributions},
             [sizes, by_steps](BackwardContext& ctx) { backward_pass(ctx, sizes, by_steps); });
  return {out[0], out[1], out[2]};
}

}  // namespace

LinearAttentionOutput gated_linear_attention(const Var& q, const Var& k, const Var& v, const Var& g,
                                             const Var& h0, const LinearAttentionOptions& options) {
  const OpScope scope(kOp);
  if (g.defined() && g.dim() == 4) return channel_linear_attention(q, k, v, g, h0, options);
  LinearAttentionProblem p = checked(q.value(), k.value(), v.value(), h0.value(), options);
  const Tensor& weight = options.weight.value();
  const Shape gates = v.value().shape().first(3);
  check_gate(kOp, "g", g.value(), gates, v.value());
  if (weight) check_gate(kOp, "weight", weight, gates, v.value());
  check_same_device(kOp, q.value(), {&g.value(), &weight});
  p.g = g.value().contiguous();
  if (weight) p.weight = weight.contiguous();
  return run(q, k, v, {g, h0, options.weight, options.skip}, p, options);
}

LinearAttentionOutput gated_linear_attention_by_steps(const Var& q, const Var& k, const Var& v,
                                                      const Var& dt, const Var& A, const Var& bias,
                                                      const SsdGateArgs& gate, const Var& h0,
                                                      const LinearAttentionOptions& options) {
  LinearAttentionProblem p = checked(q.value(), k.value(), v.value(), h0.value(), options);
  p.gate = gate;
  return run(q, k, v, {dt, h0, A, options.skip, bias}, p, options);
}

Tensor gated_linear_attention_step(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& g, const Tensor& state,
                                   const LinearAttentionStep& options) {
  constexpr const char* op = "gated_linear_attention_step";
  const OpScope scope(op);
  const Tensor &weight = options.weight, &skip = options.skip;
  if (g.defined() && g.dim() == 3) {
    check(!weight.defined() && !skip.defined(),
          "{}: weight and skip belong to one decay per head; g is {}", op, g.shape());
    return channel_linear_attention_step(q, k, v, g, state, options.scale);
  }
  check_heads(op, q, k, v, 3);
  const Shape gates = v.shape().first(2);
  check_gate(op, "g", g, gates, v);
  if (weight) check_gate(op, "weight", weight, gates, v);
  if (skip) check_gate(op, "skip", skip, {v.size(1)}, v);
  check_gate(op, "state", state, {v.size(0), v.size(1), q.size(2), v.size(2)}, v);
  check_same_device(op, q, {&k, &v, &g, &state, &weight, &skip});
  check(state.is_contiguous(), "{}: the state {} is updated in place and must be dense", op,
        state.shape());
  const Tensor o = Tensor::empty(v.shape(), v.dtype(), v.device());
  const LinearAttentionStep dense{options.scale, weight ? weight.contiguous() : Tensor(),
                                  skip ? skip.contiguous() : Tensor()};
  state.bump_version();  // before writing: read-only memory is refused here
  const Tensor in[] = {q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous()};
  if (kWithCuda && q.on_cuda())
    gpu::gated_linear_attention_step(in[0], in[1], in[2], in[3], state, dense, o);
  else
    cpu::gated_linear_attention_step(in[0], in[1], in[2], in[3], state, dense, o);
  return o;
}

Cost gated_linear_attention_cost(Pass pass, const LinearAttentionSize& s, DType dtype, bool saves) {
  const double tokens = double(s.batch) * double(s.time), item = double(item_size(dtype));
  const double c = double(s.chunk), k = double(s.key_dim), v = double(s.value_dim);
  const double chunks = double(s.batch) * std::ceil(double(s.time) / c);
  const double heads = double(s.heads), groups = double(s.groups);
  const double scored = s.by_channel ? heads : groups;  // q kᵀ once per group, or with its decays
  const double keys = tokens * groups * k * item;       // one of q, k
  const double values = tokens * heads * v * item;      // one of v, o
  const double gates =
      tokens * heads * (s.by_channel ? k : 1) * double(item_size(accumulate_type(dtype)));
  const double kept = saves ? chunks * heads * k * v * item : 0;  // the states
  if (pass == Pass::forward)
    return {2 * keys + 2 * values + gates + kept,
            2 * chunks * (scored * c * c * k + heads * (c * c * v + 2 * c * k * v))};
  return {4 * keys + 3 * values + 2 * gates + kept,
          2 * chunks * (scored * c * c * k + heads * (2 * c * c * (k + v) + 4 * c * k * v))};
}

Cost gated_linear_attention_step_cost(const LinearAttentionSize& s, DType dtype) {
  const double item = double(item_size(dtype)), gate = double(item_size(accumulate_type(dtype)));
  const double heads = double(s.batch * s.heads);
  const double k = double(s.key_dim), v = double(s.value_dim);
  return {heads * (2 * k * v * gate + 2 * v * item + (s.by_channel ? k : 1) * gate) +
              double(s.batch * s.groups) * 2 * k * item,
          heads * 5 * k * v};
}

}  // namespace ebb
