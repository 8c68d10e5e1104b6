// Matrix products.
//   matmul:  c[...,i,j] = Σ_k a[...,i,k]·b[...,k,j]        a [...,m,k], b [...,k,n]
//   linear:  y[...,o]   = Σ_i x[...,i]·w[o,i] + bias[o]    x [...,in], w [out,in], bias [out]
// Leading dimensions of a and b broadcast (numpy rules), gradients are summed over what was
// broadcast. Transposed operands are views and cost nothing: matmul(q, transpose(k)). Zero sizes
// work; K = 0 gives zeros. 1-D operands are refused.
// dtypes: f32, f64 on the CPU; f32, bf16 with f32 sums on CUDA. Both operands have the same one;
// the result too, or f32 beside bf16 operands when asked for. The bias is f32 beside bf16.
// Gradients: in the operand's dtype, except weights (w, bias, a two-dimensional b, whatever was
// summed over a broadcast batch): f32 from bf16, added into the accumulator where there is one.
// Saves the operands (as views, no copies), each only if the other wants a gradient.
#pragma once
#include <optional>
#include <string>

#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb {

struct MatmulOptions {
  std::optional<DType> output = {};  // f32 from bf16 operands
};

Var matmul(const Var& a /*[...,m,k]*/, const Var& b /*[...,k,n]*/, MatmulOptions options = {});
// The layer of every model; bias may be undefined.
Var linear(const Var& x /*[...,in]*/, const Var& w /*[out,in]*/, const Var& bias = {},
           MatmulOptions options = {});

Cost matmul_cost(Pass pass, int64_t batch, int64_t m, int64_t n, int64_t k, DType dtype);
Cost linear_cost(Pass pass, int64_t rows, int64_t in, int64_t out, DType dtype);

// ---- which cuBLASLt algorithm ----
// Each product's algorithm is chosen once per shape, layout, dtype and GPU model and then kept, so
// that reruns are bitwise equal: cuBLASLt's first suggestion or, with autotune on, the fastest of
// its suggestions as timed at the first use. A run stores the choices beside its checkpoint
// and a resumed run loads them before its first step; data-parallel ranks load rank 0's.
void set_matmul_autotune(bool on);
bool matmul_autotune();
std::string matmul_algorithms_json();
struct LoadedAlgorithms {
  int64_t loaded = 0;
  int64_t foreign = 0;  // chosen by another cuBLASLt version: of no use here
};
// Adds to and overrides what is known. Malformed text throws.
LoadedAlgorithms load_matmul_algorithms(const std::string& json);

// y [N,n] += bias [n], in y's dtype; bias f32 (f64 beside f64). Both dense.
// sum [n] = Σ_rows x [N,n], or += with `accumulate`; f32 (f64 for f64), fixed order of additions.
namespace cpu {
void add_bias(const Tensor& y, const Tensor& bias);
void column_sum(const Tensor& x, const Tensor& sum, bool accumulate);
}  // namespace cpu
namespace gpu {
void add_bias(const Tensor& y, const Tensor& bias);
void column_sum(const Tensor& x, const Tensor& sum, bool accumulate);
}  // namespace gpu

}  // namespace ebb
