// dplr in bf16 on tensor cores for heads of up to 256 keys and values: the formulas of
// cuda/dplr_fast.cuh in panels of 64 channels of K and blocks of 64 columns of V. Scores are sums
// over panels; what a chunk makes of the state, B̄ᵀ W, is a square of tiles; columns of V need
// nothing of one another but the score gradients, which are sums over blocks. Every sum is made by
// one block of threads in a fixed order.
//   dplr_wide_scores.cu     A_ab, A_ak, A_rb, A_rk and (I − A_ab)⁻¹ of a chunk, panel by panel
//   dplr_wide_prepare.cu    W, B̄ᵀ W, ε∘R + A_rb W; U and what it adds to the states and outputs
//   dplr_wide_scan.cu       the scans, 64 columns of V each; K > 128: dplr_wide_scan_slots.cu
//   dplr_wide_values.cu     Y, Z, dV and the score gradients of a chunk
//   dplr_wide_gradients.cu  dr, dw, dk, da, db of a chunk and panel
// Only scores need centres or borders; elsewhere rows are multiplied with their whole decay from
// the chunk's start, or to its end, which is at most 1.
#pragma once
#include "cuda/delta_scan_shared.cuh"
#include "cuda/dplr_chunk.cuh"
#include "cuda/dplr_terms.cuh"

namespace ebb::gpu::low_rank {

inline constexpr int kMostPanels = 4, kMostBlocks = 4;

template <int PANELS>
struct WideStep {
  SwizzledTile move[PANELS][PANELS], read[PANELS];  // B̄ᵀ W [K,K], ε∘R + A_rb W [tokens,K]
  float decay[64 * PANELS];                         // ε²
};
template <int PANELS>
struct WideTerms {  // of 64 columns of V, as ChunkTerms
  SwizzledTile state[PANELS], out;
  float units[PANELS][64];
};
struct ChunkValues {  // of 64 columns of V
  SwizzledTile y, z;
};
struct ScoreGradients {
  SwizzledTile pv, py, mv, my;
  SwizzledTile low_pv;  // what rounding took of dP_v; PARTS < 4
};
using InsideGradients = float[4][16][16][4];  // of part, i, j: dP_v, dP_y, dM_v, dM_y

struct WideProblem : FastProblem {
  int panels = 1, blocks = 1;              // 1, 2 or 4, as many as kernels have; 1...4
  void* wide_steps = {};                   // of each chunk and head: WideStep<panels>
  void* wide_terms = {};                   // WideTerms<panels>[blocks]
  ChunkValues* chunk_values = {};          // [blocks]
  ScoreGradients* score_gradients = {};    // one
  InsideGradients* inside_gradients = {};  // one; null: PARTS < 4

  template <int PANELS>
  __device__ __forceinline__ WideStep<PANELS>& step(int64_t at) const {
    return static_cast<WideStep<PANELS>*>(wide_steps)[at];
  }
  template <int PANELS>
  __device__ __forceinline__ WideTerms<PANELS>& term(int64_t at, int block) const {
    return static_cast<WideTerms<PANELS>*>(wide_terms)[at * blocks + block];
  }
  // Of chunk_states and dstates.
  __device__ __forceinline__ int64_t state_tile(int64_t at, int block, int panel) const {
    return (at * blocks + block) * panels + panel;
  }
};

// 64 channels of the keys, as the functions of dplr_chunk.cuh want a problem.
struct KeyPanel {
  const bf16_t *q, *k, *low_a, *low_b;
  const float* g;
  int32_t *positive_decay, *unbounded_decay;
  bf16_t *dr, *dk, *da, *db;
  float* dw;
  float scale, least;
  int key_dim, whole;  // of the panel, of the head
  int64_t stride;

  __device__ __forceinline__ KeyPanel(const FastProblem& p, int panel)
      : q(p.q + 64 * panel),
        k(p.k + 64 * panel),
        low_a(p.low_a + 64 * panel),
        low_b(p.low_b + 64 * panel),
        g(p.g + 64 * panel),
        positive_decay(p.positive_decay),
        unbounded_decay(p.unbounded_decay),
        dr(p.dr ? p.dr + 64 * panel : nullptr),
        dk(p.dk ? p.dk + 64 * panel : nullptr),
        da(p.da ? p.da + 64 * panel : nullptr),
        db(p.db ? p.db + 64 * panel : nullptr),
        dw(p.dw ? p.dw + 64 * panel : nullptr),
        scale(p.scale),
        least(p.least),
        key_dim(min(64, p.key_dim - 64 * panel)),
        whole(p.key_dim),
        stride(p.key_stride()) {}
  __device__ __forceinline__ int64_t key_at(int64_t token, int head) const {
    return token * stride + int64_t(head) * whole;
  }
  __device__ __forceinline__ int64_t key_stride() const { return stride; }
};

// A warp's eight tokens, a lane's two channels of a panel: their log2 decays, and rows times the
// decays around them. Neither overflows nor cancels, however strong they are.
struct PlainDecays {
  int warp = int(threadIdx.x) >> 5, channel = 2 * (int(threadIdx.x) & 31);
  float2 g[8];

  // Then a barrier.
  __device__ __forceinline__ void load(const KeyPanel& p, Span span, int head,
                                       GroupTotals& s_total) {
    const float* from = p.g + p.key_at(span.first + 8 * warp, head) + channel;
    const int rows = channel < p.key_dim ? span.rows - 8 * warp : 0;
    float2 sum = {};
#pragma unroll
    for (int i = 0; i < 8; ++i, from += p.stride) {
      g[i] = {};
      if (i < rows)
        g[i] =
            CentredRows<4>::log2_of(*reinterpret_cast<const float2*>(from), CentredRows<4>::kLeast);
      sum.x += g[i].x, sum.y += g[i].y;
    }
    *reinterpret_cast<float2*>(&s_total[warp][channel]) = sum;
  }
  // Of the warps FIRST... LAST − 1.
  __device__ __forceinline__ float2 sum(const GroupTotals& s_total, int first, int last) const {
    float2 x = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 t = *reinterpret_cast<const float2*>(&s_total[i][channel]);
      if (i >= first && i < last) x.x += t.x, x.y += t.y;
    }
    return x;
  }
  __device__ __forceinline__ unsigned* place(SwizzledTile& tile, int i) const {
    return reinterpret_cast<unsigned*>(tile.at(8 * warp + i, channel & ~7) + (channel & 7));
  }
  __device__ __forceinline__ void scale_row(SwizzledTile& tile, int i, float2 f) const {
    unsigned* at = place(tile, i);
    *at = pack_pair(times(pair_of(*at), f));
  }
  // a as it meets the state before the chunk; and r times scale, with what rounding takes of it.
  __device__ __forceinline__ void from_start(SwizzledTile& a, const GroupTotals& s_total) const {
    float2 x = sum(s_total, 0, warp);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      scale_row(a, i, exp2_pair(x));
      x.x += g[i].x, x.y += g[i].y;
    }
  }
  __device__ __forceinline__ void from_start(SwizzledTile& r, SwizzledTile& low_r, SwizzledTile& a,
                                             float scale, const GroupTotals& s_total) const {
    float2 x = sum(s_total, 0, warp), f = exp2_pair(x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      scale_row(a, i, f);
      x.x += g[i].x, x.y += g[i].y;
      f = exp2_pair(x);
      unsigned* at = place(r, i);
      const float2 y = times(pair_of(*at), {scale * f.x, scale * f.y});
      *at = pack_pair(y);
      *place(low_r, i) = pack_rest(y, pack_pair(y));
    }
  }
  // k and b as they reach the state after the chunk.
  template <class... Tile>
  __device__ __forceinline__ void to_end(const GroupTotals& s_total, Tile&... tiles) const {
    float2 x = sum(s_total, warp + 1, 8);
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      const float2 f = exp2_pair(x);
      (scale_row(tiles, i, f), ...);
      x.x += g[i].x, x.y += g[i].y;
    }
  }
};

// Values of 64 columns of V.
__device__ __forceinline__ void fetch_block(const WideProblem& p, const bf16_t* values, Span span,
                                            int head, int block, SwizzledTile& s) {
  TilePlace().fetch(s, values + p.value_at(span.first, head) + 64 * block, p.value_stride(),
                    span.rows, p.value_dim - 64 * block);
}
// A warp's 16 rows to a tile in memory, by way of one of which it alone uses these rows.
template <class X>
__device__ __forceinline__ void store_by(SwizzledTile& scratch, SwizzledTile& g, const X& x, int m0,
                                         const Lane& l) {
  __syncwarp();
  put_rows(scratch, x, m0, l);
  copy_rows(g, scratch, m0);
}

// The first pass's items from unit vectors have no values, nor places of theirs.
template <bool ENDS>
__device__ __forceinline__ bool is_unit(const FastProblem& p, const ScanItem& item) {
  return ENDS && item.v0 >= p.value_dim;
}
template <bool ENDS>
__device__ __forceinline__ int block_of(const FastProblem& p, const ScanItem& item) {
  return is_unit<ENDS>(p, item) ? 0 : item.v0 / kFastTile;
}

// f.operator()<PANELS>().
template <class F>
void visit_panels(const WideProblem& p, F&& f) {
  if (p.panels == 1)
    f.template operator()<1>();
  else if (p.panels == 2)
    f.template operator()<2>();
  else
    f.template operator()<4>();
}
// launch(first chunk, grid (head or one of its `shares`, chunk − first)) for as many chunks as a
// grid has.
template <class F>
void each_grid(const WideProblem& p, int shares, F&& launch) {
  for (int64_t first = 0; first < p.chunks; first += kMostChunks)
    launch(first, dim3(unsigned(p.heads) * unsigned(shares),
                       unsigned(std::min(p.chunks - first, kMostChunks))));
}

// Segments of K > 128, as the scans of dplr_wide_scan.cu.
void slot_scan(const WideProblem& p, const delta::Segments& segments, bool ends, bf16_t* o,
               float* ht, cudaStream_t stream);
void slot_reverse(const WideProblem& p, const delta::Segments& segments, bool ends,
                  const CUtensorMap& d_o, cudaStream_t stream);

void wide_scores(const WideProblem& p, int parts, cudaStream_t stream);
void wide_prepare(const WideProblem& p, cudaStream_t stream);
void wide_scan(const WideProblem& p, bf16_t* o, float* ht, Device device, cudaStream_t stream);
void wide_reverse(const WideProblem& p, Device device, cudaStream_t stream);
void wide_values(const WideProblem& p, cudaStream_t stream);
void wide_gradients(const WideProblem& p, int parts, cudaStream_t stream);

}  // namespace ebb::gpu::low_rank
