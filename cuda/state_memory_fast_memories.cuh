// What the gradients of the memories (state_memory_fast_memories.cu) read of the tokens, laid out
// in tiles by state_memory_fast_vectors.cu.
#pragma once
#include "cuda/state_memory_fast.cuh"

namespace ebb::gpu::state_memory {

// 64 tokens of q, c (f16 rows) or e (bf16), and what a row is to be multiplied with: its unit, and
// 1/rms for q and e. Rows that are not there are zero.
template <int NT>
struct alignas(1024) VectorRecord {
  SwizzledTile tile[NT];
  float factor[64];
  float largest[64];  // |x| of the row as it was; not streamed

  static constexpr int kBytes = NT * int(sizeof(SwizzledTile)) + 256;
};
// Of 64 tokens of one head. bounds: of what their rows of the left operands of X and G come to, the
// weight, the scale and the memory aside; each of 32 tokens.
struct HeadNumbers {
  float lse[64], through[64], gate[64];  // base 2; R·dy
  float bounds[2][2];
};

struct TokenRecords {
  Tensor q, c, e, numbers;
};
TokenRecords token_records(const StateMemoryProblem& problem, const FastProblem& p,
                           const FastUpstream& u);

}  // namespace ebb::gpu::state_memory
