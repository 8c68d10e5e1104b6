// Delta rule with a decay per channel from raw inputs: what the passes do about them on the host
// (cuda/delta_channel_logits.cuh).
#include "cuda/delta_channel_logits.cuh"

#include "cuda/ordered_sum.cuh"

namespace ebb::gpu::delta {
namespace {

// Σ da by channel and Σ of dA_log's summands by slab and head; those of several slabs go on to
// another sum.
struct PutRawSums {
  float *g_ddt_bias, *g_dA_log;
  double* g_slabs;
  int64_t channels;
  __device__ void operator()(int64_t col, double sum) const {
    if (col < channels) {
      if (g_ddt_bias) g_ddt_bias[col] = float(sum);
    } else if (g_slabs) {
      g_slabs[col - channels] = sum;
    } else if (g_dA_log) {
      g_dA_log[col - channels] = float(sum);
    }
  }
};
struct PutHeads {
  float* g_dA_log;
  __device__ void operator()(int64_t head, double sum) const { g_dA_log[head] = float(sum); }
};

void sum_gates(const Tensor& parts, const DeltaRuleProblem& p, const DeltaRuleGradients& grads,
               int64_t slabs, cudaStream_t stream) {
  const int64_t heads = p.value_heads(), channels = heads * p.key_dim();
  const Tensor by_slab = slabs > 1 && grads.dA_log
                             ? Tensor::empty({slabs, heads}, DType::f64, parts.device())
                             : Tensor();
  ordered_sum(ptr<float>(parts), parts.size(0), parts.size(1), stream,
              PutRawSums{ptr<float>(grads.ddt_bias), ptr<float>(grads.dA_log), ptr<double>(by_slab),
                         channels});
  if (by_slab)
    ordered_sum(ptr<double>(by_slab), slabs, heads, stream, PutHeads{ptr<float>(grads.dA_log)});
}

}  // namespace

RawGates raw_gates(const DeltaRuleProblem& p) {
  RawGates g;
  g.gated = p.erase.defined(), g.normalize = p.normalize, g.sigmoid = p.sigmoid;
  g.key_step = token_step(p.q, 2);
  if (p.A_log) g.decays = ptr<bf16>(p.g), g.decay_step = token_step(p.g, 2);
  if (p.sigmoid && p.erase) {
    g.erases = ptr<bf16>(p.erase), g.erase_step = token_step(p.erase, 2);
    g.writes = ptr<bf16>(p.write), g.write_step = token_step(p.write, 2);
  }
  if (p.beta)
    g.strengths = Logits{p.beta.raw(), token_step(p.beta, 1), p.beta.dtype() == DType::bf16};
  g.A_log = ptr<float>(p.A_log), g.dt_bias = ptr<float>(p.dt_bias);
  g.lower_bound = float(p.lower_bound), g.beta_scale = float(p.beta_scale);
  return g;
}

void raw_backward(const ChannelBackward<bf16_t>& base, const DeltaRuleProblem& problem,
                  const DeltaRuleGradients& grads, cudaStream_t stream) {
  const Device device = problem.v.device();
  const int64_t heads = problem.value_heads(), slabs = ceil_div(problem.key_dim(), 64);
  LogitChannelBackward p{base, raw_gates(problem)};
  const Tensor lengths =
      p.normalize ? Tensor::empty({p.chunks, heads, kChunk, 2}, DType::f32, device) : Tensor();
  p.lengths = reinterpret_cast<float2*>(ptr<float>(lengths));
  p.dkey_step = token_step(grads.dq ? grads.dq : grads.dk ? grads.dk : problem.q, 2);
  if (p.decays) p.ddecays = ptr<bf16>(grads.dg);
  if (p.erases) p.derases = ptr<bf16>(grads.derase), p.dwrites = ptr<bf16>(grads.dwrite);
  if (grads.dbeta && slabs == 1) p.dstrengths = grads.dbeta.raw();
  // Chunks behind the last one of packed sequences add nothing.
  const bool sums = grads.dA_log || grads.ddt_bias;
  const Shape sum_shape{p.chunks, heads * (problem.key_dim() + slabs)};
  const Tensor gate_sums = !sums ? Tensor()
                           : problem.layout.is_packed()
                               ? Tensor::zeros(sum_shape, DType::f32, device)
                               : Tensor::empty(sum_shape, DType::f32, device);
  p.gate_sums = ptr<float>(gate_sums);
  channel_fast_prepare(LogitChannel{p, p}, Prepare::operands, stream);
  channel_fast_reverse(p, device, stream);
  channel_fast_gradients(p, stream);
  if (sums) sum_gates(gate_sums, problem, grads, slabs, stream);
}

}  // namespace ebb::gpu::delta
