// Gated linear attention on the GPU: what the passes share on the host
// (cuda/gated_linear_attention_fwd.cu, _bwd.cu).
#include "cuda/linear_attention_fast.cuh"
#include "cuda/ordered_sum.cuh"
#include "ops/ssd.h"
#include "tensor/device_flags.h"

namespace ebb::gpu::linear_attention {
namespace {

struct PutSum {
  float* g;
  __device__ void operator()(int64_t head, double sum) const { g[head] = float(sum); }
};

}  // namespace

int parts_of(int64_t blocks, int64_t heads_per_group) {
  for (int64_t parts = 1; parts < heads_per_group; ++parts)
    if (heads_per_group % parts == 0 && blocks * parts >= 512) return int(parts);
  return int(heads_per_group);
}

void sum_chunks(const Tensor& partial, const Tensor& out) {
  ordered_sum(ptr<float>(partial), partial.size(0), out.numel(), stream_of(out),
              PutSum{ptr<float>(out)});
}

LinearAttentionProblem with_gates(const LinearAttentionProblem& p) {
  if (!p.gate.dt.t) return p;
  LinearAttentionProblem filled = p;
  filled.g = Tensor::empty({p.batch(), p.time(), p.heads()}, DType::f32, p.v.device());
  filled.weight = Tensor::empty_like(filled.g);
  ssd_gate_fwd(p.gate, filled.weight, filled.g);
  return filled;
}

Cut::Cut(const LinearAttentionProblem& p) {
  const int64_t longest = longest_chunk(p);
  // No run is longer than the longest sequence needs.
  const int64_t length = p.layout.is_packed() ? p.layout.max_length() : p.time();
  const int64_t needed = std::max<int64_t>(1, ceil_div(length, longest)) * longest;
  run = p.memory_chunk ? std::min(p.memory_chunk, needed) : longest;
  pieces = int(ceil_div(run, longest));
  rows = int(ceil_div(run, pieces));
  chunks = p.layout.chunk_count(p.batch(), p.time(), run) * pieces;
}

Tensor run_offsets(const LinearAttentionProblem& p, const Cut& cut) {
  if (!p.layout.is_packed()) return {};
  return p.layout.chunk_offsets(p.batch(), p.time(), cut.run, p.v.device());
}

template <class T>
Attention<device_t<T>> make_attention(const LinearAttentionProblem& p, const Cut& cut,
                                      const LinearAttentionSaved& saved, const Tensor& run_before) {
  Attention<device_t<T>> d;
  d.q = ptr<T>(p.q), d.k = ptr<T>(p.k), d.v = ptr<T>(p.v);
  d.g = ptr<float>(p.g), d.beta = ptr<float>(p.weight), d.h0 = ptr<float>(p.h0);
  const auto step_of = [](const Tensor& t) {
    Rows r;
    rows_in_place(t, 2, &r);
    return r.stride;
  };
  d.q_step = step_of(p.q), d.k_step = step_of(p.k), d.v_step = step_of(p.v);
  d.skip = ptr<float>(p.skip);
  d.a = d.values = nullptr;
  d.states = ptr<T>(saved.states), d.partials = ptr<T>(saved.partials);
  d.positive_decay = ebb::device_flags(p.v.device()) + int(DeviceFlag::positive_decay);
  d.scale = float(p.scale);
  d.heads = int(p.groups()), d.value_heads = int(p.heads());
  d.key_dim = int(p.key_dim()), d.value_dim = int(p.value_dim());
  d.chunk = int(cut.run), d.rows = cut.rows, d.pieces = cut.pieces;
  d.tokens = p.batch() * p.time();
  d.sequences = p.sequences();
  d.chunks = cut.chunks;
  d.cursor.cu = p.layout.is_packed() ? p.layout.device_offsets().data<int64_t>() : nullptr;
  d.cursor.time = p.time();
  d.cursor.count = d.sequences;
  d.chunk_before = ptr<int64_t>(run_before);
  d.chunks_per_row = ceil_div(p.time(), cut.run);
  return d;
}
template Attention<float> make_attention<float>(const LinearAttentionProblem&, const Cut&,
                                                const LinearAttentionSaved&, const Tensor&);
template Attention<__nv_bfloat16> make_attention<bf16>(const LinearAttentionProblem&, const Cut&,
                                                       const LinearAttentionSaved&, const Tensor&);

}  // namespace ebb::gpu::linear_attention
