#include "ops/delta_rule.h"

#include "ops/delta_rule_checks.h"

namespace ebb {
namespace {

using namespace delta_rule;

constexpr const char* kOp = "gated_delta_rule";

DeltaRuleProblem checked(const Var& q, const Var& k, const Var& v, const Var& g, const Var& beta,
                         const Var& h0, const DeltaRuleOptions& options) {
  check_heads(kOp, q.value(), k.value(), v.value(), 4);
  const Shape gates = v.shape().first(3);
  check_gate(kOp, "g", g.value(), gates, v.value());
  check_gate(kOp, "beta", beta.value(), gates, v.value());
  check_same_device(kOp, q.value(),
                    {&k.value(), &v.value(), &g.value(), &beta.value(), &h0.value()});
  DeltaRuleProblem p{q.value().contiguous(), k.value().contiguous(), v.value().contiguous(),
                     g.value().contiguous(), beta.value().contiguous()};
  check_sequences(kOp, p, h0.value(), options);
  return p;
}

DeltaRuleSaved forward_pass(const DeltaRuleProblem& p, const Tensor& o, const Tensor& ht) {
  if (kWithCuda && o.on_cuda()) return gpu::gated_delta_rule_fwd(p, o, ht);
  return cpu::gated_delta_rule_fwd(p, o, ht);
}

void backward_pass(BackwardContext& ctx, DeltaRuleProblem p, bool final_state, bool recompute) {
  p.q = ctx.saved(0), p.k = ctx.saved(1), p.v = ctx.saved(2);
  p.g = ctx.saved(3), p.beta = ctx.saved(4);
  DeltaRuleSaved saved{ctx.saved(5), ctx.saved(6), ctx.saved(7), ctx.saved(8)};
  if (recompute) {
    p.h0 = ctx.saved(9);
    saved = forward_pass(p, Tensor::empty_like(p.v), Tensor());
  }
  const auto wanted = [&](int i, const Tensor& like) {
    return ctx.needs(i) ? Tensor::empty_like(like) : Tensor();
  };
  const DeltaRuleGradients grads{wanted(0, p.q),    wanted(1, p.k),
                                 wanted(2, p.v),    wanted(3, p.g),
                                 wanted(4, p.beta), ctx.needs(5) ? empty_state(p) : Tensor()};
  const Tensor d_o = ctx.dy(0).contiguous();
  const Tensor dht = final_state && ctx.has_dy(1) ? ctx.dy(1).contiguous() : Tensor();
  if (kWithCuda && d_o.on_cuda())
    gpu::gated_delta_rule_bwd(p, saved, d_o, dht, grads);
  else
    cpu::gated_delta_rule_bwd(p, saved, d_o, dht, grads);
  const Tensor* all[] = {&grads.dq, &grads.dk, &grads.dv, &grads.dg, &grads.dbeta, &grads.dh0};
  for (int i = 0; i < 6; ++i)
    if (all[i]->defined()) ctx.grad(i, *all[i]);
}

}  // namespace

DeltaRuleOutput gated_delta_rule(const Var& q_in, const Var& k_in, const Var& v, const Var& g_in,
                                 const Var& beta_in, const Var& h0,
                                 const DeltaRuleOptions& options) {
  const Var q = normalized(q_in, options), k = normalized(k_in, options);
  const Var g = log_decay(kOp, g_in, options);
  const Var beta = strength(kOp, beta_in, options.beta_scale, options);
  const OpScope scope(kOp);
  const DeltaRuleProblem p = checked(q, k, v, g, beta, h0, options);
  const Tensor o = Tensor::empty_like(p.v);
  const Tensor ht = options.want_final_state ? empty_state(p) : Tensor();
  DeltaRuleSaved saved = forward_pass(p, o, ht);
  Tensor start;
  if (options.recompute) saved = {}, start = p.h0;
  const std::vector<Var> out = record(
      kOp, {q, k, v, g, beta, h0},
      {p.q, p.k, p.v, p.g, p.beta, saved.a, saved.states, saved.values, saved.gates, start},
      {o, ht},
      [sizes = sizes_of(p), final_state = options.want_final_state, recompute = options.recompute](
          BackwardContext& ctx) { backward_pass(ctx, sizes, final_state, recompute); });
  return {out[0], out[1]};
}

Tensor gated_delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                             const Tensor& beta, const Tensor& state, double scale) {
  constexpr const char* op = "gated_delta_rule_step";
  const OpScope scope(op);
  check_heads(op, q, k, v, 3);
  check_gate(op, "g", g, v.shape().first(2), v);
  check_gate(op, "beta", beta, v.shape().first(2), v);
  check_gate(op, "state", state, {v.size(0), v.size(1), q.size(2), v.size(2)}, v);
  check_same_device(op, q, {&k, &v, &g, &beta, &state});
  check(state.is_contiguous(), "{}: the state {} is updated in place and must be dense", op,
        state.shape());
  const Tensor o = Tensor::empty(v.shape(), v.dtype(), v.device());
  const Tensor in[] = {q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(),
                       beta.contiguous()};
  state.bump_version();  // before writing: read-only memory is refused here
  if (kWithCuda && q.on_cuda())
    gpu::gated_delta_rule_step(in[0], in[1], in[2], in[3], in[4], state, scale, o);
  else
    cpu::gated_delta_rule_step(in[0], in[1], in[2], in[3], in[4], state, scale, o);
  return o;
}

Cost gated_delta_rule_cost(Pass pass, const DeltaRuleSize& s, DType dtype, bool saves) {
  const double tokens = double(s.batch) * double(s.time), item = double(item_size(dtype));
  const double gate = double(item_size(accumulate_type(dtype)));
  const double c = double(s.chunk), k = double(s.key_dim), v = double(s.value_dim);
  const double chunk_heads = double(s.batch * s.value_heads) * std::ceil(double(s.time) / c);
  const double keys = tokens * double(s.heads) * k * item;               // one of q, k
  const double values = tokens * double(s.value_heads) * v * item;       // one of v, o
  const double gates = tokens * double(s.value_heads) * gate;            // one of g, beta
  const double kept = saves ? chunk_heads * (c * c + k * v) * item : 0;  // A and the states
  if (pass == Pass::forward)
    return {2 * keys + 2 * values + 2 * gates + kept,
            2 * chunk_heads * (2 * c * c * (k + v) + 3 * c * k * v + c * c * c / 3)};
  return {4 * keys + 3 * values + 4 * gates + kept,
          2 * chunk_heads * (c * c * (6 * k + 5 * v) + 7 * c * k * v)};
}

Cost gated_delta_rule_step_cost(const DeltaRuleSize& s, DType dtype) {
  const double item = double(item_size(dtype)), gate = double(item_size(accumulate_type(dtype)));
  const double heads = double(s.batch * s.value_heads);
  const double k = double(s.key_dim), v = double(s.value_dim);
  return {heads * (2 * k * v * gate + 2 * v * item + 2 * gate) +
              double(s.batch * s.heads) * 2 * k * item,
          heads * (7 * k * v + 2 * v)};
}

}  // namespace ebb
