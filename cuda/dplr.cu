// dplr on the GPU token by token in f32: forward and one step of decoding (ops/dplr.h).
#include "cuda/dplr.cuh"

#include <algorithm>
#include <limits>

namespace ebb::gpu {
namespace low_rank {
namespace {

// Item (sequence, head, tile of V). Per token: 1 the state goes out, every kKept tokens. 2 y = aᵀS,
// S = α∘S + b yᵀ + k vᵀ. 3 o = scale Sᵀ r. At the end 4 ht.
template <class T, int ROWS, int COLS>
__global__ void __launch_bounds__(kLanes* kWarps)
    forward_kernel(Problem<T> p, int64_t items, T* o, float* ht) {
  __shared__ float s_read[kWarps][kLanes][COLS], s_out[kWarps][kLanes][COLS];
  const int64_t matrix = int64_t(p.key_dim) * p.value_dim;
  for (int64_t at = blockIdx.x; at < items; at += gridDim.x) {
    const Item<COLS> item(p, at);
    SequenceCursor s = p.cursor;
    s.select(item.sequence);
    float state[ROWS][COLS];
    const int64_t whole = (item.sequence * p.heads + item.head) * matrix;
    read_state<float, ROWS, COLS>(state, p.h0 ? p.h0 + whole : nullptr, item.column, p.key_dim,
                                  p.value_dim);
    int64_t kept = p.first_kept(item.sequence);
    for (int64_t t = s.begin; t < s.end; ++t) {
      if (p.states && (t - s.begin) % kKept == 0)  // 1
        write_state<T, ROWS, COLS>(p.states + (kept++ * p.heads + item.head) * matrix, state,
                                   item.column, p.key_dim, p.value_dim);
      const RowFactors row(p, t, item.head);
      const int64_t value = (t * p.heads + item.head) * p.value_dim;
      float v[COLS], y[COLS], out[COLS] = {};
      read_columns<T, COLS>(v, p.v + value, item.column, p.value_dim);
      advance<ROWS, COLS>(state, row, v, y, s_read);  // 2
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {  // 3
        const float r = of_row(row.r, i);
#pragma unroll
        for (int e = 0; e < COLS; ++e) out[e] += r * state[i][e];
      }
      sum_warps<COLS>(out, s_out);
      if (threadIdx.y == 0)
#pragma unroll
        for (int e = 0; e < COLS; ++e)
          if (item.column + e < p.value_dim)
            o[value + item.column + e] = from_float<T>(p.scale * out[e]);
    }
    if (ht)  // 4
      write_state<float, ROWS, COLS>(ht + whole, state, item.column, p.key_dim, p.value_dim);
    __syncthreads();
  }
}

// Item (batch, head, tile of V), the state in place.
template <class T, int ROWS, int COLS>
__global__ void __launch_bounds__(kLanes* kWarps)
    step_kernel(Problem<T> p, int64_t items, float* states, T* o) {
  __shared__ float s_read[kWarps][kLanes][COLS], s_out[kWarps][kLanes][COLS];
  for (int64_t at = blockIdx.x; at < items; at += gridDim.x) {
    const Item<COLS> item(p, at);
    const int64_t head = item.sequence * p.heads + item.head;
    float* g_state = states + head * p.key_dim * p.value_dim;
    float state[ROWS][COLS], v[COLS], y[COLS], out[COLS] = {};
    read_state<float, ROWS, COLS>(state, g_state, item.column, p.key_dim, p.value_dim);
    const RowFactors row(p, item.sequence, item.head);
    read_columns<T, COLS>(v, p.v + head * p.value_dim, item.column, p.value_dim);
    advance<ROWS, COLS>(state, row, v, y, s_read);
    write_state<float, ROWS, COLS>(g_state, state, item.column, p.key_dim, p.value_dim);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float r = of_row(row.r, i);
#pragma unroll
      for (int e = 0; e < COLS; ++e) out[e] += r * state[i][e];
    }
    sum_warps<COLS>(out, s_out);
    if (threadIdx.y == 0)
#pragma unroll
      for (int e = 0; e < COLS; ++e)
        if (item.column + e < p.value_dim)
          o[head * p.value_dim + item.column + e] = from_float<T>(p.scale * out[e]);
    __syncthreads();
  }
}

}  // namespace

Tensor kept_offsets(const DplrProblem& p) {
  if (!p.layout.is_packed()) return {};
  return p.layout.chunk_offsets(p.batch(), p.time(), kKept, p.v.device());
}

template <class T>
Problem<device_t<T>> make_problem(const DplrProblem& p, const Tensor& states,
                                  const Tensor& kept_before) {
  Problem<device_t<T>> d;
  d.r = ptr<T>(p.r), d.k = ptr<T>(p.k), d.v = ptr<T>(p.v), d.a = ptr<T>(p.a), d.b = ptr<T>(p.b);
  d.w = ptr<float>(p.w), d.h0 = ptr<float>(p.h0);
  d.states = ptr<T>(states);
  int32_t* flags = ebb::device_flags(p.v.device());
  d.positive_decay = flags + int(DeviceFlag::positive_decay);
  d.unbounded_decay = flags + int(DeviceFlag::unbounded_decay);
  d.scale = float(p.scale);
  d.least = p.lower_bound < 0 ? float(p.lower_bound * (1 + 1e-5))
                              : -std::numeric_limits<float>::infinity();
  d.heads = int(p.heads()), d.key_dim = int(p.key_dim()), d.value_dim = int(p.value_dim());
  d.tokens = p.batch() * p.time();
  d.sequences = p.sequences();
  d.cursor.cu = p.layout.is_packed() ? p.layout.device_offsets().data<int64_t>() : nullptr;
  d.cursor.time = p.time();
  d.cursor.count = d.sequences;
  d.kept_before = ptr<int64_t>(kept_before);
  d.kept_per_row = ceil_div(p.time(), kKept);
  return d;
}
template Problem<float> make_problem<float>(const DplrProblem&, const Tensor&, const Tensor&);
template Problem<__nv_bfloat16> make_problem<bf16>(const DplrProblem&, const Tensor&,
                                                   const Tensor&);

}  // namespace low_rank

DplrSaved dplr_fwd(const DplrProblem& problem, const Tensor& o, const Tensor& ht) {
  using namespace low_rank;
  if (fast_path(problem)) return fast_fwd(problem, o, ht);
  const DType dtype = problem.v.dtype();
  const int64_t kept = problem.layout.chunk_count(problem.batch(), problem.time(), kKept);
  const DplrSaved saved{
      .states = Tensor::empty({kept, problem.heads(), problem.key_dim(), problem.value_dim()},
                              dtype, problem.v.device())};
  const Tensor before = kept_offsets(problem);
  visit_compute(dtype, [&]<class Host>() {
    using T = device_t<Host>;
    const Problem<T> p = make_problem<Host>(problem, saved.states, before);
    visit_sizes(p.key_dim, [&]<int ROWS, int COLS>() {
      const int64_t items = Item<COLS>::count(p);
      if (items == 0) return;
      forward_kernel<T, ROWS, COLS><<<blocks_of(items), dim3(kLanes, kWarps), 0, stream_of(o)>>>(
          p, items, ptr<Host>(o), ptr<float>(ht));
      check_launch();
    });
  });
  return saved;
}

void dplr_step(const DplrProblem& problem, const Tensor& state, const Tensor& o) {
  using namespace low_rank;
  if (o.numel() == 0) return;
  visit_compute(o.dtype(), [&]<class Host>() {
    using T = device_t<Host>;
    const Problem<T> p = make_problem<Host>(problem, {}, {});
    visit_sizes(p.key_dim, [&]<int ROWS, int COLS>() {
      const int64_t items = Item<COLS>::count(p);
      step_kernel<T, ROWS, COLS><<<blocks_of(items), dim3(kLanes, kWarps), 0, stream_of(o)>>>(
          p, items, ptr<float>(state), ptr<Host>(o));
      check_launch();
    });
  });
}

}  // namespace ebb::gpu
