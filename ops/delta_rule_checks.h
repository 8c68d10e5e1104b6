// What the members of the delta family check and prepare alike (ops/delta_rule.cpp,
// ops/delta_rule_channel.cpp).
#pragma once
#include <cmath>
#include <utility>

#include "ops/common.h"
#include "ops/decay_gate.h"
#include "ops/delta_rule.h"
#include "ops/l2_norm.h"
#include "ops/sigmoid_gate.h"

namespace ebb::delta_rule {

inline void check_gate(const char* op, const char* what, const Tensor& t, const Shape& want,
                       const Tensor& v) {
  check_shape(op, what, t, want);
  const DType dtype = accumulate_type(v.dtype());
  check(t.dtype() == dtype, "{}: {} is {}, want {} beside {} values", op, what, t.dtype(), dtype,
        v.dtype());
}

// Everything about q, k, v that does not depend on which dimensions lead: q is [...,H,K]. `q_name`:
// what the operator calls it.
inline void check_heads(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, int dims,
                        const char* q_name = "q") {
  check_defined(op, q_name, q);
  check_defined(op, "k", k);
  check_defined(op, "v", v);
  check_compute_dtype(op, q_name, q);
  check(q.dim() == dims, "{}: {} is {}, want {} dimensions", op, q_name, q.shape(), dims);
  check(k.shape() == q.shape(), "{}: k is {}, want {} as {}", op, k.shape(), q.shape(), q_name);
  check(v.dim() == dims && v.shape().first(dims - 2) == q.shape().first(dims - 2),
        "{}: v is {}, {} is {}; want the same sizes before the heads", op, v.shape(), q_name,
        q.shape());
  check(k.dtype() == q.dtype() && v.dtype() == q.dtype(),
        "{}: {} is {}, k {}, v {}; want one dtype", op, q_name, q.dtype(), k.dtype(), v.dtype());
  const int64_t heads = q.size(-2), value_heads = v.size(-2);
  check(heads >= 1 && value_heads >= 1 && value_heads % heads == 0,
        "{}: {} value heads over {} {}/k heads; want a multiple", op, value_heads, heads, q_name);
  for (const auto& [name, size] : {std::pair{"K", q.size(-1)}, std::pair{"V", v.size(-1)}})
    check(size >= 1 && size <= 256, "{}: head size {} is {}, want 1...256", op, name, size);
}

// shape, with one more dimension.
inline Shape wider(Shape shape, int64_t width) {
  shape.push_back(width);
  return shape;
}

// Chunk, layout and h0; q, k, v of `p` are set and g is checked.
inline void check_sequences(const char* op, DeltaRuleProblem& p, const Tensor& h0,
                            const DeltaRuleOptions& options) {
  const int64_t c = options.chunk;
  check(c == 16 || c == 32 || c == 64 || c == 128, "{}: chunk is {}, want 16, 32, 64 or 128", op,
        c);
  options.layout.check_covers(op, p.batch(), p.time(), p.q.device());
  p.scale = options.scale;
  p.layout = options.layout;
  p.chunk = c;
  if (!h0.defined()) return;
  check_gate(op, "h0", h0, {p.sequences(), p.value_heads(), p.key_dim(), p.value_dim()}, p.v);
  p.h0 = h0.contiguous();
}

inline Tensor empty_state(const DeltaRuleProblem& p) {
  return Tensor::empty({p.sequences(), p.value_heads(), p.key_dim(), p.value_dim()},
                       accumulate_type(p.v.dtype()), p.v.device());
}

// What backward captures: the problem without its tensors; the layout's offsets are an index.
inline DeltaRuleProblem sizes_of(const DeltaRuleProblem& p) {
  DeltaRuleProblem sizes;
  sizes.scale = p.scale, sizes.layout = p.layout, sizes.chunk = p.chunk;
  sizes.in_place = p.in_place, sizes.normalize = p.normalize, sizes.sigmoid = p.sigmoid;
  sizes.beta_scale = p.beta_scale, sizes.lower_bound = p.lower_bound;
  return sizes;
}

// A gate, or its logits of any dtype.
inline void check_logits(const char* op, const char* what, const Tensor& t, bool raw,
                         const Shape& want, const Tensor& v) {
  if (!raw) return check_gate(op, what, t, want, v);
  check_shape(op, what, t, want);
  check_compute_dtype(op, what, t);
}
// What the options ask for belongs to logits that must be there.
inline void check_raw_options(const char* op, const DeltaRuleOptions& options) {
  check(options.A_log.defined() || (!options.dt_bias.defined() && options.lower_bound == 0),
        "{}: dt_bias and lower_bound belong to a raw gate; A_log is undefined", op);
  check(options.lower_bound <= 0, "{}: lower_bound is {}; a log decay is negative, want < 0", op,
        options.lower_bound);
  check(options.sigmoid || options.beta_scale == 1,
        "{}: beta_scale is {}; it belongs to sigmoid = true", op, options.beta_scale);
  check(std::isfinite(options.beta_scale), "{}: beta_scale is {}, want a finite number", op,
        options.beta_scale);
}
// A parameter of the gate, in f32 in every precision mode; it may be absent.
inline Tensor gate_parameter(const char* op, const char* what, const Tensor& t, const Shape& want,
                             const Tensor& v) {
  if (!t) return {};
  check_shape(op, what, t, want);
  check(t.dtype() == DType::f32 || t.dtype() == DType::f64,
        "{}: {} {} is {}; gate parameters stay f32", op, what, t.shape(), t.dtype());
  return t.to(accumulate_type(v.dtype())).contiguous();
}
// [HV·K] of a bias [HV·K] or [HV,K].
inline Tensor channel_bias(const char* op, const Tensor& t, int64_t heads, int64_t channels,
                           const Tensor& v) {
  const Tensor flat = t && t.dim() == 2 && t.size(0) == heads ? t.contiguous().flatten(0, 1) : t;
  return gate_parameter(op, "dt_bias", flat, {heads * channels}, v);
}

// One token: everything but the gates.
inline void check_step(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& state, const DeltaRuleOptions& options) {
  check_raw_options(op, options);
  check_heads(op, q, k, v, 3);
  check_gate(op, "state", state, {v.size(0), v.size(1), q.size(2), v.size(2)}, v);
  check_same_device(op, q, {&k, &v, &state, &options.A_log.value(), &options.dt_bias.value()});
  check(state.is_contiguous(), "{}: the state {} is updated in place and must be dense", op,
        state.shape());
}
// For the GPU, without beta or erase and write; g is [B,HV] or [B,HV,K].
inline DeltaRuleStep step_of(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& g, const DeltaRuleOptions& options) {
  const int64_t heads = v.size(1);
  DeltaRuleStep p{.q = as_rows(q, 2), .k = as_rows(k, 2), .v = as_rows(v, 2), .heads = q.size(1)};
  p.by_channel = g.dim() == 3;
  p.g = as_rows(g, p.by_channel ? 2 : 1);
  p.scale = options.scale, p.normalize = options.normalize_qk, p.sigmoid = options.sigmoid;
  p.beta_scale = options.beta_scale, p.lower_bound = options.lower_bound;
  p.A_log = gate_parameter(op, "A_log", options.A_log.value(), {heads}, v);
  const Tensor& bias = options.dt_bias.value();
  p.dt_bias = p.by_channel ? channel_bias(op, bias, heads, g.size(2), v)
                           : gate_parameter(op, "dt_bias", bias, {heads}, v);
  return p;
}

// The parts of the options that are operators of their own.
inline Var normalized(const Var& x, const DeltaRuleOptions& options) {
  return options.normalize_qk ? l2_norm(x) : x;
}
inline Var log_decay(const char* op, const Var& g, const DeltaRuleOptions& options) {
  check_raw_options(op, options);
  return options.A_log.defined()
             ? decay_gate(g, options.A_log, options.dt_bias, {.lower_bound = options.lower_bound})
             : g;
}
inline Var strength(const Var& beta, double scale, const DeltaRuleOptions& options) {
  return options.sigmoid ? sigmoid_gate(beta, scale) : beta;
}

}  // namespace ebb::delta_rule
