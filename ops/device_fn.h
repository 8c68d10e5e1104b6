// EBB_FN marks a formula written once for both backends: an ordinary inline function for the C++
// compiler, device code (single precision only) for nvcc.
#pragma once

#if defined(__CUDACC__)
#define EBB_FN __device__ __forceinline__
#else
#define EBB_FN inline
#endif
