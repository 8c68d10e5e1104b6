// Matrices in memory as the copy engine of compute capability 9.0 (TMA) reads them: a kernel names
// one box of 64 rows by 64 columns, and it arrives in shared memory as a SwizzledTile
// (cuda/warpgroup.cuh), zeros where it leaves the matrix. No address is worked out by a thread.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "tensor/device.h"

namespace ebb::gpu {

// Of bf16 [heads, rows, columns] with any strides (in elements, multiples of 8; base aligned to 16
// bytes), the columns next to each other; coordinates are (column, head, row). A kernel takes it as
// `const __grid_constant__`. All zero where there is
// nothing, and elsewhere than on compute capability 9.0.
// Throws Error where the driver refuses.
CUtensorMap tile_map(const void* base, int64_t columns, int64_t heads, int64_t head_stride,
                     int64_t rows, int64_t row_stride, Device device);

}  // namespace ebb::gpu
