#include "ops/delta_rule_channel.h"

#include <cmath>

#include "ops/delta_rule_checks.h"
#include "ops/delta_rule_inputs.h"

namespace ebb {
namespace {

using namespace delta_rule;

// beta, or erase and write: the others are undefined.
struct Gates {
  Var g, beta, erase, write;
};

// `options`: those that say which are logits; null: none.
void check_gates(const char* op, const Gates& gates, const Tensor& v, int64_t key_dim,
                 const DeltaRuleOptions* options = nullptr) {
  const Shape heads = v.shape().first(v.dim() - 1);
  const bool raw = options && options->A_log.defined(), sigmoid = options && options->sigmoid;
  check_logits(op, "g", gates.g.value(), raw, wider(heads, key_dim), v);
  if (gates.beta.defined()) return check_logits(op, "beta", gates.beta.value(), sigmoid, heads, v);
  check_logits(op, "b", gates.erase.value(), sigmoid, wider(heads, key_dim), v);
  check_logits(op, "w", gates.write.value(), sigmoid, v.shape(), v);
}

// The options as operators of their own.
Gates composed(const char* op, Gates gates, const DeltaRuleOptions& options) {
  gates.g = log_decay(op, gates.g, options);
  for (Var* gate : {&gates.beta, &gates.erase})
    if (gate->defined()) *gate = strength(*gate, options.beta_scale, options);
  if (gates.write.defined()) gates.write = strength(gates.write, 1, options);
  return gates;
}

// The problem's tensors apart from what they were made of, where that is not the kernels' work.
struct Made {
  Tensor q_length, k_length;     // reciprocal lengths
  Tensor z, beta, erase, write;  // logits
  Tensor A_log, dt_bias;         // [HV], [HV·K]
};

// Which parts of the options the kernels take on themselves.
struct InKernels {
  bool rows = false;  // v may lie apart
  bool lengths = false, decays = false, strengths = false;

  bool any() const { return lengths || decays || strengths; }
};
InKernels in_kernels(const Tensor& q, const Tensor& v, const Gates& gates,
                     const DeltaRuleOptions& options) {
  DeltaRuleProblem sizes;
  sizes.q = q, sizes.v = v, sizes.chunk = options.chunk;
  if (!kWithCuda || !v.on_cuda() || !gpu::channel_delta_rule_reads_rows(sizes)) return {};
  const auto half = [](const Var& x) { return !x.defined() || x.value().dtype() == DType::bf16; };
  const bool strengths = options.sigmoid && half(gates.erase) && half(gates.write);
  InKernels in{.rows = true};
  if (gates.erase.defined() && !strengths) return in;
  in.lengths = options.normalize_qk && gpu::channel_delta_rule_normalizes(sizes);
  in.decays = options.A_log.defined() && half(gates.g);
  in.strengths = strengths;
  return in;
}

Tensor aligned_dense(const Tensor& t) {
  if (!t) return t;
  const Tensor dense = t.contiguous();
  return reinterpret_cast<uintptr_t>(dense.raw()) % 16 == 0 ? dense : dense.clone();
}

void take_rows(const Tensor& q, const Tensor& k, bool normalize, bool in_place, DeltaRuleProblem& p,
               Made& made) {
  if (normalize) {
    p.q = unit_rows_of(q, &made.q_length), p.k = unit_rows_of(k, &made.k_length);
  } else if (in_place) {
    p.q = token_rows(q), p.k = token_rows(k);
    if (token_step(p.q) != token_step(p.k)) p.q = q.clone(), p.k = k.clone();
  } else {
    p.q = q.contiguous(), p.k = k.contiguous();
  }
}
void take_decays(const char* op, const Tensor& g, bool in_kernel, const DeltaRuleOptions& options,
                 DeltaRuleProblem& p, Made& made) {
  if (!options.A_log.defined()) return void(p.g = p.in_place ? aligned_dense(g) : g.contiguous());
  const int64_t heads = p.v.size(2);
  const Tensor A_log = gate_parameter(op, "A_log", options.A_log.value(), {heads}, p.v);
  const Tensor bias = channel_bias(op, options.dt_bias.value(), heads, g.size(3), p.v);
  if (in_kernel) {
    p.g = token_rows(g), p.A_log = A_log, p.dt_bias = aligned_dense(bias);
    return;
  }
  made.A_log = A_log, made.dt_bias = bias;
  const DecayGateArgs in = decay_arguments(g, made.A_log, made.dt_bias, options.lower_bound);
  made.z = in.a.t;
  p.g = decays_of(in, g.shape());
}
void take_strengths(const Gates& gates, const DeltaRuleOptions& options, DeltaRuleProblem& p,
                    Made& made) {
  const auto take = [&](const Var& from, double scale, Tensor& raw, Tensor& to) {
    if (!from.defined()) return;
    const Tensor& x = from.value();
    if (p.sigmoid) return void(to = x.dim() == 4 ? token_rows(x) : as_rows(x).t);
    if (!options.sigmoid) return void(to = p.in_place ? aligned_dense(x) : x.contiguous());
    raw = as_rows(x, x.dim() - 2).t;
    to = strengths_of(raw, scale);
  };
  take(gates.beta, options.beta_scale, made.beta, p.beta);
  take(gates.erase, options.beta_scale, made.erase, p.erase);
  take(gates.write, 1, made.write, p.write);
}

// With the options as far as the kernels take them. The rest is finished, and what it was made of
// left in `made`.
DeltaRuleProblem problem_of(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Gates& gates, const DeltaRuleOptions& options, Made& made) {
  const InKernels kernels = in_kernels(q, v, gates, options);
  DeltaRuleProblem p;
  p.chunk = options.chunk;
  p.v = kernels.rows ? token_rows(v) : v.contiguous();
  p.in_place = kernels.any(), p.normalize = kernels.lengths, p.sigmoid = kernels.strengths;
  p.beta_scale = options.beta_scale, p.lower_bound = options.lower_bound;
  take_rows(q, k, options.normalize_qk && !kernels.lengths, p.in_place, p, made);
  take_decays(op, gates.g.value(), kernels.decays, options, p, made);
  take_strengths(gates, options, p, made);
  return p;
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

// What backward captures.
struct Recorded {
  DeltaRuleProblem sizes;
  bool final_state, recompute;
  bool neighbours;  // q, k and v were columns of one matrix
  Shape bias;       // of dt_bias as given
};
// Inputs of the node, and the first of its saved tensors that only logits have.
enum Input { kQ, kK, kV, kG, kBeta, kErase, kWrite, kH0, kALog, kBias };
constexpr int kFirstMade = 15;

Tensor empty_of(const Tensor& like) {
  return Tensor::empty(like.shape(), like.dtype(), like.device());
}

// Gradients of finished inputs become those of what they were made of.
void pass_on(BackwardContext& ctx, const DeltaRuleProblem& p, const Made& made, const Recorded& r,
             DeltaRuleGradients grads, DeltaRuleGradients& columns) {
  if (made.q_length) {
    const auto rows = [&](const Tensor& y, const Tensor& length, Tensor& dy, const Tensor& place) {
      if (!dy) return;
      const Tensor dx = place ? place : empty_of(y);
      unit_rows_gradient(y, length, dy, dx);
      dy = dx;
    };
    rows(p.q, made.q_length, grads.dq, columns.dq);
    rows(p.k, made.k_length, grads.dk, columns.dk);
  }
  if (made.z) {
    const DecayGateGrads out{.da = ctx.needs(kG) ? empty_of(made.z) : Tensor(),
                             .dA_log = ctx.needs(kALog) ? empty_of(made.A_log) : Tensor(),
                             .ddt_bias = ctx.needs(kBias) ? empty_of(made.dt_bias) : Tensor()};
    if (grads.dg)
      decays_gradient(decay_arguments(made.z, made.A_log, made.dt_bias, r.sizes.lower_bound),
                      grads.dg, out);
    grads.dg = out.da;
    if (out.dA_log) ctx.grad(kALog, out.dA_log);
    if (out.ddt_bias) ctx.grad(kBias, out.ddt_bias.view(r.bias));
  }
  const auto strength = [](const Tensor& raw, double scale, Tensor& dy) {
    if (raw && dy) dy = strengths_gradient(raw, scale, dy);
  };
  if (grads.dA_log) ctx.grad(kALog, grads.dA_log);
  if (grads.ddt_bias) ctx.grad(kBias, grads.ddt_bias.view(r.bias));
  strength(made.beta, r.sizes.beta_scale, grads.dbeta);
  strength(made.erase, r.sizes.beta_scale, grads.derase);
  strength(made.write, 1, grads.dwrite);
  const Tensor* all[] = {&grads.dq,    &grads.dk,     &grads.dv,     &grads.dg,
                         &grads.dbeta, &grads.derase, &grads.dwrite, &grads.dh0};
  for (int i = 0; i < 8; ++i)
    if (all[i]->defined()) ctx.grad(i, *all[i]);
}

void backward_pass(BackwardContext& ctx, const Recorded& r) {
  DeltaRuleProblem p = r.sizes;
  p.q = ctx.saved(0), p.k = ctx.saved(1), p.v = ctx.saved(2), p.g = ctx.saved(3);
  p.beta = ctx.saved(4), p.erase = ctx.saved(5), p.write = ctx.saved(6);
  DeltaRuleSaved saved{ctx.saved(7), ctx.saved(8), ctx.saved(9), ctx.saved(10), ctx.saved(11)};
  const auto made_of = [&](int i) { return ctx.saved(kFirstMade + i); };
  const Made made{made_of(0), made_of(1), made_of(2), made_of(3),
                  made_of(4), made_of(5), made_of(6), made_of(7)};
  p.A_log = ctx.saved(13), p.dt_bias = ctx.saved(14);
  if (r.recompute) {
    p.h0 = ctx.saved(12);
    saved = forward_pass(p, empty_of(p.v), Tensor());
  }
  const auto wanted = [&](bool on, const Tensor& like) { return on ? empty_of(like) : Tensor(); };
  const bool gates = ctx.needs(kG) || (made.z && (ctx.needs(kALog) || ctx.needs(kBias)));
  DeltaRuleGradients columns;
  if (r.neighbours && ctx.needs(kQ) && ctx.needs(kK) && ctx.needs(kV))
    neighbouring_gradients(p.q.shape(), p.v.shape(), p.q, columns);
  const bool keys = columns.dq && !made.q_length;  // else their own way back puts them there
  DeltaRuleGradients grads{keys ? columns.dq : wanted(ctx.needs(kQ), p.q),
                           keys ? columns.dk : wanted(ctx.needs(kK), p.k),
                           columns.dv ? columns.dv : wanted(ctx.needs(kV), p.v),
                           wanted(gates, p.g),
                           wanted(ctx.needs(kBeta), p.beta),
                           ctx.needs(kH0) ? empty_state(p) : Tensor()};
  grads.derase = wanted(ctx.needs(kErase), p.erase);
  grads.dwrite = wanted(ctx.needs(kWrite), p.write);
  grads.dA_log = wanted(p.A_log && ctx.needs(kALog), p.A_log);
  grads.ddt_bias = wanted(p.dt_bias && ctx.needs(kBias), p.dt_bias);
  const Tensor d_o = ctx.dy(0).contiguous();
  const Tensor dht = r.final_state && ctx.has_dy(1) ? ctx.dy(1).contiguous() : Tensor();
  if (kWithCuda && d_o.on_cuda())
    gpu::channel_delta_rule_bwd(p, saved, d_o, dht, grads);
  else
    cpu::channel_delta_rule_bwd(p, saved, d_o, dht, grads);
  pass_on(ctx, p, made, r, grads, columns);
}

DeltaRuleOutput channel_delta_rule(const char* op, const Var& q, const Var& k, const Var& v,
                                   const Gates& gates, const Var& h0,
                                   const DeltaRuleOptions& options) {
  const OpScope scope(op);
  check_raw_options(op, options);
  check_heads(op, q.value(), k.value(), v.value(), 4);
  check_gates(op, gates, v.value(), q.size(-1), &options);
  check_same_device(
      op, q.value(),
      {&k.value(), &v.value(), &gates.g.value(), &gates.beta.value(), &gates.erase.value(),
       &gates.write.value(), &h0.value(), &options.A_log.value(), &options.dt_bias.value()});
  Made made;
  DeltaRuleProblem p = problem_of(op, q.value(), k.value(), v.value(), gates, options, made);
  check_sequences(op, p, h0.value(), options);
  const Tensor o = empty_of(p.v);
  const Tensor ht = options.want_final_state ? empty_state(p) : Tensor();
  DeltaRuleSaved saved = forward_pass(p, o, ht);
  Tensor start;
  if (options.recompute) saved = {}, start = p.h0;
  // Rows that lie apart have been taken as they are: then dv may lie apart, too.
  const bool apart = p.v.storage() == v.value().storage() && !p.v.is_contiguous();
  const bool keys_apart = made.q_length || (p.in_place && p.heads() == p.value_heads());
  Recorded r{sizes_of(p), options.want_final_state, options.recompute,
             apart && keys_apart && neighbours(q.value(), k.value(), v.value()),
             options.dt_bias.defined() ? options.dt_bias.shape() : Shape{}};
  const std::vector<Var> out = record(
      op,
      {q, k, v, gates.g, gates.beta, gates.erase, gates.write, h0, options.A_log, options.dt_bias},
      {p.q,       p.k,        p.v,          p.g,           p.beta,        p.erase,
       p.write,   saved.a,    saved.states, saved.values,  saved.gates,   saved.scores,
       start,     p.A_log,    p.dt_bias,    made.q_length, made.k_length, made.z,
       made.beta, made.erase, made.write,   made.A_log,    made.dt_bias},
      {o, ht}, [r](BackwardContext& ctx) { backward_pass(ctx, r); });
  return {out[0], out[1]};
}

Tensor channel_step(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, Gates gates,
                    const Tensor& state, const DeltaRuleOptions& options) {
  const OpScope scope(op);
  const NoGrad off;
  check_step(op, q, k, v, state, options);
  check_same_device(
      op, q, {&gates.g.value(), &gates.beta.value(), &gates.erase.value(), &gates.write.value()});
  const Tensor o = Tensor::empty(v.shape(), v.dtype(), v.device());
  if (kWithCuda && o.on_cuda()) {
    check_gates(op, gates, v, q.size(-1), &options);
    const auto rows = [](const Var& gate, int inner) {
      return gate.defined() ? as_rows(gate.value(), inner) : Rows();
    };
    DeltaRuleStep p = step_of(op, q, k, v, gates.g.value(), options);
    p.beta = rows(gates.beta, 1), p.erase = rows(gates.erase, 2), p.write = rows(gates.write, 2);
    state.bump_version();  // before writing: read-only memory is refused here
    gpu::delta_rule_step(p, state, o);
    return o;
  }
  gates = composed(op, gates, options);
  check_gates(op, gates, v, q.size(-1));
  DeltaRuleProblem p =
      dense_problem(normalized(q, options).value(), normalized(k, options).value(), v, gates);
  for (Tensor* t : {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.erase, &p.write})
    if (t->defined()) *t = t->unsqueeze(1);
  p.scale = options.scale;
  state.bump_version();
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
                const Tensor& beta, const Tensor& state, const DeltaRuleOptions& options) {
  check_defined("kda_step", "beta", beta);
  return channel_step("kda_step", q, k, v, {g, beta, {}, {}}, state, options);
}

Tensor gdn2_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                 const Tensor& b, const Tensor& w, const Tensor& state,
                 const DeltaRuleOptions& options) {
  check_defined("gdn2_step", "b", b);
  check_defined("gdn2_step", "w", w);
  return channel_step("gdn2_step", q, k, v, {g, {}, b, w}, state, options);
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
