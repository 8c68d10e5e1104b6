// The few PTX instructions the tile kernels use: matrix fragments, bf16 matrix products on tensor
// cores, asynchronous copies to shared memory. Compute capability 8.0.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace ebb::gpu {

// The block's dynamic shared memory as an S.
template <class S>
__device__ __forceinline__ S& dynamic_shared() {
  extern __shared__ __align__(128) unsigned char s_bytes[];
  return *reinterpret_cast<S*>(s_bytes);
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return unsigned(__cvta_generic_to_shared(p));
}

// Four 8x8 matrices of 16-bit values: lane l names row l%8 (16 bytes, aligned) of matrix l/8 and
// receives of each matrix row l/4, columns 2(l%4) and the next; transposed: rows 2(l%4) and the
// next of column l/4.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// d[16,8] += a[16,16] b[16,8], bf16 in, f32 sums.
__device__ __forceinline__ void mma_bf16(float* d, const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two values rounded to bf16, the first in the low half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// 16 bytes from global to shared memory, both aligned to 16. They have arrived after a
// wait_copies() of the thread that asked for them (and a barrier, for the others).
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global))
               : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace ebb::gpu
