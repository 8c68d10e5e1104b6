// Contributions of short runs and what their gradients add (cuda/linear_attention_runs.cuh).
#include "cuda/linear_attention_runs.cuh"

#include "cuda/delta_fragments.cuh"
#include "cuda/delta_gradient_sums.cuh"

namespace ebb::gpu::linear_attention {
namespace {

// The block's shared memory: places, keys [64,K], values [64,64], E [runs,K,64].
struct RunShared {
  RunPlaces& places;
  bf16_t *k, *v, *e;

  __device__ __forceinline__ explicit RunShared(const RunProblem& p)
      : places(dynamic_shared<RunPlaces>()),
        k(reinterpret_cast<bf16_t*>(&places + 1)),
        v(k + kPlaces * p.key_row()),
        e(v + kPlaces * kRunRow) {}
  static int bytes(const RunProblem& p, int runs) {
    const int elements = kPlaces * p.key_row() + kPlaces * kRunRow + runs * p.keys() * kRunRow;
    return int(sizeof(RunPlaces)) + 2 * elements;
  }
};

// Item (runs, head). A warp has the rows of K and a share of the columns of V of one run. Per 64
// columns of V: 1 v ← τ w v, as right operands; of Δ in f32 (wide) with what rounding leaves as
// more of them, since a sharp softmax over Δ shows it. 2 Δ = kᵀ v.
template <int ROWS>
__global__ void __launch_bounds__(kRunThreads)
    run_kernel(RunProblem p, bf16_t* narrow, float* wide) {
  constexpr int kSteps = kWarpsOf<ROWS>, kPairs = 4 / kSteps;  // of 16 tokens; of 16 columns
  const RunShared s(p);
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, run = warp / kSteps, t0 = ROWS * run;
  const int n0 = 16 * kPairs * (warp % kSteps);
  const int64_t items = (p.chunks + kRunsOf<ROWS> - 1) / kRunsOf<ROWS> * p.value_heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int h = int(item % p.value_heads);
    p.find<ROWS>(s.places, item / p.value_heads);
    const int64_t to =
        p.state_at(item / p.value_heads * kRunsOf<ROWS> + run, h);  // of the warp's run
    p.fetch<ROWS>(s.k, p.key_row(), s.places, p.k_row(0, h), p.k_step, p.key_dim, p.keys());
    if (warp == 0) put_run_gates<ROWS>(p, s.places, h);
    for (int v0 = 0; v0 < p.value_dim; v0 += kRunColumns) {
      p.fetch<ROWS>(s.v, kRunRow, s.places, p.v_row(0, h) + v0, p.v_step, p.value_dim - v0,
                    kRunColumns);
      wait_copies();
      __syncthreads();
      unsigned b[kSteps][kPairs][4], rest[kSteps][kPairs][4];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {  // 1
        const int t = t0 + 16 * i + 2 * l.c;
        const float2 tail[2] = {pair(s.places.tail, t), pair(s.places.tail, t + 8)};
        const float2 weight[2] = {pair(s.places.weight, t), pair(s.places.weight, t + 8)};
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          load_matrices_transposed(b[i][j], s.v + (t0 + 16 * i + l.low + 8 * l.odd) * kRunRow + n0 +
                                                16 * j + 8 * l.high);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float x = tail[e & 1].x * weight[e & 1].x * low_half(b[i][j][e]);
            const float y = tail[e & 1].y * weight[e & 1].y * high_half(b[i][j][e]);
            b[i][j][e] = pack_bf16(x, y);
            rest[i][j][e] = pack_bf16(x - low_half(b[i][j][e]), y - high_half(b[i][j][e]));
          }
        }
      }
      for (int m0 = 0; m0 < p.keys(); m0 += 16) {  // 2
        float sum[kPairs][2][4] = {};
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          unsigned a[4];
          load_matrices_transposed(
              a, s.k + (t0 + 16 * i + l.low + 8 * l.high) * p.key_row() + m0 + 8 * l.odd);
#pragma unroll
          for (int j = 0; j < kPairs; ++j) {
            mma(sum[j][0], a, b[i][j][0], b[i][j][1]);
            mma(sum[j][1], a, b[i][j][2], b[i][j][3]);
            if (!wide) continue;
            mma(sum[j][0], a, rest[i][j][0], rest[i][j][1]);
            mma(sum[j][1], a, rest[i][j][2], rest[i][j][3]);
          }
        }
        if (s.places.rows[run] == 0) continue;
#pragma unroll
        for (int j = 0; j < kPairs; ++j)
#pragma unroll
          for (int f = 0; f < 2; ++f)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int k = m0 + l.g + 8 * half, c = v0 + n0 + 16 * j + 8 * f + 2 * l.c;
              if (k >= p.key_dim || c >= p.value_dim) continue;
              const int64_t at = to + int64_t(k) * p.value_dim + c;
              const float(&x)[4] = sum[j][f];
              if (wide)
                *reinterpret_cast<float2*>(wide + at) = {x[2 * half], x[2 * half + 1]};
              else
                *reinterpret_cast<unsigned*>(narrow + at) = pack_bf16(x[2 * half], x[2 * half + 1]);
            }
      }
      __syncthreads();
    }
  }
}

// s [runs,K,64] = columns v0... of E of a head, zeros around it; so many pieces asked for at once.
template <int ROWS, int AT_ONCE>
__device__ __forceinline__ void fetch_upstream(bf16_t* s, const RunProblem& p,
                                               const RunGradients& grads, int64_t item, int h,
                                               int v0) {
  const int count = kRunsOf<ROWS> * p.keys() * (kRunColumns / 8);
  for (int i0 = int(threadIdx.x); i0 < count; i0 += AT_ONCE * kRunThreads) {
    float4 x[AT_ONCE][2];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int i = i0 + j * kRunThreads, row = i / 8, c = i % 8 * 8, k = row % p.keys();
      const int64_t run = item * kRunsOf<ROWS> + row / p.keys();
      const bool valid = i < count && run < p.chunks && k < p.key_dim && v0 + c < p.value_dim;
      const int64_t at = valid ? p.state_at(run, h) + int64_t(k) * p.value_dim + v0 + c : 0;
      x[j][0] = x[j][1] = float4{0.f, 0.f, 0.f, 0.f};
      if (grads.wide && valid) {
        const auto* from = static_cast<const float*>(grads.upstream) + at;
        x[j][0] = __ldg(reinterpret_cast<const float4*>(from));
        x[j][1] = __ldg(reinterpret_cast<const float4*>(from) + 1);
      } else if (!grads.wide && i < count) {
        const auto* from = static_cast<const bf16_t*>(grads.upstream) + at;
        copy_async_or_zero(s + row * kRunRow + c, from, valid);
      }
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int i = i0 + j * kRunThreads;
      if (!grads.wide || i >= count) continue;
      *reinterpret_cast<uint4*>(s + i / 8 * kRunRow + i % 8 * 8) = {
          pack_bf16(x[j][0].x, x[j][0].y), pack_bf16(x[j][0].z, x[j][0].w),
          pack_bf16(x[j][1].x, x[j][1].y), pack_bf16(x[j][1].z, x[j][1].w)};
    }
  }
}

// Two rows of fragments [16,8N] in memory += factor·x, as far as `cols` goes; null: none. All of a
// row is asked for before the first of it is written.
template <int N>
__device__ __forceinline__ void add_rows(bf16_t* const (&rows)[2], int cols, const float (&x)[N][4],
                                         const float (&factor)[2], const Lane& l) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!rows[half]) continue;
    auto* at = reinterpret_cast<unsigned*>(rows[half]) + l.c;
    unsigned old[N];
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (8 * n < cols) old[n] = at[4 * n];
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (8 * n < cols)
        at[4 * n] = pack_bf16(low_half(old[n]) + factor[half] * x[n][2 * half],
                              high_half(old[n]) + factor[half] * x[n][2 * half + 1]);
  }
}

// By one warp, lane l with places 2l and 2l+1: what x, in s.kept, adds to the gradients of the
// gates of a head.
template <int ROWS>
__device__ __forceinline__ void add_gate_gradients(const RunProblem& p, const RunGradients& grads,
                                                   const RunPlaces& s, int64_t item, int h) {
  constexpr int kLanes = ROWS / 2;  // of a run
  const int lane = int(threadIdx.x) & 31;
  const Span span = lane_span<ROWS>(s);
  const float2 dw = pair(s.kept, 2 * lane), weight = pair(s.weight, 2 * lane);
  const float own = weight.x * dw.x + weight.y * dw.y;
  float before = own;
#pragma unroll
  for (int o = 1; o < kLanes; o *= 2) {
    const float y = __shfl_up_sync(0xffffffffu, before, o, kLanes);
    if (lane % kLanes >= o) before += y;
  }
  before = __shfl_up_sync(0xffffffffu, before, 1, kLanes);
  if (lane % kLanes == 0) before = 0.f;
  float sums[2] = {};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (2 * lane + e >= span.rows) continue;
    const int64_t token = span.first + 2 * lane + e, at = p.gate_at(token, h);
    const float dweight = e ? dw.y : dw.x, dg = before + (e ? weight.x * dw.x : 0.f);
    if (p.steps.dt) {
      float slope;
      const float step = p.steps.step(p.steps.raw(token, h) + p.steps.offset(h), slope);
      const float ddt = slope * (dweight + p.steps.rate(h) * dg);
      sums[0] += ddt, sums[1] += step * dg;
      if (grads.ddt && p.steps.wide) {
        static_cast<float*>(grads.ddt)[at] += ddt;
      } else if (grads.ddt) {
        bf16_t& to = static_cast<bf16_t*>(grads.ddt)[at];
        to = from_float<bf16_t>(to_float(to) + ddt);
      }
    }
    if (grads.dg) grads.dg[at] += dg;
    if (grads.dweight) grads.dweight[at] += dweight;
  }
  if (!grads.head_sums) return;
  sums[0] = warp_sum(sums[0]), sums[1] = warp_sum(sums[1]);
  if (lane != 0) return;
  float* to = grads.head_sums + 3 * item * p.value_heads + h;
  to[0] = 0.f, to[p.value_heads] = sums[0], to[2 * p.value_heads] = sums[1];
}

// Item (runs, group). A warp has 16 tokens of one run, and of K FRAGMENTS of 8 channels. Per head:
// per 64 columns of V 1 u = k E, y += v Eᵀ; 2 dv += τ w u. 3 x = τ k·y, dk += τ w y. 4 the gates.
// Last: 5 dk of all heads.
template <int ROWS, int FRAGMENTS>
__global__ void __launch_bounds__(kRunThreads, FRAGMENTS == 2   ? 4
                                               : FRAGMENTS == 8 ? 3
                                                                : 2)
    run_gradient_kernel(RunProblem p, RunGradients grads) {
  const RunShared s(p);
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, run = warp / kWarpsOf<ROWS>, m0 = 16 * warp;
  const int ld = p.key_row(), per_group = p.value_heads / p.heads;
  const bf16_t* e = s.e + run * p.keys() * kRunRow;
  const int64_t items = (p.chunks + kRunsOf<ROWS> - 1) / kRunsOf<ROWS> * p.heads;
  for (int64_t at = blockIdx.x; at < items; at += gridDim.x) {
    const int64_t item = at / p.heads;
    const int group = int(at % p.heads);
    p.find<ROWS>(s.places, item);
    const int rows = s.places.rows[run];
    const int64_t first = s.places.first[run] - run * ROWS;  // token of place 0
    float dk[FRAGMENTS][4] = {};
    for (int h = group * per_group; h < (group + 1) * per_group; ++h) {
      if (h == group * per_group)
        p.fetch<ROWS>(s.k, ld, s.places, p.k_row(0, h), p.k_step, p.key_dim, p.keys());
      if (warp == 0) put_run_gates<ROWS>(p, s.places, h);
      float y[FRAGMENTS][4] = {}, factor[2] = {};
      for (int v0 = 0; v0 < p.value_dim; v0 += kRunColumns) {
        p.fetch<ROWS>(s.v, kRunRow, s.places, p.v_row(0, h) + v0, p.v_step, p.value_dim - v0,
                      kRunColumns);
        fetch_upstream<ROWS, FRAGMENTS == 2 ? 4 : 2>(s.e, p, grads, item, h, v0);
        wait_copies();
        __syncthreads();
        float u[8][4] = {};
        for (int k0 = 0; k0 < p.keys(); k0 += 16) {  // 1
          unsigned a[4], b[4];
          left(a, s.k, ld, m0, k0, l);
#pragma unroll
          for (int n = 0; n < 8; n += 2) {
            load_matrices_transposed(b,
                                     e + (k0 + l.low + 8 * l.odd) * kRunRow + 8 * n + 8 * l.high);
            mma(u[n], a, b[0], b[1]), mma(u[n + 1], a, b[2], b[3]);
          }
        }
#pragma unroll
        for (int k = 0; k < kRunColumns; k += 16) {
          unsigned a[4], b[4];
          left(a, s.v, kRunRow, m0, k, l);
#pragma unroll
          for (int n = 0; n < FRAGMENTS; n += 2) {
            if (8 * n >= p.keys()) continue;
            right(b, e, kRunRow, k, 8 * n, l);
            mma(y[n], a, b[0], b[1]), mma(y[n + 1], a, b[2], b[3]);
          }
        }
        bf16_t* to[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // 2
          const int r = m0 + l.g + 8 * half;
          factor[half] = s.places.tail[r] * s.places.weight[r];
          const bool wanted = grads.dv && r < run * ROWS + rows;
          to[half] = wanted ? grads.dv + p.value_at(first + r, h) + v0 : nullptr;
        }
        add_rows(to, p.value_dim - v0, u, factor, l);
        __syncthreads();
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // 3
        const int r = m0 + l.g + 8 * half;
        float x = 0;
#pragma unroll
        for (int n = 0; n < FRAGMENTS; ++n) {
          if (8 * n >= p.keys()) continue;
          const unsigned k = *reinterpret_cast<const unsigned*>(s.k + r * ld + 8 * n + 2 * l.c);
          x += low_half(k) * y[n][2 * half] + high_half(k) * y[n][2 * half + 1];
          dk[n][2 * half] += factor[half] * y[n][2 * half];
          dk[n][2 * half + 1] += factor[half] * y[n][2 * half + 1];
        }
        x = s.places.tail[r] * quad_sum(x);
        if (l.c == 0) s.places.kept[r] = x;
      }
      __syncthreads();
      if (warp == 0) add_gate_gradients<ROWS>(p, grads, s.places, item, h);  // 4
    }
    bf16_t* to[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 5
      const int r = m0 + l.g + 8 * half;
      const bool wanted = grads.dk && r < run * ROWS + rows;
      to[half] = wanted ? grads.dk + p.key_at(first + r, group * per_group) : nullptr;
    }
    add_rows(to, p.key_dim, dk, {1.f, 1.f}, l);
    __syncthreads();
  }
}

// f.operator()<ROWS>() for runs of `length` tokens.
template <class F>
void visit_runs(int length, F&& f) {
  if (length <= 16)
    f.template operator()<16>();
  else if (length <= 32)
    f.template operator()<32>();
  else
    f.template operator()<64>();
}

// f.operator()<FRAGMENTS>() with the fragments of 8 channels that hold K <= 128.
template <class F>
void visit_fragments(int key_dim, F&& f) {
  if (key_dim <= 16)
    f.template operator()<2>();
  else if (key_dim <= 64)
    f.template operator()<8>();
  else
    f.template operator()<16>();
}

template <class... P, class... A>
void launch_runs(void (*kernel)(P...), int64_t items, int bytes, cudaStream_t stream,
                 const A&... arguments) {
  if (items == 0) return;
  if (bytes > 48 * 1024)
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "shared memory");
  kernel<<<grid_of(items), kRunThreads, size_t(bytes), stream>>>(arguments...);
  check_launch();
}

int64_t items_of(int64_t runs, int64_t length) {
  int64_t items = 0;
  visit_runs(int(length), [&]<int ROWS>() { items = ceil_div(runs, kRunsOf<ROWS>); });
  return items;
}

}  // namespace

int64_t run_items(const LinearAttentionProblem& p) {
  const Cut cut(p);
  return items_of(cut.chunks, cut.run);
}

void write_short_runs(const LinearAttentionProblem& problem, const LinearAttentionSaved& saved,
                      const Tensor& contributions, cudaStream_t stream) {
  const Cut cut(problem);
  const Tensor before = run_offsets(problem, cut);
  const RunProblem p{make_fast_attention(problem, cut, saved, before)};
  const bool wide = contributions.dtype() == DType::f32;
  visit_runs(p.chunk, [&]<int ROWS>() {
    launch_runs(run_kernel<ROWS>, items_of(p.chunks, p.chunk) * p.value_heads,
                RunShared::bytes(p, 0), stream, p, wide ? nullptr : ptr<bf16>(contributions),
                wide ? ptr<float>(contributions) : nullptr);
  });
}

void add_run_gradients(const LinearAttentionProblem& problem, const LinearAttentionSaved& saved,
                       const RunGradients& grads, cudaStream_t stream) {
  const Cut cut(problem);
  const Tensor before = run_offsets(problem, cut);
  const RunProblem p{make_fast_attention(problem, cut, saved, before)};
  visit_runs(p.chunk, [&]<int ROWS>() {
    visit_fragments(p.key_dim, [&]<int FRAGMENTS>() {
      launch_runs(run_gradient_kernel<ROWS, FRAGMENTS>, items_of(p.chunks, p.chunk) * p.heads,
                  RunShared::bytes(p, kRunsOf<ROWS>), stream, p, grads);
    });
  });
}

}  // namespace ebb::gpu::linear_attention
