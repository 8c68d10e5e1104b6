// Delta rule with a decay per channel, backward: the gradients of every chunk and slab of K, in f32
// by sub-chunks of 16 tokens (cuda/delta_rule_channel_bwd.cu). Equations of
// ops/delta_rule_channel_cpu_bwd.cpp.
#include "cuda/delta_rule_channel.cuh"

namespace ebb::gpu::delta {
namespace {

template <class T>
using Backward = ChannelBackward<T>;

template <class T>
struct ValueTiles {  // 32 columns of V
  static constexpr int kNarrow = kTileRows * row_length<T>(kScanColumns);
  T d_o[kNarrow], x[kNarrow], values[kNarrow], state[kNarrow], dstate[kNarrow];
};
template <class T>
struct GradientShared {
  static constexpr int kSquare = kTileRows * kFloatRow;
  static constexpr int kStages = sizeof(T) == 2 ? 2 : 1;
  double sums[kSubs][64];    // log decays of a sub-chunk
  float scores[2][kSquare];  // dP, dM
  union {                    // one after the other
    ValueTiles<T> v[kStages];
    float rows[3][kSquare];  // S dO, S X, D V'; then k∘tail, q∘head, b∘k∘head
  };
  float reads[kSubs][64], kept[kSubs][64];  // sums over a sub-chunk
  float pairs[3][64];                       // sums over the pairs (2,0), (3,1), (3,0)
  float carry[4][64];                       // <S, D> by channel, in four parts
  float value_part[kTileRows];              // v·X
  float key_part[2 * kSubs][kSub];          // Σ_d k p over half of the channels
};

// One tile of 32 columns of V.
template <class T>
__device__ __forceinline__ void load_value_tiles(const Backward<T>& p, Span span, int64_t chunk,
                                                 int hv, int slab, int v0, ValueTiles<T>& s) {
  constexpr int ld_v = row_length<T>(kScanColumns);
  const int cols = min(kScanColumns, p.value_dim - v0), width = slab_width(p, slab);
  const int64_t at = p.row_at(span.first, hv) * p.value_dim + v0;
  load_tile(s.d_o, ld_v, kTileRows, kScanColumns, p.d_o + p.value_at(span.first, hv) + v0,
            p.value_stride(), span.rows, cols);
  load_tile(s.x, ld_v, kTileRows, kScanColumns, p.x + at, p.value_dim, span.rows, cols);
  load_tile(s.values, ld_v, kTileRows, kScanColumns, p.values + at, p.value_dim, span.rows, cols);
  const int64_t state = p.state_at(chunk, hv) + int64_t(64 * slab) * p.value_dim + v0;
  load_tile(s.state, ld_v, kTileRows, kScanColumns, p.states + state, p.value_dim, width, cols);
  load_tile(s.dstate, ld_v, kTileRows, kScanColumns, p.dstates + state, p.value_dim, width, cols);
}

// dv and dw of 32 columns of V, and v·X. A warp has rows w, w+8, ..., a lane one of the columns.
template <class T>
__device__ __forceinline__ void value_gradients(const Backward<T>& p, Span span, int hv, int v0,
                                                const T* s_x, float* s_value_part) {
  constexpr int kWarps = kTileThreads / 32, kRows = kTileRows / kWarps;
  const int lane = int(threadIdx.x) & 31, warp = int(threadIdx.x) >> 5;
  float v[kRows], w[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = warp + kWarps * i;
    const bool inside = r < span.rows && v0 + lane < p.value_dim;
    const int64_t at = p.value_at(span.first + r, hv) + v0 + lane;
    v[i] = inside ? to_float(p.v[at]) : 0.f;
    w[i] = !inside ? 0.f : p.write ? p.write[at] : p.write_strength(span.first + r, hv);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = warp + kWarps * i;
    if (r >= span.rows) continue;
    const bool inside = v0 + lane < p.value_dim;
    const int64_t at = p.value_at(span.first + r, hv) + v0 + lane;
    const float x = to_float(s_x[r * row_length<T>(kScanColumns) + lane]);
    if (inside && p.dv) p.dv[at] = from_float<T>(w[i] * x);
    if (inside && p.dwrite) p.dwrite[at] = v[i] * x;
    if (!p.dbeta) continue;
    const float sum = warp_sum(v[i] * x);
    if (lane == 0) s_value_part[r] += sum;
  }
}

// Step 1 of gradient_kernel: s.scores, s.rows, s.carry.
template <class T>
__device__ __forceinline__ void products(const Backward<T>& p, Span span, int64_t chunk, int hv,
                                         int slab, GradientShared<T>& s) {
  constexpr int ld_v = row_length<T>(kScanColumns);
  const int t = int(threadIdx.x);
  if (t < kTileRows) s.value_part[t] = 0.f;
  Accumulator<T, 64> dp, dm, q, b, k;
  dp.clear(), dm.clear(), q.clear(), b.clear(), k.clear();
  const int channel = t >> 2, part = t & 3;  // of one channel, eight columns of 32
  float carry = 0;
  constexpr int kStages = GradientShared<T>::kStages;
  load_value_tiles(p, span, chunk, hv, slab, 0, s.v[0]);
  for (int v0 = 0, stage = 0; v0 < p.value_dim; v0 += kScanColumns, stage = (stage + 1) % kStages) {
    ValueTiles<T>& now = s.v[stage];
    const bool more = v0 + kScanColumns < p.value_dim;
    wait_copies();
    __syncthreads();
    if (more && kStages > 1)
      load_value_tiles(p, span, chunk, hv, slab, v0 + kScanColumns, s.v[(stage + 1) % kStages]);
    multiply<Stored::rows, Stored::columns>(dp, now.d_o, ld_v, now.values, ld_v, kScanColumns);
    multiply<Stored::rows, Stored::columns>(dm, now.x, ld_v, now.values, ld_v, kScanColumns);
    multiply<Stored::rows, Stored::columns>(q, now.d_o, ld_v, now.state, ld_v, kScanColumns);
    multiply<Stored::rows, Stored::columns>(b, now.x, ld_v, now.state, ld_v, kScanColumns);
    multiply<Stored::rows, Stored::columns>(k, now.values, ld_v, now.dstate, ld_v, kScanColumns);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int at = channel * ld_v + part + 4 * e;
      carry += to_float(now.state[at]) * to_float(now.dstate[at]);
    }
    if (slab == 0) value_gradients(p, span, hv, v0, now.x, s.value_part);
    if (more && kStages == 1) {
      __syncthreads();
      load_value_tiles(p, span, chunk, hv, slab, v0 + kScanColumns, now);
    }
  }
  __syncthreads();
  s.carry[part][channel] = carry;
  dp.each(
      [&](int r, int c, float v) { s.scores[0][r * kFloatRow + c] = c <= r ? p.scale * v : 0.f; });
  dm.each([&](int r, int c, float v) { s.scores[1][r * kFloatRow + c] = c < r ? -v : 0.f; });
  q.each([&](int r, int c, float v) { s.rows[0][r * kFloatRow + c] = p.scale * v; });
  b.each([&](int r, int c, float v) { s.rows[1][r * kFloatRow + c] = -v; });
  k.each([&](int r, int c, float v) { s.rows[2][r * kFloatRow + c] = v; });
}

// A thread's rows: its operands, the gradients as they grow, and dg.
struct Own {
  float alpha[kSub], q[kSub], k[kSub], b[kSub];  // e^g, q, k, b∘k
  float dq[kSub], db[kSub], dk[kSub], dg[kSub];  // db: of b∘k; dk: of k as written
};

// Step 2: gradients through the states, their part of dg, and the operands for other sub-chunks.
template <class T>
__device__ __forceinline__ void own_rows(const Backward<T>& p, Span span, int hv, int slab,
                                         GradientShared<T>& s, Own& x) {
  const int a = own_sub(), d = own_channel(), channel = 64 * slab + d;
  const bool inside = channel < p.key_dim;
  const int at = kSub * a * kFloatRow + d;
  float head[kSub], tail[kSub];
  load_own(x.alpha, p.g + p.gate_at(span.first, hv) + channel, p.gate_stride(), span.rows, inside);
  load_own(x.q, p.q + p.key_at(span.first, hv) + channel, p.key_stride(), span.rows, inside);
  load_own(x.k, p.k + p.key_at(span.first, hv) + channel, p.key_stride(), span.rows, inside);
  load_own_erased(x.b, x.k, p, span, hv, channel, inside);
  s.sums[a][d] = own_decays<T>(x.alpha, head, tail);
  __syncthreads();
  const float before = decay_over<T>(s.sums, 0, a), after = decay_over<T>(s.sums, a + 1, kSubs);
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    x.alpha[i] = decay_exp<T>(x.alpha[i]);
    x.dq[i] = s.rows[0][at + i * kFloatRow] * (head[i] * before);
    x.db[i] = s.rows[1][at + i * kFloatRow] * (head[i] * before);
    x.dk[i] = s.rows[2][at + i * kFloatRow] * (tail[i] * after);
  }
  float run = 0;
#pragma unroll
  for (int i = kSub - 1; i >= 0; --i) {
    run += x.q[i] * x.dq[i] + x.b[i] * x.db[i];
    x.dg[i] = run;
  }
  s.reads[a][d] = run;
  run = 0;
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    x.dg[i] += run;
    run += x.k[i] * x.dk[i];
  }
  s.kept[a][d] = run;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    s.rows[0][at + i * kFloatRow] = x.k[i] * tail[i];
    s.rows[1][at + i * kFloatRow] = x.q[i] * head[i];
    s.rows[2][at + i * kFloatRow] = x.b[i] * head[i];
  }
  __syncthreads();
}

// Step 3: inside the sub-chunk, rows from the last, so that the terms that cross a token are sums
// over the rows done so far.
template <class T>
__device__ __forceinline__ void inside_sub_chunk(const GradientShared<T>& s, Own& x) {
  const int corner = kSub * own_sub() * (kFloatRow + 1);
  float column[kSub] = {};  // Σ_{i>=t} z_ij
#pragma unroll
  for (int i = kSub - 1; i >= 0; --i) {
    const float* s_p = s.scores[0] + corner + i * kFloatRow;
    const float* s_m = s.scores[1] + corner + i * kFloatRow;
    float decay = 1, crossing = 0;
    x.dq[i] += s_p[i] * x.k[i];
    x.dk[i] += s_p[i] * x.q[i];
#pragma unroll
    for (int j = i - 1; j >= 0; --j) {
      decay *= x.alpha[j + 1];
      const float dp = s_p[j], dm = s_m[j], key = x.k[j] * decay;
      const float y = dp * x.q[i] + dm * x.b[i];
      x.dq[i] += dp * key;
      x.db[i] += dm * key;
      x.dk[j] += y * decay;
      column[j] += y * key;
      crossing += column[j];
    }
    x.dg[i] += crossing;
  }
}

// Step 4: what the rows read of earlier sub-chunks.
template <class T>
__device__ __forceinline__ void from_earlier(GradientShared<T>& s, Own& x) {
  const int a = own_sub(), d = own_channel();
  float terms[kSub] = {};  // q·dq + b k·db by row
  for (int J = 0; J < a; ++J) {
    float dq[kSub] = {}, db[kSub] = {};
    for (int j = 0; j < kSub; j += 4) {
      float k[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) k[e] = s.rows[0][(kSub * J + j + e) * kFloatRow + d];
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
        const int at = (kSub * a + i) * kFloatRow + kSub * J + j;
        const float4 dp = *reinterpret_cast<const float4*>(s.scores[0] + at);
        const float4 dm = *reinterpret_cast<const float4*>(s.scores[1] + at);
        dq[i] += dp.x * k[0] + dp.y * k[1] + dp.z * k[2] + dp.w * k[3];
        db[i] += dm.x * k[0] + dm.y * k[1] + dm.z * k[2] + dm.w * k[3];
      }
    }
    float run = decay_over<T>(s.sums, J + 1, a), sum = 0;
#pragma unroll
    for (int i = 0; i < kSub; ++i) {
      run *= x.alpha[i];
      x.dq[i] += run * dq[i];
      x.db[i] += run * db[i];
      const float term = run * (x.q[i] * dq[i] + x.b[i] * db[i]);
      terms[i] += term;
      sum += term;
    }
    if (a - J > 1) s.pairs[a - J == 3 ? 2 : J][d] = sum;
  }
  float run = 0;
#pragma unroll
  for (int i = kSub - 1; i >= 0; --i) {
    run += terms[i];
    x.dg[i] += run;
  }
}

// Step 5: what later sub-chunks read of the rows.
template <class T>
__device__ __forceinline__ void from_later(const GradientShared<T>& s, Own& x) {
  const int a = own_sub(), d = own_channel();
  float terms[kSub] = {};
  for (int I = a + 1; I < kSubs; ++I) {
    float dk[kSub] = {};
    for (int i = kSub * I; i < kSub * (I + 1); ++i) {
      const float q = s.rows[1][i * kFloatRow + d], b = s.rows[2][i * kFloatRow + d];
#pragma unroll
      for (int j = 0; j < kSub; j += 4) {
        const int at = i * kFloatRow + kSub * a + j;
        const float4 dp = *reinterpret_cast<const float4*>(s.scores[0] + at);
        const float4 dm = *reinterpret_cast<const float4*>(s.scores[1] + at);
        dk[j] += dp.x * q + dm.x * b;
        dk[j + 1] += dp.y * q + dm.y * b;
        dk[j + 2] += dp.z * q + dm.z * b;
        dk[j + 3] += dp.w * q + dm.w * b;
      }
    }
    float run = decay_over<T>(s.sums, a + 1, I);
#pragma unroll
    for (int j = kSub - 1; j >= 0; --j) {
      x.dk[j] += run * dk[j];
      terms[j] += x.k[j] * (run * dk[j]);
      run *= x.alpha[j];
    }
  }
  float run = 0;
#pragma unroll
  for (int j = 0; j < kSub; ++j) {
    x.dg[j] += run;
    run += terms[j];
  }
}

// Step 6: the terms of dg that every row of the sub-chunk shares, then everything to memory.
template <class T>
__device__ __forceinline__ void write_own(const Backward<T>& p, Span span, int hv, int slab,
                                          GradientShared<T>& s, Own& x) {
  const int a = own_sub(), d = own_channel(), channel = 64 * slab + d;
  float shared = (s.carry[0][d] + s.carry[1][d] + s.carry[2][d] + s.carry[3][d]) *
                 decay_over<T>(s.sums, 0, kSubs);
  for (int later = a + 1; later < kSubs; ++later) shared += s.reads[later][d];
  for (int earlier = 0; earlier < a; ++earlier) shared += s.kept[earlier][d];
  if (a == 1) shared += s.pairs[0][d] + s.pairs[2][d];
  if (a == 2) shared += s.pairs[1][d] + s.pairs[2][d];
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    const int r = kSub * a + i;
    if (channel >= p.key_dim || r >= span.rows) continue;
    const int64_t gate = p.gate_at(span.first + r, hv) + channel;
    const int64_t key = p.key_at(span.first + r, hv) + channel;
    const float b = p.erase ? p.erase[gate] : p.erase_strength(span.first + r, hv);
    const float dk = x.dk[i] + b * x.db[i];
    if (p.dq) p.dq[key] = from_float<T>(x.dq[i]);
    if (p.dk) p.dk[key] = from_float<T>(dk);
    if (p.dq_terms) p.dq_terms[gate] = x.dq[i];
    if (p.dk_terms) p.dk_terms[gate] = dk;
    if (p.derase) p.derase[gate] = x.k[i] * x.db[i];
    if (p.dg) p.dg[gate] = x.dg[i] + shared;
  }
  if (!p.dbeta) return;
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    const float sum = warp_sum(x.k[i] * x.db[i]);
    if ((threadIdx.x & 31) == 0) s.key_part[threadIdx.x >> 5][i] = sum;
  }
  __syncthreads();
  const int t = int(threadIdx.x);
  if (t < span.rows)
    p.dbeta[(slab * p.tokens + span.first + t) * p.value_heads + hv] =
        s.value_part[t] + s.key_part[2 * (t / kSub)][t % kSub] +
        s.key_part[2 * (t / kSub) + 1][t % kSub];
}

// Item (chunk, head, slab of K). 1 over tiles of V: dP = scale dO V'ᵀ, dM = −X V'ᵀ, S dO, S X,
// D V', <S, D>; dv, dw. Then every thread has its channel's 16 rows in registers, in f32: 2 the
// gradients through the states; 3 inside its sub-chunk; 4 of what it reads of earlier ones; 5 of
// what later ones read of it; 6 dg from the terms that cross each token; all written.
template <class T>
__global__ void __launch_bounds__(kTileThreads) gradient_kernel(Backward<T> p) {
  auto& s = dynamic_shared<GradientShared<T>>();
  const int64_t slabs = (p.key_dim + 63) / 64;
  for (int64_t item = blockIdx.x; item < p.chunks * p.value_heads * slabs; item += gridDim.x) {
    const int slab = int(item % slabs), hv = int(item / slabs % p.value_heads);
    const int64_t chunk = item / slabs / p.value_heads;
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    products(p, span, chunk, hv, slab, s);
    Own x;
    own_rows(p, span, hv, slab, s, x);
    inside_sub_chunk(s, x);
    from_earlier(s, x);
    from_later(s, x);
    __syncthreads();
    write_own(p, span, hv, slab, s, x);
    __syncthreads();
  }
}

}  // namespace

template <class T>
void channel_gradients(const ChannelBackward<T>& p, cudaStream_t stream) {
  launch_tiles<GradientShared<T>>(gradient_kernel<T>,
                                  p.chunks * p.value_heads * ceil_div(p.key_dim, 64), stream, p);
}
template void channel_gradients<float>(const ChannelBackward<float>&, cudaStream_t);
template void channel_gradients<__nv_bfloat16>(const ChannelBackward<__nv_bfloat16>&, cudaStream_t);

}  // namespace ebb::gpu::delta
