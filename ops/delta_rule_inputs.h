// What lies between the inputs of the delta family and finished ones: q, k and v in rows that may
// lie apart, and what the options make of q, k and the logits of the gates, with the way back: the
// operators of ops/l2_norm.h, ops/decay_gate.h and ops/sigmoid_gate.h on tensors, for members that
// record the whole as one node.
#pragma once
#include <limits>

#include "ops/common.h"
#include "ops/decay_gate.h"
#include "ops/delta_rule.h"
#include "ops/l2_norm.h"
#include "ops/norm_rows.h"
#include "ops/sigmoid_gate.h"

namespace ebb::delta_rule {

// [B,T,H,D] whose tokens may lie apart, if the kernels can read it so; else dense.
inline Tensor token_rows(const Tensor& t) {
  Rows r;
  const bool in_place = rows_in_place(t, 2, &r) && rows_aligned(r, 16 / item_size(t.dtype()));
  const bool apart = r.stride >= r.width && r.stride <= std::numeric_limits<int>::max();
  return in_place && (r.count <= 1 || apart) ? t : t.clone();
}
inline int64_t token_step(const Tensor& t) {
  const Rows r = as_rows(t, 2);
  return r.count > 1 ? r.stride : r.width;
}

// Where q, k and v are neighbouring columns of one matrix, their gradients can be so too: what cut
// the matrix into columns then has nothing to put together again (ops/movement.h).
inline bool neighbours(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (q.numel() == 0 || v.numel() == 0) return false;
  const int64_t keys = q.size(2) * q.size(3), step = 2 * keys + v.size(2) * v.size(3);
  return q.storage() == k.storage() && q.storage() == v.storage() &&
         k.offset() == q.offset() + keys && v.offset() == k.offset() + keys &&
         token_step(q) == step && token_step(k) == step && token_step(v) == step;
}
inline void neighbouring_gradients(const Shape& qk, const Shape& v, const Tensor& like,
                                   DeltaRuleGradients& grads) {
  const int64_t keys = qk[2] * qk[3], step = 2 * keys + v[2] * v[3];
  const Tensor all = Tensor::empty({qk[0], qk[1], step}, like.dtype(), like.device());
  const auto columns = [&](const Shape& shape, int64_t first) {
    return Tensor::wrap(all.storage(), all.dtype(), shape, {shape[1] * step, step, shape[3], 1},
                        all.offset() + first);
  };
  grads.dq = columns(qk, 0), grads.dk = columns(qk, keys), grads.dv = columns(v, 2 * keys);
}

// Rows [...,H,D] of length 1, dense, from rows of tokens that may lie apart; r: what they were
// multiplied with.
inline Tensor unit_rows_of(const Tensor& x, Tensor* r) {
  constexpr RowForm kForm{2, 1};
  const Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device()), rows = to_rows(x, kForm);
  *r = row_statistics(rows);
  const auto run = kWithCuda && x.on_cuda() ? gpu::l2_norm_fwd : cpu::l2_norm_fwd;
  run(rows, 1e-6f, to_rows(y, kForm), *r);
  return y;
}
// dx, whose tokens may lie apart too, from dy.
inline void unit_rows_gradient(const Tensor& y, const Tensor& r, const Tensor& dy,
                               const Tensor& dx) {
  constexpr RowForm kForm{2, 1};
  const auto run = kWithCuda && y.on_cuda() ? gpu::l2_norm_bwd : cpu::l2_norm_bwd;
  run(to_rows(y, kForm), r, to_rows(dy, kForm), to_rows(dx, kForm));
}

// Log decays per channel from z [...,HV,K]; dt_bias [HV·K] or undefined.
inline DecayGateArgs decay_arguments(const Tensor& z, const Tensor& A_log, const Tensor& dt_bias,
                                     double lower_bound) {
  return {as_rows(z, 2), A_log, dt_bias, lower_bound};
}
inline Tensor decays_of(const DecayGateArgs& in, const Shape& shape) {
  const Tensor g = Tensor::empty(shape, accumulate_type(in.a.t.dtype()), in.a.t.device());
  const auto run = kWithCuda && g.on_cuda() ? gpu::decay_gate_fwd : cpu::decay_gate_fwd;
  run(in, g);
  return g;
}
inline void decays_gradient(const DecayGateArgs& in, const Tensor& dg, const DecayGateGrads& out) {
  const auto run = kWithCuda && dg.on_cuda() ? gpu::decay_gate_bwd : cpu::decay_gate_bwd;
  run(in, dg, out);
}

// scale·σ(x), dense, and its gradient; x [B,T,...].
inline Tensor strengths_of(const Tensor& x, double scale) {
  const Tensor y = Tensor::empty(x.shape(), accumulate_type(x.dtype()), x.device());
  const auto run = kWithCuda && x.on_cuda() ? gpu::sigmoid_gate_fwd : cpu::sigmoid_gate_fwd;
  run(as_rows(x, x.dim() - 2), scale, y);
  return y;
}
inline Tensor strengths_gradient(const Tensor& x, double scale, const Tensor& dy) {
  const Tensor dx = Tensor::empty(x.shape(), x.dtype(), x.device());
  const auto run = kWithCuda && x.on_cuda() ? gpu::sigmoid_gate_bwd : cpu::sigmoid_gate_bwd;
  run(as_rows(x, x.dim() - 2), scale, dy, dx);
  return dx;
}

}  // namespace ebb::delta_rule
