// Gated linear attention in bf16 on tensor cores, the backward pass as a whole: the reverse scan
// (linear_attention_reverse.cu), then the gradients of every chunk (linear_attention_gradients.cu).
#include "cuda/linear_attention_gradient.cuh"
#include "cuda/linear_attention_runs.cuh"
#include "cuda/ordered_sum.cuh"

namespace ebb::gpu::linear_attention {
namespace {

constexpr int kThreads = 256;

// Block (run, head): e^{Σ g of the run} <S before it, dcontribution>. It is what <S,D+E> holds too
// much at each of the run's chunks, where only <S,D> and what the run itself has written may count.
// The states lie the other way round: a tile of them is turned in shared memory.
__global__ void __launch_bounds__(kThreads) run_product_kernel(AttentionBackward p) {
  constexpr int kRow = 64 + 2;
  __shared__ bf16_t s_state[128 * kRow];  // [K,64 columns of V]
  __shared__ float s_scratch[32];
  const int size = p.key_dim * p.value_dim, pairs = p.key_dim / 2;
  for (int64_t item = blockIdx.x; item < p.chunks / p.pieces * p.value_heads; item += gridDim.x) {
    const int h = int(item % p.value_heads);
    const int64_t first = item / p.value_heads * p.pieces;
    const bf16_t *state = p.states + p.state_at(first, h), *run = p.dcontributions + item * size;
    float sum = 0;
    for (int v0 = 0; v0 < p.value_dim; v0 += 64) {
      const int cols = min(64, p.value_dim - v0);
      for (int i = int(threadIdx.x); i < cols * pairs; i += kThreads) {
        const int v = i / pairs, k = i % pairs * 2;
        bf16_t x[2];
        *reinterpret_cast<unsigned*>(x) =
            *reinterpret_cast<const unsigned*>(state + int64_t(v0 + v) * p.key_dim + k);
        s_state[k * kRow + v] = x[0], s_state[(k + 1) * kRow + v] = x[1];
      }
      __syncthreads();
      for (int i = int(threadIdx.x); i < p.key_dim * cols; i += kThreads) {
        const int k = i / cols, v = i % cols;
        sum += to_float(s_state[k * kRow + v]) * to_float(run[int64_t(k) * p.value_dim + v0 + v]);
      }
      __syncthreads();
    }
    sum = block_sum(sum, s_scratch);
    for (int i = 0; i < p.pieces && chunk_span(p, first + i).rows > 0; ++i)
      sum *= p.gates_of(first + i, h).total[0];
    if (threadIdx.x == 0) p.through_run[item] = sum;
    __syncthreads();
  }
}

// Where the sums of AttentionBackward::head_sums go; each may be null.
struct PutHeadSums {
  float *dskip, *dbias, *dA;
  const float* log_A;  // null: A is given itself
  int64_t heads;
  __device__ void operator()(int64_t column, double sum) const {
    const int64_t h = column % heads;
    if (column < heads) {
      if (dskip) dskip[h] = float(sum);
    } else if (column < 2 * heads) {
      if (dbias) dbias[h] = float(sum);
    } else if (dA) {
      dA[h] = float(log_A ? -double(expf(log_A[h])) * sum : sum);
    }
  }
};

// In how many parts the heads of a group are dealt to the blocks that walk through items: as few as
// leave no multiprocessor idle for long.
int parts_of_heads(int64_t items, int64_t heads_per_group, int64_t processors) {
  for (int64_t parts = 1; parts < heads_per_group; ++parts) {
    const int64_t blocks = items * parts;
    if (heads_per_group % parts == 0 &&
        double(blocks) >= 0.85 * double(ceil_div(blocks, processors) * processors))
      return int(parts);
  }
  return int(heads_per_group);
}

}  // namespace

void fast_attention_bwd(const LinearAttentionProblem& given, const LinearAttentionSaved& saved,
                        const Tensor& given_o, const Tensor& dht, const Tensor& given_contributions,
                        const LinearAttentionGradients& grads) {
  const LinearAttentionProblem problem = without_apart_runs(given);
  const auto aligned = [](const Tensor& t) {  // as copies and tensor maps want them
    return t && reinterpret_cast<uintptr_t>(t.raw()) % 16 != 0 ? t.clone() : t;
  };
  const bool whole = given_contributions && !runs_apart(given);
  const Tensor of_short = whole ? Tensor() : aligned(given_contributions);
  const Tensor d_o = aligned(given_o);
  const Tensor dcontributions = whole ? aligned(given_contributions.to(DType::bf16)) : Tensor();
  const Device device = problem.v.device();
  const int64_t h = problem.heads(), groups = problem.groups(), k = problem.key_dim();
  const int64_t v = problem.value_dim(), tokens = problem.batch() * problem.time();
  const Cut cut(problem);
  const int parts = parts_of_heads(cut.chunks * groups, h / groups, multiprocessors(device));
  const Tensor dstates = Tensor::empty_like(saved.states);
  const auto terms = [&](const Tensor& grad) {
    return grad && parts > 1 ? Tensor::empty({tokens, groups * parts, k}, DType::f32, device)
                             : Tensor();
  };
  const Tensor dq_terms = terms(grads.dq), dk_terms = terms(grads.dk);
  Tensor head_sums;
  if (grads.dskip || grads.dbias || grads.dA) {
    const int64_t more = of_short ? run_items(given) : 0;
    const Shape shape{cut.chunks + more, 3, h};  // empty chunks leave zeros
    head_sums = cut.pieces > 1 ? Tensor::zeros(shape, DType::f32, device)
                               : Tensor::empty(shape, DType::f32, device);
  }
  const int64_t runs = cut.chunks / cut.pieces * h;
  const Tensor through_run = dcontributions ? Tensor::empty({runs}, DType::f32, device) : Tensor();
  const Tensor before = run_offsets(problem, cut);
  const cudaStream_t stream = stream_of(dstates);
  AttentionBackward p{make_fast_attention(problem, cut, saved, before)};
  p.d_o = ptr<bf16>(d_o), p.dstates = ptr<bf16>(dstates);
  p.dq = parts == 1 ? ptr<bf16>(grads.dq) : nullptr;
  p.dk = parts == 1 ? ptr<bf16>(grads.dk) : nullptr;
  p.dv = ptr<bf16>(grads.dv);
  p.dq_terms = ptr<float>(dq_terms), p.dk_terms = ptr<float>(dk_terms);
  p.dg = ptr<float>(grads.dg), p.dweight = ptr<float>(grads.dweight);
  p.ddt = grads.ddt ? grads.ddt.raw() : nullptr;
  p.head_sums = ptr<float>(head_sums);
  p.parts = parts, p.part_heads = int(h / groups / parts);
  p.dcontributions = ptr<bf16>(dcontributions), p.through_run = ptr<float>(through_run);
  if (dcontributions && runs > 0) {
    run_product_kernel<<<grid_of(runs), kThreads, 0, stream>>>(p);
    check_launch();
  }
  Tensor buffers[3];
  const AttentionSegments segments = cut_sequences(p, device, buffers);
  const TileSource q = token_source(p, p.q, k, groups, p.q_step, device);
  const TileSource upstream = token_source(p, p.d_o, v, h, h * v, device);
  TileSource written{};
  if (dcontributions)
    written = {tile_map(p.dcontributions, v, runs, k * v, k, v, device), p.dcontributions, k * v, v,
               int(v)};
  reverse_scan(p, segments, {{q}, upstream, written, can_map({q, upstream})}, ptr<float>(dht),
               state_target(p, p.dstates, device), ptr<float>(grads.dh0), stream);
  if (p.chunks > 0) chunk_gradients(p, device, stream);
  sum_groups(dq_terms, grads.dq, parts);
  sum_groups(dk_terms, grads.dk, parts);
  if (of_short)
    add_run_gradients(given, saved,
                      {.upstream = of_short.raw(),
                       .wide = of_short.dtype() == DType::f32,
                       .dk = ptr<bf16>(grads.dk),
                       .dv = p.dv,
                       .dg = p.dg,
                       .dweight = p.dweight,
                       .ddt = p.ddt,
                       .head_sums = head_sums ? p.head_sums + 3 * cut.chunks * h : nullptr},
                      stream);
  if (head_sums)
    ordered_sum(ptr<float>(head_sums), head_sums.size(0), 3 * h, stream,
                PutHeadSums{ptr<float>(grads.dskip), ptr<float>(grads.dbias), ptr<float>(grads.dA),
                            problem.gate.log_A ? ptr<float>(problem.gate.A) : nullptr, h});
}

}  // namespace ebb::gpu::linear_attention
