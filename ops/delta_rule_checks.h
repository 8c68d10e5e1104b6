// What the members of the delta family check and prepare alike (ops/delta_rule.cpp,
// ops/delta_rule_channel.cpp).
#pragma once
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
  return Tensor::empty({p.sequences(), p.value_heads(), p.key_dim(), p.value_dim()}, p.g.dtype(),
                       p.g.device());
}

// What backward captures: the problem without its tensors; the layout's offsets are an index.
inline DeltaRuleProblem sizes_of(const DeltaRuleProblem& p) {
  DeltaRuleProblem sizes;
  sizes.scale = p.scale, sizes.layout = p.layout, sizes.chunk = p.chunk;
  return sizes;
}

// The parts of the options that are operators of their own.
inline Var normalized(const Var& x, const DeltaRuleOptions& options) {
  return options.normalize_qk ? l2_norm(x) : x;
}
inline Var log_decay(const char* op, const Var& g, const DeltaRuleOptions& options) {
  if (options.A_log.defined())
    return decay_gate(g, options.A_log, options.dt_bias, {.lower_bound = options.lower_bound});
  check(!options.dt_bias.defined() && options.lower_bound == 0,
        "{}: dt_bias and lower_bound belong to a raw gate; A_log is undefined", op);
  return g;
}
inline Var strength(const char* op, const Var& beta, double scale,
                    const DeltaRuleOptions& options) {
  if (options.sigmoid) return sigmoid_gate(beta, scale);
  check(options.beta_scale == 1, "{}: beta_scale is {}; it belongs to sigmoid = true", op,
        options.beta_scale);
  return beta;
}

}  // namespace ebb::delta_rule
