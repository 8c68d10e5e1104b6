// Rows of a table: y[...,:] = table[ids[...],:].
// table [V,d] f32 f64 bf16, ids i32 or i64 of any shape; y [ids...,d] in the table's dtype, or f32
// beside a bf16 table when asked for (an f32 residual stream). V may exceed 65,536, up to 2^30.
// Gradient of the table: [V,d] in f32 (f64 for f64), each id's rows of dy added in the order of the
// tokens (grouped in fixed tiles on the GPU: no atomics, bitwise repeatable); only rows that occur
// are touched when there is an accumulator. Saves the ids.
// An id outside [0,V): an error on the CPU; on CUDA the row is zeros, takes no part in the gradient
// and raises DeviceFlag::embedding_id.
#pragma once
#include <optional>

#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb {

Var embedding(const Var& table /*[V,d]*/, const Tensor& ids /*[...]*/,
              std::optional<DType> output = {});

Cost embedding_cost(Pass pass, int64_t tokens, int64_t d, DType dtype);

// ids i64 [N] dense; table, y and dy dense. dtable accumulates: dtable[ids[n],:] += dy[n,:].
namespace cpu {
void embedding_fwd(const Tensor& table, const Tensor& ids, const Tensor& y);
void embedding_bwd(const Tensor& ids, const Tensor& dy, const Tensor& dtable);
}  // namespace cpu
namespace gpu {
void embedding_fwd(const Tensor& table, const Tensor& ids, const Tensor& y);
void embedding_bwd(const Tensor& ids, const Tensor& dy, const Tensor& dtable);
}  // namespace gpu

}  // namespace ebb
