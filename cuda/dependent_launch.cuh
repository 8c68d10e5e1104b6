// Launches whose set-up overlaps the end of the kernel before them in the stream (programmatic
// dependent launch, compute capability 9.0): where kernels take microseconds, as in decoding, that
// is a part of their time.
//   __global__ void kernel(Args a) { wait_for_earlier_kernels(); ... }
//   launch_dependent<kernel<T>>(grid, block, shared, stream, a);
// Such a kernel must wait before it touches global memory, in every thread. Captured graphs keep
// the overlap.
#pragma once
#include "cuda/common.cuh"

namespace ebb::gpu {

#ifdef __CUDACC__

// Until everything earlier in the stream is done and its writes are seen.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether the kernel's code holds that wait: an older kind of code may run on a newer GPU.
inline bool knows_dependent_launch(const void* kernel) {
  cudaFuncAttributes a{};
  cuda_check(cudaFuncGetAttributes(&a, kernel), "kernel attributes");
  return a.ptxVersion >= 90;
}

template <auto kKernel, class... P>
void launch_dependent(dim3 grid, dim3 block, size_t shared, cudaStream_t stream, const P&... args) {
  static const bool overlaps = knows_dependent_launch(reinterpret_cast<const void*>(kKernel));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block;
  config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = overlaps ? 1 : 0;
  cudaLaunchKernelEx(&config, kKernel, args...);
  check_launch();
}

#endif

}  // namespace ebb::gpu
