// dplr in bf16 on tensor cores, for heads of at most 64 channels (others: cuda/dplr_wide.cuh).
// Where log decays are bounded (DplrOptions::lower_bound), a chunk of 64 tokens is centred on about
// half of its decay,
//   R_i = scale r_i∘e^{G_i−c}   A_i = a_i∘e^{Gx_i−c}   K_j = k_j∘e^{c−G_j}   B_j = b_j∘e^{c−G_j}
// with c near G_n/2 by channel, so that no exponent exceeds 40 and every score is an element of a
// product of these (ops/dplr.h): A_rk = tril(R Kᵀ), A_ab = stril(A Bᵀ), ... With ε = e^c, ε∘R is r
// as it meets the state before the chunk, ε∘K is k as it reaches the one after it, and ε² is the
// decay over the chunk.
// Where decays are so strong that this would leave the range of floats, each half of the chunk, 32
// tokens, is centred on its own (PARTS = 2): scores inside a half are as above, those of the later
// half with the earlier one have a factor δ = e^{c'−c} by channel between the two centres.
// Without a bound (PARTS = 4), rows of each 16 tokens refer to their borders, r and a to the first
// and k and b to the last, so that every factor is at most 1, and scores inside such a part are
// worked out apart: forward from leaves of 8 tokens centred on their own, in which a decay counts
// as at least e^-16 (what is lost is below that fraction of a score), backward token by token in
// f32.
//
// Y = W S + U with W = (I − A_ab)⁻¹ (ε∘A) and U = (I − A_ab)⁻¹ A_ak V, so that nothing of a chunk
// depends on the state but by two matrices that need no state:
//   o = (ε∘R + A_rb W) S + (A_rk V + A_rb U)
//   S⁺ = Diag(ε²) S + B̄ᵀ W S + (K̄ᵀ V + B̄ᵀ U)          B̄ = ε∘B, K̄ = ε∘K
//   D⁻ = Diag(ε²) D + (B̄ᵀ W)ᵀ D + (ε∘R + A_rb W)ᵀ dO
// dplr_fast_prepare.cu makes these; then a scan's step (dplr_fast_scan.cu) is one product, with the
// read-out beside it, and so is the reverse one's. dplr_fast_gradients.cu and
// dplr_steep_gradients.cu (PARTS = 4) do the rest.
#pragma once
#include "cuda/delta_fast.cuh"
#include "cuda/dplr.cuh"

namespace ebb::gpu::low_rank {

using namespace delta;

inline constexpr int kFastThreads = 256;
inline constexpr int64_t kMostChunks = 65535;  // of one launch
// Half of the log decay over a part with one centre: e^70 leaves room for sums of products.
inline constexpr double kMostExponent = 70;

// What a chunk makes of the state, and what it adds whatever the state is. In memory as in shared
// memory, tiles swizzled and zero beyond K, V and the chunk's tokens, so that a scan fetches them
// as runs of bytes.
struct ChunkStep {
  SwizzledTile move, read;  // B̄ᵀ W [K,K], ε∘R + A_rb W [tokens,K]
  float decay[64];          // ε²
};
struct ChunkTerms {
  SwizzledTile state, out;  // (K̄ᵀ V + B̄ᵀ U)ᵀ [V,K] in half precision, A_rk V + A_rb U [tokens,V]
  float units[64];          // of each row of `state`, a power of two
};
// PARTS = 4: what backward needs of the scores.
struct ChunkScores {
  SwizzledTile ak, rb, rk;
};
inline constexpr int kStepBytes = 2 * int(sizeof(SwizzledTile)) + 64 * int(sizeof(float));
inline constexpr int kTermsBytes = kStepBytes;  // of each, without what fills it up to whole tiles

struct FastProblem : delta::Problem<bf16_t> {  // q, k, v, g: r, k, v, w
  const bf16_t *low_a = {}, *low_b = {};       // a, b [tokens,H,K]
  int32_t* unbounded_decay = {};
  float least = {};
  bool zero_start = {};  // backward: the states before the sequences are zero
  // Of each chunk and head: (I − A_ab)⁻¹, and the state before it, transposed.
  SwizzledTile *inverse = {}, *chunk_states = {};
  ChunkStep* steps = {};
  ChunkTerms* terms = {};
  ChunkScores* scores = {};
  // Backward.
  const bf16_t* d_o = {};                                   // [tokens,H,V]
  const float* dht = {};                                    // [N,H,K,V] or null
  SwizzledTile* dstates = {};                               // D after each chunk, as the states
  bf16_t *dr = {}, *dk = {}, *dv = {}, *da = {}, *db = {};  // null: not wanted
  float *dw = {}, *dh0 = {};

  __device__ __forceinline__ int64_t key_at(int64_t token, int head) const {  // no groups here
    return (token * heads + head) * key_dim;
  }
  // Chunk `i` of all in the order of their places in their sequences (packed ones: as they lie), so
  // that what one kernel has written last is what the next one reads first. They are never 2^32:
  // each takes kilobytes.
  __device__ __forceinline__ int64_t by_place(int64_t i) const {
    if (chunk_before) return i;
    const unsigned at = unsigned(i), n = unsigned(sequences);
    return at % n * chunks_per_row + at / n;
  }
  // Whether chunk `i` begins with a zero state for certain.
  __device__ __forceinline__ bool from_zero(int64_t i, Span span) const {
    return zero_start && i == first_chunk(span.sequence);
  }
  __device__ __forceinline__ int64_t tile_at(int64_t chunk_index, int head) const {
    return chunk_index * heads + head;
  }
};

// Steps, terms and inverses of all chunks.
void fast_prepare(const FastProblem& p, int parts, cudaStream_t stream);
// o [tokens,H,V], ht [N,H,K,V] (or null) and the states before the chunks.
void fast_scan(const FastProblem& p, bf16_t* o, float* ht, Device device, cudaStream_t stream);
// The gradients of the states after the chunks, and dh0.
void fast_reverse(const FastProblem& p, Device device, cudaStream_t stream);
// dr, dw, dk, dv, da, db of every chunk, from the states and their gradients.
void fast_gradients(const FastProblem& p, int parts, cudaStream_t stream);  // PARTS = 1, 2
void steep_gradients(const FastProblem& p, cudaStream_t stream);            // PARTS = 4

}  // namespace ebb::gpu::low_rank
