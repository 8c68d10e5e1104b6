// State-memory attention on tensor cores: the problem as its kernels see it, and the records of the
// memories (cuda/state_memory_fast.cuh).
#include "cuda/state_memory_fast.cuh"

namespace ebb::gpu::state_memory {
namespace {

constexpr int kThreads = 256, kRowsAtOnce = kThreads / 8;

// Eight neighbouring columns of one row; zeros outside.
template <class T>
__device__ __forceinline__ void load_eight(float (&x)[8], const T* row, int column, bool there,
                                           int width, bool wide) {
  if (there && wide) return load_pack<T, 8>(x, row + column);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = there && column + i < width ? to_float(row[column + i]) : 0.f;
}

// The largest value over the block, in every thread.
__device__ __forceinline__ float block_max(float v, float (&s_parts)[kThreads / 32]) {
  v = warp_max(v);
  if ((threadIdx.x & 31) == 0) s_parts[threadIdx.x / 32] = v;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) v = fmaxf(v, s_parts[w]);
  __syncthreads();
  return v;
}

// Block (memory, head): eight threads per row, eight columns each. 1 The rows' root mean squares,
// or without normalisation their largest entries. 2 The largest row of all, which sets the unit of
// the values; and where eps_row leaves all rows of Δ̂ small, the power of two that f16 wants. 3 The
// record.
template <class T, int NT>
__global__ void __launch_bounds__(kThreads)
    record_kernel(FastProblem p, const T* memories, float eps_row, bool wide) {
  constexpr int kPasses = 64 * NT / kRowsAtOnce;
  __shared__ float s_parts[kThreads / 32];
  const int t = int(threadIdx.x), row = t / 8, chunk = t % 8;
  for (int64_t item = blockIdx.x; item < p.memories * p.heads; item += gridDim.x) {
    const T* from = memories + item * p.n * p.p;
    float x[kPasses][8], size[kPasses], largest = 0, entry = 0;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {  // 1
      const int n = row + kRowsAtOnce * i;
      load_eight(x[i], from + int64_t(n) * p.p, 8 * chunk, n < p.n && 8 * chunk < p.p, p.p, wide);
      float sum = 0, own = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) own = fmaxf(own, fabsf(x[i][j]));
#pragma unroll
      for (int j = 0; j < 8; ++j)
        sum = p.normalize ? sum + x[i][j] * x[i][j] : fmaxf(sum, fabsf(x[i][j]));
#pragma unroll
      for (int o = 1; o < 8; o *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, sum, o);
        sum = p.normalize ? sum + other : fmaxf(sum, other);
      }
      size[i] = p.normalize ? sqrtf(sum / float(p.p) + eps_row) : sum;
      if (n < p.n) largest = fmaxf(largest, size[i]), entry = fmaxf(entry, own / size[i]);
    }
    const float power = power_to(block_max(largest, s_parts), 6);  // 2
    entry = block_max(entry, s_parts);
    const float boost = p.normalize && entry < 0.0625f ? power_to(entry, 0) : 1.f;
    MemoryRecord<NT>& to = reinterpret_cast<MemoryRecord<NT>*>(p.records)[item];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {  // 3
      const int n = row + kRowsAtOnce * i;
      const bool there = n < p.n;
      const float rho = !there ? 0.f : p.normalize ? 1.f / size[i] : power, f = rho * boost;
      uint4 halves;
      halves.x = pack_half(x[i][0] * f, x[i][1] * f);
      halves.y = pack_half(x[i][2] * f, x[i][3] * f);
      halves.z = pack_half(x[i][4] * f, x[i][5] * f);
      halves.w = pack_half(x[i][6] * f, x[i][7] * f);
      store_word(reinterpret_cast<uint4*>(to.tile[n / 64].at(n % 64, 8 * chunk)), halves);
      const float inverse = !there ? 0.f : p.normalize ? size[i] * power : 1.f;
      const float next = __shfl_down_sync(0xffffffffu, inverse, 8);
      if (chunk == 0) {
        to.rho[n] = p.normalize ? rho : 1.f;
        if (n % 2 == 0) to.inverse_rho[to.rho_pair(n / 8, n % 8 / 2)] = pack_half(inverse, next);
      }
    }
    if (t == 0) {
      to.value_unit = inverse_power(power) * inverse_power(boost);
      to.key_unit = inverse_power(p.normalize ? boost : power);
      to.padding[0] = to.padding[1] = 0.f;  // it is streamed with the rest
    }
  }
}

bool aligned(const Tensor& t, uintptr_t bytes) {
  return !t || reinterpret_cast<uintptr_t>(t.raw()) % bytes == 0;
}

}  // namespace

bool fast_path(const StateMemoryProblem& p) {
  const int64_t n = p.state_dim(), v = p.value_dim();
  int64_t longest = p.layout.is_packed() ? p.layout.max_length() : p.time();
  if (!p.before.empty()) longest += *std::max_element(p.before.begin(), p.before.end());
  bool pairs = true;
  for (const Tensor* t : {&p.q, &p.e, &p.c, &p.base}) pairs = pairs && aligned(*t, 4);
  return p.q.dtype() == DType::bf16 && n <= 128 && n % 8 == 0 && v <= 64 && v % 8 == 0 && pairs &&
         longest < (int64_t(1) << 30) && p.batch() * p.time() < (int64_t(1) << 31) &&
         delta::scans_fit(p.q.device());
}

FastView prepare(const StateMemoryProblem& problem) {
  FastView v;
  const Device device = problem.q.device();
  const int64_t memories = problem.memory_count(), batch = problem.batch(), time = problem.time();
  FastProblem& p = v.p;
  p.q = ptr<bf16>(problem.q), p.e = ptr<bf16>(problem.e), p.c = ptr<bf16>(problem.c);
  p.gate = ptr<bf16>(problem.gate);
  p.scale = float(problem.scale), p.eps = float(problem.eps), p.normalize = problem.normalize;
  p.heads = p.some_heads = int(problem.heads()), p.n = int(problem.state_dim()),
  p.p = int(problem.value_dim());
  p.q_heads = int(problem.q.size(2)), p.e_heads = int(problem.e.size(2));
  p.c_heads = int(problem.c.size(2));
  p.gate_heads = problem.gate ? int(problem.gate.size(2)) : p.heads;
  p.run = int(problem.memory_chunk), p.memories = memories;
  p.runs_per_row = ceil_div(time, problem.memory_chunk);
  p.tiles_per_row = ceil_div(time, kTileTokens);
  const bool packed = problem.layout.is_packed();
  if (packed) {
    v.run_before = problem.layout.chunk_offsets(batch, time, problem.memory_chunk, device);
    v.tile_before = problem.layout.chunk_offsets(batch, time, kTileTokens, device);
    p.run_before = ptr<int64_t>(v.run_before), p.tile_before = ptr<int64_t>(v.tile_before);
  }
  if (!problem.before.empty()) {
    v.before = Tensor::from(problem.before, {int64_t(problem.before.size())}, device);
    p.before = ptr<int64_t>(v.before), p.room = problem.room;
  }
  p.tiles = problem.layout.chunk_count(batch, time, kTileTokens);
  p.cursor = sequence_cursor(packed ? problem.layout.device_offsets() : Tensor(), batch, time);
  const int64_t items = memories * p.heads;
  v.records = problem.prepared;
  if (v.records) p.records = static_cast<unsigned char*>(v.records.raw());
  if (v.records || items == 0) return v;
  visit_tiles(p.n, [&]<int NT>() {
    v.records =
        Tensor::empty({memories, p.heads, int64_t(sizeof(MemoryRecord<NT>))}, DType::u8, device);
    p.records = static_cast<unsigned char*>(v.records.raw());
    visit_compute(problem.memories.dtype(), [&]<class Host>() {
      const bool wide = p.p % 8 == 0 && aligned(problem.memories, 16);
      record_kernel<device_t<Host>, NT>
          <<<unsigned(std::min<int64_t>(items, int64_t(1) << 30)), kThreads, 0,
             stream_of(problem.q)>>>(p, ptr<Host>(problem.memories), float(problem.eps_row), wide);
      check_launch();
    });
  });
  return v;
}

}  // namespace ebb::gpu::state_memory
