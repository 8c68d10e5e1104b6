// Structured state space duality: the selective recurrence of Mamba-2 (models.md 4.1, 7.4). Per
// sequence and head, with group = h / (H/G),
//   Δ_t = clamp(softplus(dt_t + dt_bias), dt_min, dt_max)
//   S_t = e^{A Δ_t} S_{t−1} + Δ_t B_t x_tᵀ        y_t = S_tᵀ C_t + D x_t
//
//   SsdOutput r = ssd(x, dt, A, B, C, {}, {.D = D, .dt_bias = bias});
//   SsdOutput p = ssd(x, dt, A_log, B, C, h0, {.dt_bias = bias, .log_A = true,
//                                              .want_final_state = true, .memory_chunk = 256});
//
// x [B,T,H,P] and B, C [B,T,G,N], H a multiple of G: f32, f64 (CPU) or bf16 (CUDA), any strides.
// dt [B,T,H] in x's dtype or f32 beside bf16. A [H] <= 0, or A_log with A = −e^{A_log}; D and
// dt_bias [H], each may be absent; h0 [Nseq,H,N,P]: f32 (f64 beside f64). A, D, dt_bias are f32 in
// every precision mode, Δ and all sums too. A positive A is an Error on the CPU and raises
// DeviceFlag::positive_decay on the GPU. Returns y in x's dtype and, if asked for, the final states
// and the contributions of each run of memory_chunk tokens, as ops/gated_linear_attention.h, which
// computes it from C, B, x, A Δ and Δ. Differentiable in all inputs; where Δ is clamped its
// gradient stops. With v_t the gradient of Δ_t x_t:
//   dx = Δ v + D dy   dΔ = x·v + A da   ddt = dΔ σ(dt + dt_bias)   dA = Σ Δ da   dD = Σ x·dy
// da the gradient of A Δ; dA_log = A dA. Sums over tokens in f64 (CPU) or ordered f32 partial sums.
#pragma once
#include <limits>

#include "ops/gated_linear_attention.h"
#include "ops/rows.h"

namespace ebb {

struct SsdOptions {
  Var D = {};        // [H]; undefined: 0
  Var dt_bias = {};  // [H]; undefined: 0
  bool softplus = true;
  double dt_min = 0, dt_max = std::numeric_limits<double>::infinity();  // limits of Δ
  bool log_A = false;                                                   // A is A_log
  bool want_final_state = false;                                        // else ht stays undefined
  SeqLayout layout = {};
  int64_t chunk = 64;               // only rounding depends on it
  int64_t memory_chunk = 0;         // S; 0: contributions stay undefined
  bool wide_contributions = false;  // f32 beside bf16
};
struct SsdOutput {
  Var y;              // [B,T,H,P]
  Var ht;             // [Nseq,H,N,P]
  Var contributions;  // [M,H,N,P]
};
SsdOutput ssd(const Var& x, const Var& dt, const Var& A, const Var& B, const Var& C,
              const Var& h0 /*may be undefined*/, const SsdOptions& options = {});

// One token of decoding, nothing recorded: x [B,H,P], dt [B,H], B, C [B,G,N] and the state
// [B,H,N,P] (f32; f64 beside f64; dense), which is updated in place. Returns y [B,H,P]. Of the
// options D, dt_bias, softplus, dt_min, dt_max and log_A count.
Tensor ssd_step(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                const Tensor& C, const Tensor& state, const SsdOptions& options = {});

// Floors as gated_linear_attention_cost, dt included.
Cost ssd_cost(Pass pass, const LinearAttentionSize& s, DType dtype, bool saves = true);
Cost ssd_step_cost(const LinearAttentionSize& s, DType dtype);

// Δ and A Δ, [tokens,H] f32 (f64), dense, from SsdGateArgs.
struct SsdGateGrads {  // undefined: not wanted. Overwritten.
  Tensor ddt = {}, dA = {}, dbias = {};
};
namespace cpu {
void ssd_gate_fwd(const SsdGateArgs& in, const Tensor& step, const Tensor& decay);
void ssd_gate_bwd(const SsdGateArgs& in, const Tensor& dstep, const Tensor& ddecay,
                  const SsdGateGrads& out);
}  // namespace cpu
namespace gpu {
void ssd_gate_fwd(const SsdGateArgs& in, const Tensor& step, const Tensor& decay);
void ssd_gate_bwd(const SsdGateArgs& in, const Tensor& dstep, const Tensor& ddecay,
                  const SsdGateGrads& out);
// One kernel: Δ, the state, y. D may be undefined.
void ssd_step(const SsdGateArgs& gate, const Tensor& x, const Tensor& B, const Tensor& C,
              const Tensor& D, const Tensor& state, const Tensor& y);
}  // namespace gpu

}  // namespace ebb
