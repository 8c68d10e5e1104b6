// Backward pass of dplr on the GPU, token by token in f32 from the last one. With S the state
// before a token, S' after it, y = aᵀS and D = dL/dS', this token's read included:
//   D += scale r dOᵀ     dr = scale S' dO     dy = Dᵀ b     dv = Dᵀ k     dk = D v     db = D y
//   da = S dy            dw = e^w ∘ rowsum(S∘D)             D ← Diag(e^w) D + a dyᵀ
// States are made again, kKept tokens at a time, from those that forward kept. Sums over V go
// through f32 parts, one for each tile of V, added in order where there are several.
#include "cuda/dplr.cuh"

#include <algorithm>

namespace ebb::gpu {
namespace low_rank {
namespace {

constexpr int kRowGradients = 5;  // dr, dk, da, db, dw

template <class T>
struct Backward : Problem<T> {
  const T* d_o = {};                                   // [tokens,H,V]
  const float* dht = {};                               // [N,H,K,V] or null
  T *dr = {}, *dk = {}, *da = {}, *db = {}, *dv = {};  // null: not wanted
  float *dw = {}, *dh0 = {};
  float* parts = {};    // [tiles,5,tokens,H,K], or null: one tile
  float* scratch = {};  // [blocks,kKept,ROWS·COLS,256]: states before the tokens of a group
};

// A sum over the lanes for each of the thread's rows; lane i receives row i's.
template <int ROWS, int COLS>
__device__ __forceinline__ float row_sums(const float (&x)[ROWS][COLS], const float (&y)[COLS]) {
  float mine = 0;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < COLS; ++e) sum += x[i][e] * y[e];
    sum = warp_sum(sum);
    if (int(threadIdx.x) == i) mine = sum;
  }
  return mine;
}

// The row gradients of a token, lane i for row y + 8i.
template <class T>
__device__ __forceinline__ void write_rows(const Backward<T>& p, const float (&x)[kRowGradients],
                                           int64_t token, int head, int tile) {
  const int row = int(threadIdx.y) + kWarps * int(threadIdx.x);
  if (row >= p.key_dim) return;
  const int64_t at = (token * p.heads + head) * p.key_dim + row;
  if (p.parts) {
    const int64_t size = p.tokens * p.heads * p.key_dim;
#pragma unroll
    for (int i = 0; i < kRowGradients; ++i) p.parts[(tile * kRowGradients + i) * size + at] = x[i];
    return;
  }
  if (p.dr) p.dr[at] = from_float<T>(x[0]);
  if (p.dk) p.dk[at] = from_float<T>(x[1]);
  if (p.da) p.da[at] = from_float<T>(x[2]);
  if (p.db) p.db[at] = from_float<T>(x[3]);
  if (p.dw) p.dw[at] = x[4];
}

// Item (sequence, head, tile of V). Per group of kKept tokens, from the last: 1 states before its
// tokens to scratch, y to shared memory; the one after them stays. Per token, from the last: 2 D,
// dr. 3 dy, dv. 4 the other rows. 5 D of the token before. At the end 6 dh0.
template <class T, int ROWS, int COLS>
__global__ void __launch_bounds__(kLanes* kWarps) backward_kernel(Backward<T> p, int64_t items) {
  __shared__ float s_a[kWarps][kLanes][COLS], s_b[kWarps][kLanes][2 * COLS];
  __shared__ float s_y[kKept][kLanes][COLS];
  const int64_t matrix = int64_t(p.key_dim) * p.value_dim;
  const int thread = int(threadIdx.y) * kLanes + int(threadIdx.x);
  float* scratch =
      p.scratch + int64_t(blockIdx.x) * kKept * ROWS * COLS * (kLanes * kWarps) + thread;
  const auto stored = [&](int t, int i, int e) -> float& {
    return scratch[(int64_t(t) * ROWS * COLS + i * COLS + e) * (kLanes * kWarps)];
  };
  for (int64_t at = blockIdx.x; at < items; at += gridDim.x) {
    const Item<COLS> item(p, at);
    SequenceCursor s = p.cursor;
    s.select(item.sequence);
    const int64_t whole = (item.sequence * p.heads + item.head) * matrix;
    const int tile = int(at % Item<COLS>::tiles(p.value_dim));
    float state[ROWS][COLS], grad[ROWS][COLS];
    read_state<float, ROWS, COLS>(grad, p.dht ? p.dht + whole : nullptr, item.column, p.key_dim,
                                  p.value_dim);
    const int64_t length = s.end - s.begin, groups = (length + kKept - 1) / kKept;
    for (int64_t group = groups - 1; group >= 0; --group) {
      const int64_t first = s.begin + group * kKept;
      const int rows = int(s.end - first < kKept ? s.end - first : kKept);
      const int64_t kept = p.first_kept(item.sequence) + group;
      read_state<T, ROWS, COLS>(state, p.states + (kept * p.heads + item.head) * matrix,
                                item.column, p.key_dim, p.value_dim);
      for (int t = 0; t < rows; ++t) {  // 1
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
          for (int e = 0; e < COLS; ++e) stored(t, i, e) = state[i][e];
        const RowFactors row(p, first + t, item.head);
        float v[COLS], y[COLS];
        read_columns<T, COLS>(v, p.v + ((first + t) * p.heads + item.head) * p.value_dim,
                              item.column, p.value_dim);
        advance<ROWS, COLS>(state, row, v, y, s_a);
        if (threadIdx.y == 0)
#pragma unroll
          for (int e = 0; e < COLS; ++e) s_y[t][threadIdx.x][e] = y[e];
        __syncthreads();
      }
      for (int t = rows - 1; t >= 0; --t) {
        const int64_t token = first + t, value = (token * p.heads + item.head) * p.value_dim;
        const RowFactors row(p, token, item.head);
        float d_o[COLS], v[COLS], sums[2 * COLS] = {}, out[kRowGradients];
        read_columns<T, COLS>(d_o, p.d_o + value, item.column, p.value_dim);
        read_columns<T, COLS>(v, p.v + value, item.column, p.value_dim);
#pragma unroll
        for (int e = 0; e < COLS; ++e) d_o[e] *= p.scale;
        out[0] = row_sums<ROWS, COLS>(state, d_o);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {  // 2
          const float r = of_row(row.r, i), k = of_row(row.k, i), b = of_row(row.b, i);
#pragma unroll
          for (int e = 0; e < COLS; ++e) {
            grad[i][e] += r * d_o[e];
            sums[e] += b * grad[i][e], sums[COLS + e] += k * grad[i][e];
          }
        }
        sum_warps<2 * COLS>(sums, s_b);  // 3
        if (p.dv && threadIdx.y == 0)
#pragma unroll
          for (int e = 0; e < COLS; ++e)
            if (item.column + e < p.value_dim)
              p.dv[value + item.column + e] = from_float<T>(sums[COLS + e]);
        float y[COLS], dy[COLS], ones[COLS], products[ROWS][COLS];
#pragma unroll
        for (int e = 0; e < COLS; ++e)
          y[e] = s_y[t][threadIdx.x][e], dy[e] = sums[e], ones[e] = 1.f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
          for (int e = 0; e < COLS; ++e) {
            state[i][e] = stored(t, i, e);
            products[i][e] = state[i][e] * grad[i][e];
          }
        out[1] = row_sums<ROWS, COLS>(grad, v);  // 4
        out[2] = row_sums<ROWS, COLS>(state, dy);
        out[3] = row_sums<ROWS, COLS>(grad, y);
        out[4] = row.alpha * row_sums<ROWS, COLS>(products, ones);
        write_rows(p, out, token, item.head, tile);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {  // 5
          const float alpha = of_row(row.alpha, i), a = of_row(row.a, i);
#pragma unroll
          for (int e = 0; e < COLS; ++e) grad[i][e] = alpha * grad[i][e] + a * dy[e];
        }
        __syncthreads();
      }
    }
    if (p.dh0)  // 6
      write_state<float, ROWS, COLS>(p.dh0 + whole, grad, item.column, p.key_dim, p.value_dim);
  }
}

// The parts of every tile of V, added in order.
template <class T>
__global__ void sum_parts_kernel(Backward<T> p, int tiles) {
  const int64_t size = p.tokens * p.heads * p.key_dim;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < size;
       i += int64_t(gridDim.x) * blockDim.x) {
    float sum[kRowGradients] = {};
    for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
      for (int g = 0; g < kRowGradients; ++g)
        sum[g] += p.parts[(int64_t(tile) * kRowGradients + g) * size + i];
    if (p.dr) p.dr[i] = from_float<T>(sum[0]);
    if (p.dk) p.dk[i] = from_float<T>(sum[1]);
    if (p.da) p.da[i] = from_float<T>(sum[2]);
    if (p.db) p.db[i] = from_float<T>(sum[3]);
    if (p.dw) p.dw[i] = sum[4];
  }
}

template <class T, int ROWS, int COLS>
void run(Backward<T> p, Device device, cudaStream_t stream) {
  const int64_t items = Item<COLS>::count(p), size = p.tokens * p.heads * p.key_dim;
  if (items == 0) return;
  const int tiles = Item<COLS>::tiles(p.value_dim);
  const int64_t blocks = std::min<int64_t>(items, 2 * multiprocessors(device));
  const Tensor scratch =
      Tensor::empty({blocks, kKept, ROWS * COLS, kLanes * kWarps}, DType::f32, device);
  Tensor parts;
  if (tiles > 1) parts = Tensor::empty({tiles, kRowGradients, size}, DType::f32, device);
  p.scratch = ptr<float>(scratch), p.parts = ptr<float>(parts);
  backward_kernel<T, ROWS, COLS><<<unsigned(blocks), dim3(kLanes, kWarps), 0, stream>>>(p, items);
  check_launch();
  if (tiles == 1 || size == 0) return;
  sum_parts_kernel<<<unsigned(std::min<int64_t>(ceil_div(size, 256), 65536)), 256, 0, stream>>>(
      p, tiles);
  check_launch();
}

}  // namespace
}  // namespace low_rank

void dplr_bwd(const DplrProblem& problem, const DplrSaved& saved, const Tensor& d_o,
              const Tensor& dht, const DplrGradients& grads) {
  using namespace low_rank;
  if (saved.inverse) return fast_bwd(problem, saved, d_o, dht, grads);
  const Tensor before = kept_offsets(problem);
  visit_compute(problem.v.dtype(), [&]<class Host>() {
    Backward<device_t<Host>> p{make_problem<Host>(problem, saved.states, before)};
    p.d_o = ptr<Host>(d_o), p.dht = ptr<float>(dht);
    p.dr = ptr<Host>(grads.dr), p.dk = ptr<Host>(grads.dk), p.dv = ptr<Host>(grads.dv);
    p.da = ptr<Host>(grads.da), p.db = ptr<Host>(grads.db);
    p.dw = ptr<float>(grads.dw), p.dh0 = ptr<float>(grads.dh0);
    visit_sizes(p.key_dim, [&]<int ROWS, int COLS>() {
      run<device_t<Host>, ROWS, COLS>(p, problem.v.device(), stream_of(d_o));
    });
  });
}

}  // namespace ebb::gpu
