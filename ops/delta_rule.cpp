#include "ops/delta_rule.h"

#include "ops/delta_rule_checks.h"
#include "ops/delta_rule_inputs.h"

namespace ebb {
namespace {

using namespace delta_rule;

constexpr const char* kOp = "gated_delta_rule";

struct Inputs {
  Var q, k, v, g, beta, h0, A_log = {}, dt_bias = {};
};

// Whether the backend takes the options into its own kernels.
bool fuses(const Inputs& in, int64_t chunk) {
  if (!kWithCuda || !in.q.defined() || !in.q.value().on_cuda()) return false;
  check_heads(kOp, in.q.value(), in.k.value(), in.v.value(), 4);
  DeltaRuleProblem p;
  p.q = in.q.value(), p.k = in.k.value(), p.v = in.v.value(), p.chunk = chunk;
  return gpu::gated_delta_rule_fuses(p);
}

// Without the options, which are operators of their own here.
Inputs composed(const Inputs& in, const DeltaRuleOptions& options) {
  return {normalized(in.q, options),
          normalized(in.k, options),
          in.v,
          log_decay(kOp, in.g, options),
          strength(in.beta, options.beta_scale, options),
          in.h0};
}

void check_inputs(const Inputs& in, bool raw_g, bool raw_beta) {
  const Tensor &q = in.q.value(), &k = in.k.value(), &v = in.v.value(), &g = in.g.value(),
               &beta = in.beta.value();
  check_heads(kOp, q, k, v, 4);
  const Shape gates = v.shape().first(3);
  check_logits(kOp, "g", g, raw_g, gates, v);
  check_logits(kOp, "beta", beta, raw_beta, gates, v);
  check_same_device(kOp, q,
                    {&k, &v, &g, &beta, &in.h0.value(), &in.A_log.value(), &in.dt_bias.value()});
}

DeltaRuleProblem dense_problem(const Inputs& in, const DeltaRuleOptions& options) {
  check_inputs(in, false, false);
  DeltaRuleProblem p{in.q.value().contiguous(), in.k.value().contiguous(),
                     in.v.value().contiguous(), in.g.value().contiguous(),
                     in.beta.value().contiguous()};
  check_sequences(kOp, p, in.h0.value(), options);
  return p;
}

// With the options, for kernels that take them.
DeltaRuleProblem fused_problem(const Inputs& in, const DeltaRuleOptions& options) {
  check_raw_options(kOp, options);
  check_inputs(in, in.A_log.defined(), options.sigmoid);
  const Tensor &q = in.q.value(), &k = in.k.value();
  DeltaRuleProblem p{token_rows(q), token_rows(k), token_rows(in.v.value()),
                     as_rows(in.g.value()).t, as_rows(in.beta.value()).t};
  if (token_step(p.q) != token_step(p.k)) p.q = q.clone(), p.k = k.clone();
  check_sequences(kOp, p, in.h0.value(), options);
  p.in_place = true, p.normalize = options.normalize_qk, p.sigmoid = options.sigmoid;
  p.beta_scale = options.beta_scale, p.lower_bound = options.lower_bound;
  p.A_log = gate_parameter(kOp, "A_log", in.A_log.value(), {p.value_heads()}, p.v);
  p.dt_bias = gate_parameter(kOp, "dt_bias", in.dt_bias.value(), {p.value_heads()}, p.v);
  return p;
}

DeltaRuleSaved forward_pass(const DeltaRuleProblem& p, const Tensor& o, const Tensor& ht) {
  if (kWithCuda && o.on_cuda()) return gpu::gated_delta_rule_fwd(p, o, ht);
  return cpu::gated_delta_rule_fwd(p, o, ht);
}

void backward_pass(BackwardContext& ctx, DeltaRuleProblem p, bool final_state, bool recompute) {
  p.q = ctx.saved(0), p.k = ctx.saved(1), p.v = ctx.saved(2);
  p.g = ctx.saved(3), p.beta = ctx.saved(4);
  p.A_log = ctx.saved(10), p.dt_bias = ctx.saved(11);
  DeltaRuleSaved saved{ctx.saved(5), ctx.saved(6), ctx.saved(7), ctx.saved(8)};
  if (recompute) {
    p.h0 = ctx.saved(9);
    saved = forward_pass(p, Tensor::empty(p.v.shape(), p.v.dtype(), p.v.device()), Tensor());
  }
  const auto wanted = [&](int i, const Tensor& like) {
    return ctx.needs(i) ? Tensor::empty(like.shape(), like.dtype(), like.device()) : Tensor();
  };
  DeltaRuleGradients grads;
  if (p.in_place && p.heads() == p.value_heads() && ctx.needs(0) && ctx.needs(1) && ctx.needs(2) &&
      neighbours(p.q, p.k, p.v))
    neighbouring_gradients(p.q.shape(), p.v.shape(), p.q, grads);
  if (!grads.dq) grads.dq = wanted(0, p.q), grads.dk = wanted(1, p.k), grads.dv = wanted(2, p.v);
  grads.dg = wanted(3, p.g), grads.dbeta = wanted(4, p.beta);
  grads.dh0 = ctx.needs(5) ? empty_state(p) : Tensor();
  grads.dA_log = wanted(6, p.A_log), grads.ddt_bias = wanted(7, p.dt_bias);
  const Tensor d_o = ctx.dy(0).contiguous();
  const Tensor dht = final_state && ctx.has_dy(1) ? ctx.dy(1).contiguous() : Tensor();
  if (kWithCuda && d_o.on_cuda())
    gpu::gated_delta_rule_bwd(p, saved, d_o, dht, grads);
  else
    cpu::gated_delta_rule_bwd(p, saved, d_o, dht, grads);
  const Tensor* all[] = {&grads.dq,    &grads.dk,  &grads.dv,     &grads.dg,
                         &grads.dbeta, &grads.dh0, &grads.dA_log, &grads.ddt_bias};
  for (int i = 0; i < 8; ++i)
    if (all[i]->defined()) ctx.grad(i, *all[i]);
}

}  // namespace

DeltaRuleOutput gated_delta_rule(const Var& q, const Var& k, const Var& v, const Var& g,
                                 const Var& beta, const Var& h0, const DeltaRuleOptions& options) {
  Inputs in{q, k, v, g, beta, h0, options.A_log, options.dt_bias};
  const bool fused = fuses(in, options.chunk);
  if (!fused) in = composed(in, options);
  const OpScope scope(kOp);
  const DeltaRuleProblem p = fused ? fused_problem(in, options) : dense_problem(in, options);
  const Tensor o = Tensor::empty(p.v.shape(), p.v.dtype(), p.v.device());
  const Tensor ht = options.want_final_state ? empty_state(p) : Tensor();
  DeltaRuleSaved saved = forward_pass(p, o, ht);
  Tensor start;
  if (options.recompute) saved = {}, start = p.h0;
  const std::vector<Var> out = record(
      kOp, {in.q, in.k, in.v, in.g, in.beta, in.h0, in.A_log, in.dt_bias},
      {p.q, p.k, p.v, p.g, p.beta, saved.a, saved.states, saved.values, saved.gates, start, p.A_log,
       p.dt_bias},
      {o, ht},
      [sizes = sizes_of(p), final_state = options.want_final_state, recompute = options.recompute](
          BackwardContext& ctx) { backward_pass(ctx, sizes, final_state, recompute); });
  return {out[0], out[1]};
}

Tensor gated_delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                             const Tensor& beta, const Tensor& state,
                             const DeltaRuleOptions& options) {
  constexpr const char* op = "gated_delta_rule_step";
  const OpScope scope(op);
  check_step(op, q, k, v, state, options);
  check_same_device(op, q, {&g, &beta});
  const Shape gates = v.shape().first(2);
  check_logits(op, "g", g, options.A_log.defined(), gates, v);
  check_logits(op, "beta", beta, options.sigmoid, gates, v);
  const Tensor o = Tensor::empty(v.shape(), v.dtype(), v.device());
  if (kWithCuda && q.on_cuda()) {
    DeltaRuleStep p = step_of(op, q, k, v, g, options);
    p.beta = as_rows(beta);
    state.bump_version();  // before writing: read-only memory is refused here
    gpu::delta_rule_step(p, state, o);
    return o;
  }
  const NoGrad off;
  const Inputs in = composed({q, k, v, g, beta, {}}, options);
  state.bump_version();
  cpu::gated_delta_rule_step(in.q.value().contiguous(), in.k.value().contiguous(), v.contiguous(),
                             in.g.value().contiguous(), in.beta.value().contiguous(), state,
                             options.scale, o);
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
