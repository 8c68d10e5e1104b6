// State-memory attention, backward, in three kernels: 1 the gate's gradient and δ = R·dR, 2 the
// gradients of the tokens, 3 those of the memories. The weights are computed again from the saved
// log-sum-exp (ops/state_memory_attention.h; models.md 10.2). No sum depends on the order of
// blocks.
#include <numeric>

#include "cuda/state_memory_fast.cuh"

namespace ebb::gpu::state_memory {
namespace {

template <class T>
struct Upstream {
  const T* dy;
  const float *r, *lse, *delta;  // r [tokens,H,P], the others [tokens,H]
};

// 1. A warp per token and head of the gate: over the heads that share it, in order, x = R·dy; then
// dgate = Σ x and δ = gate·x.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    delta_kernel(Attention<T> p, const float* r, const T* dy, int64_t tokens, float* delta,
                 T* dgate) {
  const int lane = int(threadIdx.x) & 31, per_gate = p.heads / p.gate_heads;
  const int64_t warps = int64_t(gridDim.x) * (kTileThreads / 32);
  for (int64_t i = int64_t(blockIdx.x) * (kTileThreads / 32) + (threadIdx.x >> 5);
       i < tokens * p.gate_heads; i += warps) {
    const int64_t t = i / p.gate_heads;
    const int first = int(i % p.gate_heads) * per_gate;
    const float gate = p.gate_of(t, first);
    float sum = 0;
    for (int head = first; head < first + per_gate; ++head) {
      const int64_t at = p.row_at(t, head);
      float x = 0;
      for (int c = lane; c < p.p; c += 32) x += r[at + c] * to_float(dy[at + c]);
      x = warp_sum(x);
      if (lane == 0) delta[t * p.heads + head] = gate * x;
      sum += x;
    }
    if (dgate && lane == 0) dgate[i] = from_float<T>(sum);
  }
}

// Per token of a tile: the two products' row sums, and what they give.
struct Weights {
  float parts[2][64], more[2][64];  // of the logit, of V·dy
  float logit[64], value[64];
  float weight[64], dlogit[64];  // w·gate; scale·dℓ
  float q[64], e[64];            // 1/rms

  __device__ __forceinline__ void clear() {
    if (threadIdx.x < 64) logit[threadIdx.x] = 0.f, value[threadIdx.x] = 0.f;
  }
  // After a barrier.
  __device__ __forceinline__ void add_parts() {
    const int t = int(threadIdx.x);
    if (t >= 64) return;
    logit[t] += parts[0][t] + parts[1][t];
    value[t] += more[0][t] + more[1][t];
  }
  // A tile that sees one memory gives it weight 1 whatever its logit. Rows that are not there: 0.
  template <class T>
  __device__ __forceinline__ void finish(const Attention<T>& p, const Upstream<T>& u,
                                         const Tile& tile, int head) {
    const int t = int(threadIdx.x);
    if (t >= 64) return;
    const bool there = t < tile.span.rows, alone = tile.memory - tile.first_memory == 1;
    const int64_t token = tile.span.first + (there ? t : 0), at = token * p.heads + head;
    const float gate = p.gate_of(token, head);
    const float x = there ? expf(logit_of(p, token, head, logit[t]) - u.lse[at]) : 0.f;
    weight[t] = gate * x;
    dlogit[t] = there && !alone ? p.scale * x * (gate * value[t] - u.delta[at]) : 0.f;
    q[t] = p.inverse(p.q_scale, token, head, p.q_heads);
    e[t] = p.inverse(p.e_scale, token, head, p.e_heads);
  }
};

// s_parts: the row sums of c∘D, as key_sums.
template <class T>
__device__ __forceinline__ void value_sums(Accumulator<T, 64>& d, float* s_parts,
                                           const Attention<T>& p, Span span, int head, int slab) {
  d.row_sums(s_parts, [&](int r, int c, int i) {
    const int column = 64 * slab + c;
    if (r >= span.rows || column >= p.n) return 0.f;
    return d.v[i] * to_float(p.c[p.vector_at(span.first + r, head, p.c_heads, p.n) + column]);
  });
}

template <class T>
struct Tiles {
  T a[64 * slab_ld<T>()], b[64 * slab_ld<T>()], m[64 * slab_ld<T>()];
  Weights w;
};

// Slab k of N: D = Δ dy and F = Δ e, of Δ and then of its rest, and their share of the logits and
// values. Ends before the barrier that lets the sums be used.
template <class T>
__device__ __forceinline__ void products(Tiles<T>& s, const Attention<T>& p, const Upstream<T>& u,
                                         const Tile& tile, int64_t m, int head, int k,
                                         Accumulator<T, 64>& d, Accumulator<T, 64>& f) {
  constexpr int ld = slab_ld<T>();
  d.clear();
  f.clear();
  for (int slab = 0; 64 * slab < p.p; ++slab) {
    __syncthreads();
    load_vectors(s.a, u.dy, p, tile.span, head, p.heads, p.p, slab);
    load_vectors(s.b, p.e, p, tile.span, head, p.e_heads, p.p, slab);
    const T* memories = p.memories;
#pragma unroll 1
    while (memories) {
      load_memory(s.m, memories, p, m, head, k, slab);
      wait_copies();
      __syncthreads();
      multiply<Stored::rows, Stored::columns>(d, s.a, ld, s.m, ld, 64);
      multiply<Stored::rows, Stored::columns>(f, s.b, ld, s.m, ld, 64);
      memories = memories == p.rest ? nullptr : p.rest;
      if (memories) __syncthreads();
    }
  }
  key_sums(f, &s.w.parts[0][0], p, tile.span, m, head, k);
  value_sums(d, &s.w.more[0][0], p, tile.span, head, k);
  __syncthreads();
  s.w.add_parts();
}

// dx = (d − x̂ mean(d∘x̂)) / rms of the tile's rows, d [64,64·SLABS] in registers; d itself where
// there is no normalisation.
template <class T, int SLABS>
__device__ __forceinline__ void write_gradient(Accumulator<T, 64> (&d)[SLABS], const T* x,
                                               const float* inverse, const Attention<T>& p,
                                               Span span, int head, int of, int width, Weights& w,
                                               T* out) {
  __syncthreads();
  w.clear();
  if (inverse) {
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      __syncthreads();
      d[slab].row_sums(&w.parts[0][0], [&](int r, int c, int i) {
        const int column = 64 * slab + c;
        return r < span.rows && column < width
                   ? d[slab].v[i] *
                         to_float(x[p.vector_at(span.first + r, head, of, width) + column])
                   : 0.f;
      });
      __syncthreads();
      if (threadIdx.x < 64)
        w.logit[threadIdx.x] += w.parts[0][threadIdx.x] + w.parts[1][threadIdx.x];
    }
  }
  __syncthreads();
#pragma unroll
  for (int slab = 0; slab < SLABS; ++slab)
    d[slab].each([&](int r, int c, float v) {
      const int column = 64 * slab + c;
      if (r >= span.rows || column >= width) return;
      const int64_t at = p.vector_at(span.first + r, head, of, width) + column;
      if (inverse) {
        const float f = p.inverse(inverse, span.first + r, head, of);
        v = f * (v - to_float(x[at]) * f * (w.logit[r] * f / float(width)));
      }
      out[at] = from_float<T>(v);
    });
}

// Item (tile of tokens, block of heads), the last tiles first. dq̂, dc [64,64·NS] and dê [64,64·PS]
// are held in registers; a gradient is written when the last of the heads that share it is done.
// Per head and memory Δ: 1 D = Δ dy and F = Δ e, ℓ = q̂·(ρ∘F)/rms(e), V·dR = gate c·D; 2 w and dℓ;
// 3 dc += w gate D, dq̂ += dℓ ρ∘F/rms(e); 4 dê += (dℓ q̂∘ρ) Δ.
template <class T, int NS, int PS>
__global__ void __launch_bounds__(kTileThreads)
    token_kernel(Attention<T> p, Upstream<T> u, int blocks, T* dq, T* de, T* dc) {
  auto& s = dynamic_shared<Tiles<T>>();
  constexpr int ld = slab_ld<T>();
  constexpr int kRolled = NS > 2 ? 1 : NS;  // what is spilled anyway is compiled once, not NS times
  const int per_block = p.heads / blocks;
  const int64_t items = p.tiles * blocks;
  const auto first_of = [&](int head, int of) { return head % (p.heads / of) == 0; };
  const auto last_of = [&](int head, int of) { return (head + 1) % (p.heads / of) == 0; };
  for (int64_t item = items - 1 - blockIdx.x; item >= 0; item -= gridDim.x) {
    const Tile tile = tile_of(p, item / blocks);
    const Span span = tile.span;
    if (span.rows == 0) continue;
    Accumulator<T, 64> sum_q[NS], sum_c[NS], sum_e[PS];
    const int first = int(item % blocks) * per_block;
    for (int head = first; head < first + per_block; ++head) {
      if (first_of(head, p.q_heads))
#pragma unroll
        for (auto& x : sum_q) x.clear();
      if (first_of(head, p.c_heads))
#pragma unroll
        for (auto& x : sum_c) x.clear();
      if (first_of(head, p.e_heads))
#pragma unroll
        for (auto& x : sum_e) x.clear();
      for (int64_t m = tile.first_memory; m < tile.memory; ++m) {
        const float* rho = p.rho ? p.rho + (m * p.heads + head) * p.n : nullptr;
        Accumulator<T, 64> d[NS], f[NS];
        __syncthreads();  // write_gradient of the head before still reads them
        s.w.clear();
#pragma unroll kRolled
        for (int k = 0; k < NS; ++k) {  // 1
          Accumulator<T, 64> dk, fk;
          products(s, p, u, tile, m, head, k, dk, fk);
          d[k] = dk, f[k] = fk;
        }
        s.w.finish(p, u, tile, head);  // 2
        __syncthreads();
#pragma unroll kRolled
        for (int k = 0; k < NS; ++k)  // 3
#pragma unroll
          for (int i = 0; i < d[k].kCount; ++i) {
            const int r = d[k].row(i), column = 64 * k + d[k].col(i);
            const float scale = column >= p.n ? 0.f : rho ? rho[column] : 1.f;
            sum_c[k].v[i] += s.w.weight[r] * d[k].v[i];
            sum_q[k].v[i] += s.w.dlogit[r] * s.w.e[r] * scale * f[k].v[i];
          }
        if (!de) continue;
#pragma unroll 1
        for (int k = 0; k < NS; ++k)  // 4
#pragma unroll(PS > 2 ? 1 : PS)
          for (int slab = 0; slab < PS; ++slab) {
            __syncthreads();
            load_memory(s.m, p.memories, p, m, head, k, slab);
            if (slab == 0)
              load_scaled(s.a, p.q, p, span, head, p.q_heads, p.n, k, [&](int r, int column) {
                return s.w.dlogit[r] * s.w.q[r] * (rho ? rho[column] : 1.f);
              });
            wait_copies();
            __syncthreads();
            multiply<Stored::rows, Stored::rows>(sum_e[slab], s.a, ld, s.m, ld, 64);
          }
      }
      if (dq && last_of(head, p.q_heads))
        write_gradient(sum_q, p.q, p.q_scale, p, span, head, p.q_heads, p.n, s.w, dq);
      if (de && last_of(head, p.e_heads))
        write_gradient(sum_e, p.e, p.e_scale, p, span, head, p.e_heads, p.p, s.w, de);
      if (dc && last_of(head, p.c_heads))
        write_gradient(sum_c, p.c, static_cast<const float*>(nullptr), p, span, head, p.c_heads,
                       p.n, s.w, dc);
    }
    __syncthreads();
  }
}

// The tiles that see memory m, [begin, end) of all tiles.
template <class T>
__device__ __forceinline__ void readers_of(const Attention<T>& p, int64_t m, int64_t& begin,
                                           int64_t& end) {
  const int64_t n = sequence_of(p, m);
  const int64_t next = p.run_before ? p.run_before[n + 1] : (n + 1) * p.runs_per_row;
  begin = (m + 1) * p.pieces, end = next * p.pieces;
}

// Rows 64·slab... of dΔ from G and X; zero where nobody sees the memory, which is then not read.
template <class T, int PS>
__device__ __forceinline__ void write_memory(Accumulator<T, 64> (&g)[PS],
                                             Accumulator<T, 64> (&x)[PS], const Attention<T>& p,
                                             int64_t m, int head, int slab_n, bool seen, Weights& w,
                                             T* dmemories) {
  const int64_t base = p.memory_at(m, head) + int64_t(64 * slab_n) * p.p;
  const int rows = min(64, p.n - 64 * slab_n);
  const bool normalized = p.rho && seen;
  const float* rho = p.rho ? p.rho + (m * p.heads + head) * p.n + 64 * slab_n : nullptr;
  __syncthreads();
  w.clear();
  if (normalized) {
#pragma unroll
    for (int slab = 0; slab < PS; ++slab) {
      __syncthreads();
      x[slab].row_sums(&w.parts[0][0], [&](int r, int c, int i) {
        const int column = 64 * slab + c;
        return r < rows && column < p.p
                   ? x[slab].v[i] * to_float(p.memories[base + int64_t(r) * p.p + column])
                   : 0.f;
      });
      __syncthreads();
      if (threadIdx.x < 64)
        w.logit[threadIdx.x] += w.parts[0][threadIdx.x] + w.parts[1][threadIdx.x];
    }
  }
  __syncthreads();
#pragma unroll
  for (int slab = 0; slab < PS; ++slab)
#pragma unroll
    for (int i = 0; i < g[slab].kCount; ++i) {
      const int r = g[slab].row(i), column = 64 * slab + g[slab].col(i);
      if (r >= rows || column >= p.p) continue;
      const int64_t at = base + int64_t(r) * p.p + column;
      float v = g[slab].v[i] + x[slab].v[i];
      if (normalized) {
        const float f = rho[r], mean = w.logit[r] * f / float(p.p);  // of X∘Δ̂
        v = g[slab].v[i] + f * (x[slab].v[i] - f * to_float(p.memories[at]) * mean);
      }
      dmemories[at] = from_float<T>(v);
    }
}

// Item (memory, head, HELD slabs of N); G = Σ w c dRᵀ and X = Σ dℓ q̂ êᵀ [64·HELD,64·PS] are held
// in registers. Per tile that sees the memory, in order: 1 D and F of all of N as above; 2 w and
// dℓ; 3 G += (w gate c)ᵀ dy, X += (dℓ q̂/rms(e))ᵀ e. At the end: 4 dΔ = G + ρ∘(X − Δ̂ mean(X∘Δ̂)).
template <class T, int HELD, int PS>
__global__ void __launch_bounds__(kTileThreads)
    memory_kernel(Attention<T> p, Upstream<T> u, int64_t memories, T* dmemories) {
  auto& s = dynamic_shared<Tiles<T>>();
  constexpr int ld = slab_ld<T>();
  const int slabs_n = (p.n + 63) / 64, parts = (slabs_n + HELD - 1) / HELD;
  const int64_t items = memories * p.heads * parts;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int first = int(item % parts) * HELD, head = int(item / parts % p.heads);
    const int64_t m = item / parts / p.heads;
    Accumulator<T, 64> g[HELD][PS], x[HELD][PS];
#pragma unroll
    for (int own = 0; own < HELD; ++own)
#pragma unroll
      for (int slab = 0; slab < PS; ++slab) g[own][slab].clear(), x[own][slab].clear();
    int64_t begin, end;
    readers_of(p, m, begin, end);
    for (int64_t index = begin; index < end; ++index) {
      const Tile tile = tile_of(p, index);
      const Span span = tile.span;
      if (span.rows == 0) continue;
      __syncthreads();
      s.w.clear();
      for (int k = 0; k < slabs_n; ++k) {  // 1
        Accumulator<T, 64> d, f;
        products(s, p, u, tile, m, head, k, d, f);
      }
      s.w.finish(p, u, tile, head);  // 2
#pragma unroll
      for (int own = 0; own < HELD; ++own) {  // 3
        __syncthreads();
        load_scaled(s.a, p.c, p, span, head, p.c_heads, p.n, first + own,
                    [&](int r, int) { return s.w.weight[r]; });
        load_scaled(s.b, p.q, p, span, head, p.q_heads, p.n, first + own,
                    [&](int r, int) { return s.w.dlogit[r] * s.w.q[r] * s.w.e[r]; });
#pragma unroll
        for (int slab = 0; slab < PS; ++slab) {
          __syncthreads();
          load_vectors(s.m, u.dy, p, span, head, p.heads, p.p, slab);
          wait_copies();
          __syncthreads();
          multiply<Stored::columns, Stored::rows>(g[own][slab], s.a, ld, s.m, ld, 64);
          __syncthreads();
          load_vectors(s.m, p.e, p, span, head, p.e_heads, p.p, slab);
          wait_copies();
          __syncthreads();
          multiply<Stored::columns, Stored::rows>(x[own][slab], s.b, ld, s.m, ld, 64);
        }
      }
    }
#pragma unroll
    for (int own = 0; own < HELD; ++own)  // 4
      write_memory(g[own], x[own], p, m, head, first + own, begin < end, s.w, dmemories);
    __syncthreads();
  }
}

// Few instances, as each takes the compiler long: those of models, and one for everything else.
template <class F>
void visit_both(int64_t n, int64_t p, F&& f) {
  if (p > 64 || n > 128)
    f.template operator()<4, 4>();
  else if (n > 64)
    f.template operator()<2, 1>();
  else
    f.template operator()<1, 1>();
}

// Two slabs of N where P needs one.
template <class F>
void visit_held(int64_t n, int64_t p, F&& f) {
  if (n > 64 && p <= 64)
    f.template operator()<2, 1>();
  else if (p <= 64)
    f.template operator()<1, 1>();
  else
    f.template operator()<1, 4>();
}

}  // namespace
}  // namespace ebb::gpu::state_memory

namespace ebb::gpu {

void state_memory_attention_bwd(const StateMemoryProblem& given, const Tensor& r, const Tensor& lse,
                                const Tensor& d_o, const StateMemoryGradients& wanted) {
  using namespace state_memory;
  if (r.numel() == 0) return;
  if (given.prepared || fast_path(given)) return fast_bwd(given, r, lse, d_o, wanted);
  Tensor rest;
  const StateMemoryProblem problem = with_narrow_memories(given, &rest);
  StateMemoryGradients grads = wanted;
  const bool widen = wanted.dmemories && wanted.dmemories.dtype() != problem.q.dtype();
  if (widen) grads.dmemories = Tensor::empty_like(problem.memories);
  const Scales scales = make_scales(given, rest);
  const int64_t tokens = problem.batch() * problem.time(), memories = problem.memories.size(0);
  const cudaStream_t stream = stream_of(r);
  const Tensor delta = Tensor::empty({tokens, problem.heads()}, DType::f32, r.device());
  visit_compute(problem.q.dtype(), [&]<class Host>() {
    using T = device_t<Host>;
    const Attention<T> p = make_attention<Host>(problem, scales);
    const Upstream<T> u{ptr<Host>(d_o), ptr<float>(r), ptr<float>(lse), ptr<float>(delta)};
    const int64_t warps = std::min<int64_t>(ceil_div(tokens * p.gate_heads, kTileThreads / 32),
                                            int64_t(32) * multiprocessors(r.device()));
    delta_kernel<T><<<unsigned(warps), kTileThreads, 0, stream>>>(
        p, u.r, u.dy, tokens, ptr<float>(delta), ptr<Host>(grads.dgate));
    check_launch();
    if (grads.dq || grads.de || grads.dc) {
      const int blocks = std::gcd(std::gcd(p.q_heads, p.e_heads), p.c_heads);
      visit_both(p.n, p.p, [&]<int NS, int PS>() {
        launch_tiles<Tiles<T>>(token_kernel<T, NS, PS>, p.tiles * blocks, stream, p, u, blocks,
                               ptr<Host>(grads.dq), ptr<Host>(grads.de), ptr<Host>(grads.dc));
      });
    }
    if (grads.dmemories)
      visit_held(p.n, p.p, [&]<int HELD, int PS>() {
        launch_tiles<Tiles<T>>(memory_kernel<T, HELD, PS>,
                               memories * p.heads * ceil_div(p.n, 64 * HELD), stream, p, u,
                               memories, ptr<Host>(grads.dmemories));
      });
  });
  if (widen) wanted.dmemories.copy_(grads.dmemories);
}

}  // namespace ebb::gpu
