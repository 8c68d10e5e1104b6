// The table of chosen cuBLASLt algorithms as plain data, between cuda/matmul.cu, which fills and
// consults it, and ops/matmul_algorithms.cpp, which writes and reads it as JSON.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace ebb {

// What cuBLASLt's choice depends on, in our row-major terms (ops/gemm.h).
struct GemmKey {
  enum Field {
    m,
    n,
    k,
    batch,  // sizes
    ld_a,
    ld_b,
    ld_c,  // leading dimensions
    stride_a,
    stride_b,
    stride_c,  // between the matrices of a batch
    trans_a,
    trans_b,  // 0 or 1
    operands,
    result,  // DType
    align_a,
    align_b,
    align_c,  // of the addresses, bytes: 1 ... 256
    fields
  };
  std::array<int64_t, fields> v = {};
  bool operator==(const GemmKey&) const = default;
};
inline constexpr const char* kGemmKeyNames[GemmKey::fields] = {
    "m",        "n",        "k",        "batch",    "ld_a",    "ld_b",
    "ld_c",     "stride_a", "stride_b", "stride_c", "trans_a", "trans_b",
    "operands", "result",   "align_a",  "align_b",  "align_c"};

struct MatmulAlgorithm {
  std::string gpu;  // model and number of multiprocessors
  GemmKey key;
  std::string bytes;      // cuBLASLt's opaque description, hexadecimal; empty: the plain kernel
  int64_t workspace = 0;  // bytes it needs
};

namespace gpu {
int64_t cublaslt_version();
std::vector<MatmulAlgorithm> matmul_algorithms();  // in a fixed order
void add_matmul_algorithm(const MatmulAlgorithm& algorithm);
}  // namespace gpu

}  // namespace ebb
