#include "ops/delta_rule_channel.h"

#include <cmath>

#include "ops/delta_rule_checks.h"

namespace ebb {
namespace {

using namespace delta_rule;

// beta, or erase and write: the others are undefined.
struct Gates {
  Var g, beta, erase, write;
};

void check_gates(const char* op, const Gates& gates, const Tensor& v, int64_t key_dim) {
  const Shape heads = v.shape().first(v.dim() - 1);
  check_gate(op, "g", gates.g.value(), wider(heads, key_dim), v);
  if (gates.beta.defined()) return check_gate(op, "beta", gates.beta.value(), heads, v);
  check_gate(op, "b", gates.erase.value(), wider(heads, key_dim), v);
  check_gate(op, "w", gates.write.value(), v.shape(), v);
}

DeltaRuleProblem dense_problem(const Tensor& q, const Tensor& k, const Tensor& v,
                               const Gates& gates) {
  const auto dense = [](const Tensor& t) { return t ? t.contiguous() : Tensor(); };
  DeltaRuleProblem p{q.contiguous(), k.contiguous(), v.contiguous(), gates.g.value().contiguous(),
                     dense(gates.beta.value())};
  p.erase = dense(gates.erase.value()), p.write = dense(gates.write.value());
  return p;
}

DeltaRuleSaved forward_pass(const DeltaRuleProblem& p, const Tensor& o, const Tensor& ht) {
  if (kWithCuda && o.on_cuda()) return gpu::channel_delta_rule_fwd(p, o, ht);
  return cpu::channel_delta_rule_fwd(p, o, ht);
}

void backward_pass(BackwardContext& ctx, DeltaRuleProblem p, bool final_state, bool recompute) {
  p.q = ctx.saved(0), p.k = ctx.saved(1), p.v = ctx.saved(2), p.g = ctx.saved(3);
  p.beta = ctx.saved(4), p.erase = ctx.saved(5), p.write = ctx.saved(6);
  DeltaRuleSaved saved{ctx.saved(7), ctx.saved(8), ctx.saved(9), ctx.saved(10), ctx.saved(11)};
  if (recompute) {
    p.h0 = ctx.saved(12);
    saved = forward_pass(p, Tensor::empty_like(p.v), Tensor());
  }
  const auto wanted = [&](int i, const Tensor& like) {
    return ctx.needs(i) ? Tensor::empty_like(like) : Tensor();
  };
  DeltaRuleGradients grads{wanted(0, p.q),    wanted(1, p.k),
                           wanted(2, p.v),    wanted(3, p.g),
                           wanted(4, p.beta), ctx.needs(7) ? empty_state(p) : Tensor()};
  grads.derase = wanted(5, p.erase), grads.dwrite = wanted(6, p.write);
  const Tensor d_o = ctx.dy(0).contiguous();
  const Tensor dht = final_state && ctx.has_dy(1) ? ctx.dy(1).contiguous() : Tensor();
  if (kWithCuda && d_o.on_cuda())
    gpu::channel_delta_rule_bwd(p, saved, d_o, dht, grads);
  else
    cpu::channel_delta_rule_bwd(p, saved, d_o, dht, grads);
  const Tensor* all[] = {&grads.dq,    &grads.dk,     &grads.dv,     &grads.dg,
                         &grads.dbeta, &grads.derase, &grads.dwrite, &grads.dh0};
  for (int i = 0; i < 8; ++i)
    if (all[i]->defined()) ctx.grad(i, *all[i]);
}

DeltaRuleOutput channel_delta_rule(const char* op, const Var& q_in, const Var& k_in, const Var& v,
                                   Gates gates, const Var& h0, const DeltaRuleOptions& options) {
  const Var q = normalized(q_in, options), k = normalized(k_in, options);
  gates.g = log_decay(op, gates.g, options);
  for (Var* gate : {&gates.beta, &gates.erase})
    if (gate->defined()) *gate = strength(op, *gate, options.beta_scale, options);
  if (gates.write.defined() && options.sigmoid) gates.write = sigmoid_gate(gates.write);
  const OpScope scope(op);
  check_heads(op, q.value(), k.value(), v.value(), 4);
  check_gates(op, gates, v.value(), q.size(-1));
  check_same_device(op, q.value(),
                    {&k.value(), &v.value(), &gates.g.value(), &gates.beta.value(),
                     &gates.erase.value(), &gates.write.value(), &h0.value()});
  DeltaRuleProblem p = dense_problem(q.value(), k.value(), v.value(), gates);
  check_sequences(op, p, h0.value(), options);
  const Tensor o = Tensor::empty_like(p.v);
  const Tensor ht = options.want_final_state ? empty_state(p) : Tensor();
  DeltaRuleSaved saved = forward_pass(p, o, ht);
  Tensor start;
  if (options.recompute) saved = {}, start = p.h0;
  const std::vector<Var> out = record(
      op, {q, k, v, gates.g, gates.beta, gates.erase, gates.write, h0},
      {p.q, p.k, p.v, p.g, p.beta, p.erase, p.write, saved.a, saved.states, saved.values,
       saved.gates, saved.scores, start},
      {o, ht},
      [sizes = sizes_of(p), final_state = options.want_final_state, recompute = options.recompute](
          BackwardContext& ctx) { backward_pass(ctx, sizes, final_state, recompute); });
  return {out[0], out[1]};
}

Tensor channel_step(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Gates& gates, const Tensor& state, double scale) {
  const OpScope scope(op);
  check_heads(op, q, k, v, 3);
  check_gates(op, gates, v, q.size(-1));
  check_gate(op, "state", state, {v.size(0), v.size(1), q.size(2), v.size(2)}, v);
  check_same_device(op, q,
                    {&k, &v, &gates.g.value(), &gates.beta.value(), &gates.erase.value(),
                     &gates.write.value(), &state});
  check(state.is_contiguous(), "{}: the state {} is updated in place and must be dense", op,
        state.shape());
  DeltaRuleProblem p = dense_problem(q, k, v, gates);
  for (Tensor* t : {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.erase, &p.write})
    if (t->defined()) *t = t->unsqueeze(1);
  p.scale = scale;
  const Tensor o = Tensor::empty(v.shape(), v.dtype(), v.device());
  state.bump_version();  // before writing: read-only memory is refused here
  if (kWithCuda && o.on_cuda())
    gpu::channel_delta_rule_step(p, state, o);
  else
    cpu::channel_delta_rule_step(p, state, o);
  return o;
}

}  // namespace

DeltaRuleOutput kda(const Var& q, const Var& k, const Var& v, const Var& g, const Var& beta,
                    const Var& h0, const DeltaRuleOptions& options) {
  check_defined("kda", "beta", beta.value());
  return channel_delta_rule("kda", q, k, v, {g, beta, {}, {}}, h0, options);
}

DeltaRuleOutput gdn2(const Var& q, const Var& k, const Var& v, const Var& g, const Var& b,
                     const Var& w, const Var& h0, const DeltaRuleOptions& options) {
  check_defined("gdn2", "b", b.value());
  check_defined("gdn2", "w", w.value());
  return channel_delta_rule("gdn2", q, k, v, {g, {}, b, w}, h0, options);
}

Tensor kda_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                const Tensor& beta, const Tensor& state, double scale) {
  check_defined("kda_step", "beta", beta);
  return channel_step("kda_step", q, k, v, {g, beta, {}, {}}, state, scale);
}

Tensor gdn2_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                 const Tensor& b, const Tensor& w, const Tensor& state, double scale) {
  check_defined("gdn2_step", "b", b);
  check_defined("gdn2_step", "w", w);
  return channel_step("gdn2_step", q, k, v, {g, {}, b, w}, state, scale);
}

Cost channel_delta_rule_cost(Pass pass, const DeltaRuleSize& s, DeltaGates gates, DType dtype,
                             bool saves) {
  const Cost scalar = gated_delta_rule_cost(pass, s, dtype, saves);
  const double tokens = double(s.batch) * double(s.time) * double(s.value_heads);
  const double gate = double(item_size(accumulate_type(dtype))), item = double(item_size(dtype));
  const double k = double(s.key_dim), v = double(s.value_dim), c = double(s.chunk);
  const double passes = pass == Pass::forward ? 1 : 2;  // backward: the gates and their gradients
  // g of K channels instead of one; b and w instead of beta.
  double wider = tokens * (k - 1) * gate;
  if (gates == DeltaGates::gdn2) wider += tokens * (k + v - 1) * gate;
  const double scores =
      saves ? double(s.batch * s.value_heads) * std::ceil(double(s.time) / c) * c * c * item : 0;
  return {scalar.bytes + passes * wider + scores, scalar.flops};
}

Cost channel_delta_rule_step_cost(const DeltaRuleSize& s, DeltaGates gates, DType dtype) {
  const Cost scalar = gated_delta_rule_step_cost(s, dtype);
  const double gate = double(item_size(accumulate_type(dtype)));
  const double heads = double(s.batch * s.value_heads);
  const double k = double(s.key_dim), v = double(s.value_dim);
  double wider = heads * (k - 1) * gate;
  if (gates == DeltaGates::gdn2) wider += heads * (k + v - 1) * gate;
  return {scalar.bytes + wider, scalar.flops + heads * k};
}

}  // namespace ebb
