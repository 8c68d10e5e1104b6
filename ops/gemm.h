// Matrix products on tensors, without recording: what matmul, linear and the fused losses consist
// of.
//   matmul_into(a, b, c);             // c = a·b
//   matmul_into(a, b, c, Beta::one);  // c += a·b, say a weight gradient into its accumulator
// a [...,m,k], b [...,k,n], c [...,m,n]; leading dimensions of a and b broadcast to c's, and a
// broadcast operand is never materialised. Row-major and transposed matrices go to the library as
// they are, with any leading dimension; other strides are copied first. K = 0 gives zeros.
// dtypes: CPU f32, f64 (BLAS); CUDA f32 (IEEE single, never TF32) and bf16 with f32 sums
// (cuBLASLt); c has the operands' dtype, or f32 beside bf16 operands.
#pragma once
#include "ops/cost.h"
#include "tensor/tensor.h"

namespace ebb {

enum class Beta { zero, one };

void matmul_into(const Tensor& a, const Tensor& b, const Tensor& c, Beta beta = Beta::zero);

Cost gemm_cost(int64_t batch, int64_t m, int64_t n, int64_t k, DType operands, DType result);

// One strided-batched product in the library's terms. Element (i, j) of an operand's matrix g:
// data[g·stride + i·ld + j], or data[g·stride + i + j·ld] when transposed. c is never transposed.
struct GemmOperand {
  void* data = nullptr;
  int64_t ld = 0;
  int64_t stride = 0;  // between the matrices of the batch; 0 repeats one
  bool transposed = false;
};
struct Gemm {
  DType operands = DType::f32, result = DType::f32;
  int64_t batch = 1, m = 0, n = 0, k = 0;  // all >= 1; batch <= 32768; m, n, k < 2^31
  GemmOperand a = {}, b = {}, c = {};      // [m,k], [k,n], [m,n]
  bool accumulate = false;
};
namespace cpu {
void gemm(const Gemm& g);
}
namespace gpu {
void gemm(const Gemm& g, Device device);
// The same by a plain kernel: what gemm() falls back to where cuBLASLt offers no algorithm.
void gemm_plain(const Gemm& g, Device device);
}  // namespace gpu

}  // namespace ebb
