// What decoding keeps for state-memory attention: the complete runs of every sequence (models.md
// 10.3) and what the open run has written so far.
//   StateMemoryCache cache = state_memory_cache(y.contributions.value(), layout, B, T, 256);
//   per token:
//   Tensor o = state_memory_attention_step(q, e, c, cache, 256, {.gate = g, .base = y});
//   ssd_step(x, dt, A, B, C, cache.open, ...);  // the open run grows as the scan's state does
//   state_memory_advance(cache, 256);           // one token more; full runs join the others
// Reading comes first: a token does not see its own run. A row of every tensor is a sequence, each
// at a position of its own, so rows may be selected and repeated like any decoding state.
//
// Several tokens a sequence, going on from a cache in the middle of a run or at its end:
//   SeqLayout pieces = state_memory_pieces(cache, layout, B, T, 256);
//   SsdOutput m = ssd(x, dt, A, B, C, state_memory_openings(cache), {.want_final_state = true,
//                     .layout = pieces, .memory_chunk = 256, ...});
//   cache = state_memory_extend(cache, m.contributions.value(), m.ht.value(), layout, B, T, 256);
//   Tensor o = state_memory_attention_window(q, e, c, cache, layout, 256, {.gate = g, .base = y});
#pragma once
#include "ops/seq_layout.h"
#include "tensor/tensor.h"

namespace ebb {

struct StateMemoryCache {
  Tensor memories = {};  // [B,C,H,N,P], C runs of room: row b's first position[b] / S are complete
  Tensor open = {};      // [B,H,N,P] f32 (f64 beside f64): what the open run has written
  Tensor position = {};  // i64 [B] on the CPU: tokens behind the cache

  int64_t batch() const { return memories.size(0); }
  int64_t runs(int64_t row, int64_t memory_chunk) const {  // complete ones
    return position.data<int64_t>()[row] / memory_chunk;
  }
};
// Before the first token.
StateMemoryCache empty_state_memory_cache(int64_t batch, int64_t heads, int64_t state_dim,
                                          int64_t value_dim, DType dtype, Device device = {});
// After a [batch,time] forward pass that gave these contributions [M,H,N,P] with memory_chunk = S.
StateMemoryCache state_memory_cache(const Tensor& contributions, const SeqLayout& layout,
                                    int64_t batch, int64_t time, int64_t memory_chunk);

// o_b = base_b + gate_b R_b of ops/state_memory_attention.h for one token of every sequence:
// q, c [B,*,N], e [B,*,P] with any divisor of H as *, gate [B,*] and base [B,H,P] or undefined.
// Returns [B,H,P]. Nothing is recorded; the cache is not changed.
struct StateMemoryStep {
  Tensor gate = {}, base = {};
  double scale = 0, eps = 1e-6, eps_row = 1e-12;  // scale 0: 1/√N
  bool normalize = true;
};
Tensor state_memory_attention_step(const Tensor& q, const Tensor& e, const Tensor& c,
                                   const StateMemoryCache& cache, int64_t memory_chunk,
                                   const StateMemoryStep& options = {});
// Counts the token that cache.open has taken in. Where that fills a run it is kept, and the next
// one begins empty. The room doubles when it is used up.
void state_memory_advance(StateMemoryCache& cache, int64_t memory_chunk);

// The 2N pieces of N sequences that go on: what completes the open run (nothing, if none is open;
// all, if that isn't enough), and the rest.
SeqLayout state_memory_pieces(const StateMemoryCache& cache, const SeqLayout& layout, int64_t batch,
                              int64_t time, int64_t memory_chunk);
// The states [2N,H,N,P] that the scan over the pieces begins with: what the open run has written,
// and nothing.
Tensor state_memory_openings(const StateMemoryCache& cache);
// The cache after the tokens of `layout` too, from the pieces' contributions and final states.
StateMemoryCache state_memory_extend(const StateMemoryCache& cache, const Tensor& contributions,
                                     const Tensor& states, const SeqLayout& layout, int64_t batch,
                                     int64_t time, int64_t memory_chunk);
// As state_memory_attention_step for all tokens that the cache has taken in last: q [B,T,*,N],
// e [B,T,*,P], c [B,T,*,N], gate [B,T,*], base [B,T,H,P] -> [B,T,H,P].
Tensor state_memory_attention_window(const Tensor& q, const Tensor& e, const Tensor& c,
                                     const StateMemoryCache& cache, const SeqLayout& layout,
                                     int64_t memory_chunk, const StateMemoryStep& options = {});

// Elements a head keeps after `length` tokens: runs·N·P, and keys and values of token attention
// with the same value width, 2·length·P. Their ratio is N/(2S) where S divides the length.
struct StateMemoryCacheSize {
  int64_t memories = 0, attention = 0;
  double ratio() const { return attention ? double(memories) / double(attention) : 0; }
};
StateMemoryCacheSize state_memory_cache_size(int64_t length, int64_t memory_chunk,
                                             int64_t state_dim, int64_t value_dim);

struct StateMemoryStepProblem {  // what the backends see: checked, dense
  Tensor q = {}, e = {}, c = {}, gate = {}, base = {};
  Tensor memories = {};  // [B,C,H,N,P]
  Tensor runs = {};      // i64 [B] where the kernel runs: complete ones of each row
  double scale = 1, eps = 0, eps_row = 0;
  bool normalize = true;
};
namespace cpu {
void state_memory_attention_step(const StateMemoryStepProblem& p, const Tensor& o);
}  // namespace cpu
namespace gpu {
void state_memory_attention_step(const StateMemoryStepProblem& p, const Tensor& o);
}  // namespace gpu

}  // namespace ebb
