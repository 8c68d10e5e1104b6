// One decoding step of gated linear attention (ops/gated_linear_attention.h) and of SSD
// (ops/ssd.h): bound by the state, which is read and written once.
#include "cuda/ssd_gate.cuh"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Step {
  const T *q, *k, *v;              // [B,G,K], [B,H,V]
  const float *g, *weight, *skip;  // [B,H], [B,H] or null, [H] or null
  float* state;                    // [B,H,K,V]
  T* o;                            // [B,H,V]
  float scale;
  int groups, heads, key_dim, value_dim;
  int64_t batch;
  StepSource steps = {};  // SSD: instead of g and weight
};

// e^g and w of one head of one sequence.
template <class T>
__device__ __forceinline__ float2 gates(const Step<T>& p, int64_t row, int h, int64_t n) {
  if (!p.steps.dt) return {expf(p.g[row]), p.weight ? p.weight[row] : 1.f};
  float slope;
  const float step = p.steps.step(p.steps.raw(n, h) + p.steps.offset(h), slope);
  return {expf(p.steps.rate(h) * step), step};
}

// Item (sequence, head, COLS·N columns of V), block 256: a thread owns N neighbouring columns and
// every R-th row, R = 256/COLS, ROWS of them. 1 read S, before anything else is waited for. 2 S =
// e^g S + w k vᵀ, written. 3 o = scale Sᵀ q + skip v, summed over the threads of a column in order.
template <class T, int COLS, int N, int ROWS>
__global__ void __launch_bounds__(kThreads, ROWS <= 8 ? 4 : 2) step_kernel(Step<T> p) {
  constexpr int kGroups = kThreads / COLS;
  __shared__ float s_k[256], s_q[256], s_sum[kGroups][COLS * N];
  const int x = int(threadIdx.x) % COLS, y = int(threadIdx.x) / COLS;
  const int64_t tiles = (p.value_dim + COLS * N - 1) / (COLS * N);
  for (int64_t item = blockIdx.x; item < p.batch * p.heads * tiles; item += gridDim.x) {
    const int64_t row = item / tiles, n = row / p.heads;  // of all sequences
    const int h = int(row % p.heads);
    const int column = int(item % tiles) * COLS * N + x * N;
    const bool inside = column < p.value_dim;
    float* state = p.state + (row * p.key_dim + y) * p.value_dim + column;
    const int64_t step = int64_t(kGroups) * p.value_dim;
    Pack<float, N> r_s[ROWS];  // 1
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      r_s[i] = {};
      if (inside && y + i * kGroups < p.key_dim) r_s[i] = load_raw<float, N>(state + step * i);
    }
    const int64_t key = (n * p.groups + h / (p.heads / p.groups)) * p.key_dim;
    if (int(threadIdx.x) < p.key_dim) {
      s_k[threadIdx.x] = to_float(p.k[key + threadIdx.x]);
      s_q[threadIdx.x] = to_float(p.q[key + threadIdx.x]);
    }
    const float2 gate = gates(p, row, h, n);
    float r_u[N], r_o[N] = {};
#pragma unroll
    for (int j = 0; j < N; ++j)
      r_u[j] = inside ? gate.y * to_float(p.v[row * p.value_dim + column + j]) : 0.f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {  // 2
      const int r = y + i * kGroups;
      if (!inside || r >= p.key_dim) break;
      float next[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        next[j] = gate.x * r_s[i].v[j] + s_k[r] * r_u[j];
        r_o[j] += s_q[r] * next[j];
      }
      store_pack(state + step * i, next);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) s_sum[y][x * N + j] = r_o[j];  // 3
    __syncthreads();
    const int c = int(threadIdx.x);
    const int out = int(item % tiles) * COLS * N + c;
    if (c < COLS * N && out < p.value_dim) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) sum += s_sum[i][c];
      sum *= p.scale;
      if (p.skip) sum += p.skip[h] * to_float(p.v[row * p.value_dim + out]);
      p.o[row * p.value_dim + out] = from_float<T>(sum);
    }
    __syncthreads();
  }
}

// f<ROWS>(): rows of a thread where 16 share a column.
template <class F>
void visit_rows(int key_dim, F&& f) {
  if (key_dim <= 64)
    f.template operator()<4>();
  else if (key_dim <= 128)
    f.template operator()<8>();
  else
    f.template operator()<16>();
}

template <class T>
void launch(const Step<T>& p, cudaStream_t stream) {
  const bool wide = p.value_dim % 4 == 0 && reinterpret_cast<uintptr_t>(p.state) % 16 == 0;
  const int64_t tiles = wide ? ceil_div(p.value_dim, 64) : ceil_div(p.value_dim, 16);
  const int64_t blocks = std::min(p.batch * p.heads * tiles, (int64_t(1) << 31) - 1);
  visit_rows(p.key_dim, [&]<int ROWS>() {
    if (wide)
      step_kernel<T, 16, 4, ROWS><<<unsigned(blocks), kThreads, 0, stream>>>(p);
    else
      step_kernel<T, 16, 1, ROWS><<<unsigned(blocks), kThreads, 0, stream>>>(p);
  });
  check_launch();
}

template <class Host>
Step<device_t<Host>> step_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& skip,
                             const Tensor& state, double scale, const Tensor& o) {
  Step<device_t<Host>> p{};
  p.q = ptr<Host>(q), p.k = ptr<Host>(k), p.v = ptr<Host>(v), p.o = ptr<Host>(o);
  p.skip = ptr<float>(skip), p.state = ptr<float>(state);
  p.scale = float(scale);
  p.groups = int(q.size(1)), p.heads = int(v.size(1));
  p.key_dim = int(q.size(2)), p.value_dim = int(v.size(2));
  p.batch = v.size(0);
  return p;
}

}  // namespace

void gated_linear_attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                 const Tensor& state, const LinearAttentionStep& options,
                                 const Tensor& o) {
  if (o.numel() == 0) return;
  visit_compute(v.dtype(), [&]<class Host>() {
    auto p = step_of<Host>(q, k, v, options.skip, state, options.scale, o);
    p.g = ptr<float>(g), p.weight = ptr<float>(options.weight);
    launch(p, stream_of(o));
  });
}

void ssd_step(const SsdGateArgs& gate, const Tensor& x, const Tensor& B, const Tensor& C,
              const Tensor& D, const Tensor& state, const Tensor& y) {
  if (y.numel() == 0) return;
  visit_compute(x.dtype(), [&]<class Host>() {
    auto p = step_of<Host>(C, B, x, D, state, 1, y);
    p.steps = StepSource(gate);
    launch(p, stream_of(y));
  });
}

}  // namespace ebb::gpu
