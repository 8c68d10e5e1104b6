// Gated linear attention in bf16 on tensor cores: the contributions of runs of less than 64 tokens,
// which the scans over chunks of 64 do not meet one by one. They need no state:
//   Δ_c = Σ_{t in c} τ_t w_t k_t v_tᵀ,   τ_t = e^{Σ g of c after t}
// and with E the gradient of Δ_c, over the tokens of c,
//   dk_t += τ w E v_t    dv_t += τ w Eᵀ k_t    dw_t += τ k_tᵀ E v_t =: x_t    dg_s += Σ_{t<s} w_t
//   x_t
// is added to what the chunks give. A block has 64 places for tokens, for one run of up to 64, two
// of up to 32 or four of up to 16 (ROWS); a warp has 16 of them.
#pragma once
#include "cuda/linear_attention_gates.cuh"

namespace ebb::gpu::linear_attention {

inline constexpr int kPlaces = 64, kRunThreads = 128;
inline constexpr int kRunColumns = 64, kRunRow = kRunColumns + 8;  // of V at a time, padded

// Runs of an item and warps of a run.
template <int ROWS>
inline constexpr int kRunsOf = kPlaces / ROWS;
template <int ROWS>
inline constexpr int kWarpsOf = ROWS / 16;

// What runs of an item have in common beside tiles.
struct alignas(16) RunPlaces {
  int64_t first[4];                                     // token of each run
  int rows[4];                                          // its tokens; 0: no such run
  float tail[kPlaces], weight[kPlaces], kept[kPlaces];  // τ, w, x
};
// Channels with those that are zero, to a multiple of 16.
__host__ __device__ inline int run_keys(int key_dim) { return (key_dim + 15) & ~15; }

// The problem that has the runs as its chunks.
struct RunProblem : FastAttention {
  __host__ __device__ int keys() const { return run_keys(key_dim); }
  __host__ __device__ int key_row() const { return keys() + 8; }  // elements, padded

  // By all threads, ending with a barrier.
  template <int ROWS>
  __device__ __forceinline__ void find(RunPlaces& s, int64_t item) const {
    if (threadIdx.x < kRunsOf<ROWS>) {
      const int64_t run = item * kRunsOf<ROWS> + int(threadIdx.x);
      const Span span = run < chunks ? chunk_span(*this, run) : Span{0, 0};
      s.first[threadIdx.x] = span.first, s.rows[threadIdx.x] = max(0, span.rows);
    }
    __syncthreads();
  }
  // A tile [64,width] of rows by place, zeros where there is no token and from `cols` on.
  template <int ROWS>
  __device__ __forceinline__ void fetch(bf16_t* s, int ld, const RunPlaces& at, const bf16_t* g,
                                        int64_t step, int cols, int width) const {
    const int per_row = width / 8;
    for (int i = int(threadIdx.x); i < kPlaces * per_row; i += kRunThreads) {
      const int place = i / per_row, c = i % per_row * 8, run = place / ROWS, t = place % ROWS;
      const bool valid = t < at.rows[run] && c < cols;
      copy_async_or_zero(s + place * ld + c, valid ? g + (at.first[run] + t) * step + c : g, valid);
    }
  }
};

// By one warp, lane l with places 2l and 2l+1: where its tokens are, as a Span in which places
// count from the first token of the run's.
template <int ROWS>
__device__ __forceinline__ Span lane_span(const RunPlaces& s) {
  const int run = 2 * (int(threadIdx.x) & 31) / ROWS;
  return {s.first[run] - run * ROWS, run * ROWS + s.rows[run]};
}

// By one warp: τ and w of a head. Sums of what comes after, within the run: nothing cancels.
template <int ROWS>
__device__ __forceinline__ void put_run_gates(const FastAttention& p, RunPlaces& s, int h) {
  constexpr int kLanes = ROWS / 2;  // of a run
  const int lane = int(threadIdx.x) & 31;
  const Span span = lane_span<ROWS>(s);
  LaneGates gates;
  gates.fetch(p, span, h);
  gates.apply_steps(p, span.rows, h);
  float x[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) x[e] = gates.g[e] < -1000.f ? -1000.f : gates.g[e];  // −inf: 0
  float sum = x[0] + x[1];
#pragma unroll
  for (int o = 1; o < kLanes; o *= 2) {
    const float after = __shfl_down_sync(0xffffffffu, sum, o, kLanes);
    if (lane % kLanes + o < kLanes) sum += after;
  }
  float after = __shfl_down_sync(0xffffffffu, sum, 1, kLanes);
  if (lane % kLanes == kLanes - 1) after = 0.f;
  *reinterpret_cast<float2*>(s.tail + 2 * lane) = {__expf(after + x[1]), __expf(after)};
  *reinterpret_cast<float2*>(s.weight + 2 * lane) = {gates.w[0], gates.w[1]};
}

// Where the gradients go that backward of the chunks has left; each may be null.
struct RunGradients {
  const void* upstream = {};  // E [runs,H,K,V], bf16 or f32
  bool wide = false;          // f32
  bf16_t *dk = {}, *dv = {};  // [tokens,G,K], [tokens,H,V]
  float *dg = {}, *dweight = {};
  void* ddt = {};         // [tokens,H], as dt, where there are steps
  float* head_sums = {};  // [items,3,H] as AttentionBackward's, overwritten
};

// How many rows of head_sums the runs of a problem make.
int64_t run_items(const LinearAttentionProblem& p);
// Contributions [runs,H,K,V], bf16 or f32, of a problem with short runs.
void write_short_runs(const LinearAttentionProblem& p, const LinearAttentionSaved& saved,
                      const Tensor& contributions, cudaStream_t stream);
void add_run_gradients(const LinearAttentionProblem& p, const LinearAttentionSaved& saved,
                       const RunGradients& grads, cudaStream_t stream);

}  // namespace ebb::gpu::linear_attention
