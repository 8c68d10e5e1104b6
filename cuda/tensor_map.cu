#include "cuda/tensor_map.h"

#include "cuda/common.cuh"

namespace ebb::gpu {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, without linking against the driver.
Encode encoder() {
  static const Encode found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                cudaEnableDefault, &result),
               "tensor maps");
#else
    cuda_check(
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result),
        "tensor maps");
#endif
    if (!entry || result != cudaDriverEntryPointSuccess)
      throw Error("the CUDA driver has no tensor maps: update it to version 12 or later");
    return reinterpret_cast<Encode>(entry);
  }();
  return found;
}

}  // namespace

CUtensorMap tile_map(const void* base, int64_t columns, int64_t heads, int64_t head_stride,
                     int64_t rows, int64_t row_stride, Device device) {
  CUtensorMap map{};
  if (compute_capability(device) != 90 || columns == 0 || heads == 0 || rows == 0) return map;
  const cuuint64_t sizes[3] = {cuuint64_t(columns), cuuint64_t(heads), cuuint64_t(rows)};
  const cuuint64_t strides[2] = {2 * cuuint64_t(head_stride), 2 * cuuint64_t(row_stride)};
  const cuuint32_t box[3] = {64, 1, 64}, steps[3] = {1, 1, 1};
  const CUresult code =
      encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(base), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS)
    throw Error(std::string(current_op()) + ": the driver refused a tensor map of " +
                std::to_string(heads) + " x " + std::to_string(rows) + " x " +
                std::to_string(columns) + ", strides " + std::to_string(head_stride) + " and " +
                std::to_string(row_stride) + " (code " + std::to_string(int(code)) + ")");
  return map;
}

}  // namespace ebb::gpu
