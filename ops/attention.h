// Causal softmax attention (models.md 7.6). Query head h reads key/value head h / (H/Hkv). A
// sequence of Tk keys and Tq <= Tk queries, the queries being its last positions, position i of
// query i' = i + Tk − Tq; with a window w it sees keys max(0, i'−w+1) ... i', else all up to i':
//   a_ij = softmax_j(scale q_i·k_j)    o_i = Σ_j a_ij v_j    lse_i = log Σ_j e^{scale q_i·k_j}
//
//   Attention r = attention(q, k, v);                                  // scale P^−1/2
//   Attention r = attention(q, k, v, {.window = 128, .layout = packed});
//   Attention r = attention(q, k, v, {.layout = queries, .key_layout = keys});  // q after a cache
//
// q [B,Tq,H,P], k and v [B,Tk,Hkv,P], H a multiple of Hkv: f32, f64 (CPU) or bf16 (CUDA), any
// strides; P 1...256. Packed: `layout` over the B·Tq queries and `key_layout` over the keys, as
// many sequences in both; without the latter it is the former (Tq = Tk). o as q; lse [B,Tq,H] f32
// (f64).
//
// Never a matrix of scores in memory: softmax in f32 with a running maximum and sum. Saves q, k, v,
// o, lse. Backward, from scores made again: D_i = dO_i·o_i, dS = a∘(dO vᵀ − D), dq = scale dS k,
// dk = scale dSᵀ q, dv = aᵀ dO, the last two summed over the heads of a group in order.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/seq_layout.h"

namespace ebb {

struct AttentionOptions {
  double scale = 0;           // 0: P^−1/2
  int64_t window = 0;         // 0: none
  SeqLayout layout = {};      // of the queries
  SeqLayout key_layout = {};  // of the keys; dense: as the queries'
};
struct Attention {
  Var o;       // [B,Tq,H,P]
  Tensor lse;  // [B,Tq,H]
};
Attention attention(const Var& q, const Var& k, const Var& v, const AttentionOptions& options = {});

// One token of decoding, nothing recorded: q [N,H,P] and the token's own k, v [N,Hkv,P] at position
// position[n] (i64 [N], on q's device). k and v are written into the caches [N,C,Hkv,P] (dense, in
// place) at row position mod C; then q reads the last min(position + 1, C, window) positions. A
// cache of C >= window rows is a ring; without a window C must exceed the position. Returns o.
struct AttentionStep {
  double scale = 0;
  int64_t window = 0;
};
Tensor attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& position,
                      const AttentionStep& options = {});

// Floors: every tensor moved once; products over the pairs that see each other, backward five for
// forward's two.
struct AttentionSize {
  int64_t batch = 1, time = 0, heads = 1, key_heads = 1, head_dim = 64;
  int64_t window = 0;
};
Cost attention_cost(Pass pass, const AttentionSize& s, DType dtype);
Cost attention_step_cost(const AttentionSize& s, DType dtype);  // time: tokens in the cache

// What the backends see: checked, dense tensors.
struct AttentionProblem {
  Tensor q = {}, k = {}, v = {};
  double scale = 1;
  int64_t window = 0;
  SeqLayout layout = {}, key_layout = {};  // both packed or both dense

  int64_t batch() const { return q.size(0); }
  int64_t time() const { return q.size(1); }
  int64_t key_time() const { return k.size(1); }
  int64_t heads() const { return q.size(2); }
  int64_t key_heads() const { return k.size(2); }
  int64_t head_dim() const { return q.size(3); }
  int64_t sequences() const { return layout.count(batch()); }
};
struct AttentionGradients {  // undefined: not wanted. Dense, overwritten.
  Tensor dq = {}, dk = {}, dv = {};
};
namespace cpu {
void attention_fwd(const AttentionProblem& p, const Tensor& o, const Tensor& lse);
void attention_bwd(const AttentionProblem& p, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                   const AttentionGradients& grads);
void attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                    const Tensor& v_cache, const Tensor& position, double scale, int64_t window,
                    const Tensor& o);
}  // namespace cpu
namespace gpu {
void attention_fwd(const AttentionProblem& p, const Tensor& o, const Tensor& lse);
void attention_bwd(const AttentionProblem& p, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                   const AttentionGradients& grads);
void attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                    const Tensor& v_cache, const Tensor& position, double scale, int64_t window,
                    const Tensor& o);
}  // namespace gpu

}  // namespace ebb
