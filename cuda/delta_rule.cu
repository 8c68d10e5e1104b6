// Gated delta rule on the GPU: what the passes share on the host (cuda/delta_rule_fwd.cu, _bwd.cu).
#include "cuda/delta_rule.cuh"

#include "tensor/device_flags.h"

namespace ebb::gpu::delta {
namespace {

// out[t,h,:] = Σ over the value heads of h, in order.
template <class T>
__global__ void sum_group_kernel(const float* terms, T* out, int64_t count, int group,
                                 int key_dim) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row = i / key_dim, c = i % key_dim;
    float sum = 0;
    for (int r = 0; r < group; ++r) sum += terms[(row * group + r) * key_dim + c];
    out[i] = from_float<T>(sum);
  }
}

}  // namespace

Tensor group_terms(const DeltaRuleProblem& p, const Tensor& grad) {
  if (!grad || p.value_heads() == p.heads()) return {};
  return Tensor::empty({p.batch() * p.time(), p.value_heads(), p.key_dim()}, DType::f32,
                       p.v.device());
}

void sum_groups(const Tensor& terms, const Tensor& grad, int group) {
  const int64_t count = terms ? grad.numel() : 0;
  if (count == 0) return;
  const int64_t blocks = std::min<int64_t>(ceil_div(count, 256), 65536);
  visit_compute(grad.dtype(), [&]<class Host>() {
    sum_group_kernel<<<unsigned(blocks), 256, 0, stream_of(terms)>>>(
        ptr<float>(terms), ptr<Host>(grad), count, group, int(grad.size(-1)));
    check_launch();
  });
}

Tensor chunk_offsets(const DeltaRuleProblem& p) {
  if (!p.layout.is_packed()) return {};
  return p.layout.chunk_offsets(p.batch(), p.time(), chunk_of(p), p.v.device());
}

template <class T>
Problem<device_t<T>> make_problem(const DeltaRuleProblem& p, const DeltaRuleSaved& saved,
                                  const Tensor& chunk_before) {
  Problem<device_t<T>> d{};
  d.q = ptr<T>(p.q), d.k = ptr<T>(p.k), d.v = ptr<T>(p.v);
  if (!p.in_place) d.g = ptr<float>(p.g), d.beta = ptr<float>(p.beta);  // else of any dtype
  d.h0 = ptr<float>(p.h0);
  d.a = ptr<T>(saved.a), d.states = ptr<T>(saved.states), d.values = ptr<T>(saved.values);
  d.positive_decay = ebb::device_flags(p.v.device()) + int(DeviceFlag::positive_decay);
  d.scale = float(p.scale);
  d.heads = int(p.heads()), d.value_heads = int(p.value_heads());
  d.key_dim = int(p.key_dim()), d.value_dim = int(p.value_dim());
  d.chunk = int(chunk_of(p));
  d.tokens = p.batch() * p.time();
  d.sequences = p.sequences();
  d.chunks = p.layout.chunk_count(p.batch(), p.time(), d.chunk);
  d.cursor.cu = p.layout.is_packed() ? p.layout.device_offsets().data<int64_t>() : nullptr;
  d.cursor.time = p.time();
  d.cursor.count = d.sequences;
  d.chunk_before = ptr<int64_t>(chunk_before);
  d.chunks_per_row = ceil_div(p.time(), d.chunk);
  return d;
}
template Problem<float> make_problem<float>(const DeltaRuleProblem&, const DeltaRuleSaved&,
                                            const Tensor&);
template Problem<__nv_bfloat16> make_problem<bf16>(const DeltaRuleProblem&, const DeltaRuleSaved&,
                                                   const Tensor&);

}  // namespace ebb::gpu::delta
