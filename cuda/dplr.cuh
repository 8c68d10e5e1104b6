// Shared by the kernels of dplr that go token by token (dplr.cu, dplr_bwd.cu): the problem as raw
// pointers, and how a block of (32, 8) threads holds a state: warp y its rows y, y+8, ..., ROWS of
// them, a lane COLS neighbouring columns of V. Correct at any size; the tensor-core kernels lie in
// dplr_fast*.cu.
#pragma once
#include "cuda/common.cuh"
#include "ops/dplr.h"
#include "ops/sequence_cursor.h"
#include "tensor/device_flags.h"

namespace ebb::gpu::low_rank {

inline constexpr int kLanes = 32, kWarps = 8;
inline constexpr int kKept = 16;  // tokens between the states that forward keeps

template <class T>
struct Problem {
  const T *r, *k, *v, *a, *b;                 // [tokens,H,K], v [tokens,H,V]
  const float *w, *h0;                        // [tokens,H,K], [N,H,K,V] or null
  T* states;                                  // [every kKept tokens of a sequence,H,K,V], or null
  int32_t *positive_decay, *unbounded_decay;  // device flags
  float scale, least;                         // least: w must not be below; −inf: no bound
  int heads, key_dim, value_dim;
  int64_t tokens, sequences;
  SequenceCursor cursor;
  const int64_t* kept_before;  // [N+1] kept states before each sequence; null: dense
  int64_t kept_per_row;        // dense

  __device__ __forceinline__ int64_t first_kept(int64_t n) const {
    return kept_before ? kept_before[n] : n * kept_per_row;
  }
};

// A block's share: a sequence, a head, kLanes·COLS columns of V.
template <int COLS>
struct Item {
  int64_t sequence;
  int head, column;  // the thread's first column
  __host__ __device__ static int tiles(int value_dim) {
    return (value_dim + kLanes * COLS - 1) / (kLanes * COLS);
  }
  template <class T>
  __device__ __forceinline__ Item(const Problem<T>& p, int64_t item) {
    const int n = tiles(p.value_dim);
    column = int(item % n) * kLanes * COLS + COLS * int(threadIdx.x);
    head = int(item / n % p.heads);
    sequence = item / n / p.heads;
  }
  template <class T>
  __host__ static int64_t count(const Problem<T>& p) {
    return p.sequences * p.heads * tiles(p.value_dim);
  }
};

// What a token gives to the rows of the state: lane i holds it for row y + 8i of its warp.
struct RowFactors {
  float alpha = 0, r = 0, k = 0, a = 0, b = 0;

  template <class T>
  __device__ __forceinline__ RowFactors(const Problem<T>& p, int64_t token, int head) {
    const int row = int(threadIdx.y) + kWarps * int(threadIdx.x);
    if (row >= p.key_dim) return;
    const int64_t at = (token * p.heads + head) * p.key_dim + row;
    const float w = p.w[at];
    if (w > 0.f) *p.positive_decay = 1;
    if (w < p.least) *p.unbounded_decay = 1;
    alpha = expf(w);
    r = to_float(p.r[at]), k = to_float(p.k[at]), a = to_float(p.a[at]), b = to_float(p.b[at]);
  }
};
__device__ __forceinline__ float of_row(float x, int i) { return __shfl_sync(0xffffffffu, x, i); }

// The thread's columns of a row of V values; zeros beyond V.
template <class T, int COLS>
__device__ __forceinline__ void read_columns(float (&x)[COLS], const T* row, int column,
                                             int value_dim) {
#pragma unroll
  for (int e = 0; e < COLS; ++e) x[e] = column + e < value_dim ? to_float(row[column + e]) : 0.f;
}

// The thread's part of a state [K,V] in memory, from or to registers.
template <class T, int ROWS, int COLS>
__device__ __forceinline__ void read_state(float (&s)[ROWS][COLS], const T* g, int column,
                                           int key_dim, int value_dim) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = int(threadIdx.y) + kWarps * i;
#pragma unroll
    for (int e = 0; e < COLS; ++e)
      s[i][e] = g && row < key_dim && column + e < value_dim
                    ? to_float(g[int64_t(row) * value_dim + column + e])
                    : 0.f;
  }
}
template <class T, int ROWS, int COLS>
__device__ __forceinline__ void write_state(T* g, const float (&s)[ROWS][COLS], int column,
                                            int key_dim, int value_dim) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = int(threadIdx.y) + kWarps * i;
#pragma unroll
    for (int e = 0; e < COLS; ++e)
      if (row < key_dim && column + e < value_dim)
        g[int64_t(row) * value_dim + column + e] = from_float<T>(s[i][e]);
  }
}

// Sums over the eight warps, in order; the same values in each. Two buffers in turn: s may be
// written again after the block's next barrier but one.
template <int N>
__device__ __forceinline__ void sum_warps(float (&x)[N], float (*s)[kLanes][N]) {
#pragma unroll
  for (int e = 0; e < N; ++e) s[threadIdx.y][threadIdx.x][e] = x[e];
  __syncthreads();
#pragma unroll
  for (int e = 0; e < N; ++e) x[e] = 0.f;
#pragma unroll
  for (int y = 0; y < kWarps; ++y)
#pragma unroll
    for (int e = 0; e < N; ++e) x[e] += s[y][threadIdx.x][e];
}

// y = aᵀS of the warps together, then S = α∘S + b yᵀ + k vᵀ.
template <int ROWS, int COLS>
__device__ __forceinline__ void advance(float (&state)[ROWS][COLS], const RowFactors& row,
                                        const float (&v)[COLS], float (&y)[COLS],
                                        float (*s_sums)[kLanes][COLS]) {
#pragma unroll
  for (int e = 0; e < COLS; ++e) y[e] = 0.f;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float a = of_row(row.a, i);
#pragma unroll
    for (int e = 0; e < COLS; ++e) y[e] += a * state[i][e];
  }
  sum_warps<COLS>(y, s_sums);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float alpha = of_row(row.alpha, i), k = of_row(row.k, i), b = of_row(row.b, i);
#pragma unroll
    for (int e = 0; e < COLS; ++e) state[i][e] = alpha * state[i][e] + b * y[e] + k * v[e];
  }
}

// The device's view; `kept_before` must outlive the launches.
template <class T>
Problem<device_t<T>> make_problem(const DplrProblem& p, const Tensor& states,
                                  const Tensor& kept_before);
Tensor kept_offsets(const DplrProblem& p);  // undefined when dense

// f.operator()<ROWS, COLS>() for K <= 8·ROWS: registers for one state, or for two.
template <class F>
void visit_sizes(int64_t key_dim, F&& f) {
  if (key_dim <= 64)
    f.template operator()<8, 2>();
  else if (key_dim <= 128)
    f.template operator()<16, 2>();
  else
    f.template operator()<32, 1>();
}

// The tensor-core kernels (cuda/dplr_fast.cuh). The saved inverse tells backward which ran.
bool fast_path(const DplrProblem& p);
DplrSaved fast_fwd(const DplrProblem& p, const Tensor& o, const Tensor& ht);
void fast_bwd(const DplrProblem& p, const DplrSaved& saved, const Tensor& d_o, const Tensor& dht,
              const DplrGradients& grads);

inline unsigned blocks_of(int64_t items) {  // kernels loop over the rest
  return unsigned(std::min<int64_t>(items, (int64_t(1) << 31) - 1));
}

}  // namespace ebb::gpu::low_rank
