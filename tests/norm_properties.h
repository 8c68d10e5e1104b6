// What every normalisation owes on every device, beyond the op table; norm_test.cpp runs these on
// the CPU, norm_cuda_test.cpp on a GPU. Each fails the current gtest.
#pragma once
#include <initializer_list>
#include <string>
#include <vector>

#include "tests/op_table.h"

namespace ebb::testing {

// rms_norm, add_rms_norm, l2_norm, layer_norm, group_norm, gated_norm_first, gated_gate_first
const std::vector<std::string>& norm_names();
// A case of the named normalisation on x like `shape`; x is drawn with this scale.
OpCase norm_case(const std::string& name, const Shape& shape, double scale = 1, float eps = 1e-6f);

// Outputs and gradients for few and for many rows, whatever the number of multiprocessors.
void check_row_counts(Device device, std::initializer_list<int64_t> rows, int64_t width);
// Groups of scales 1 and 100 are two separate norms, in every gradient.
void check_groups_are_separate(Device device);
// Upstream gradients as a transposed view, a channel slice and an expanded scalar.
void check_upstream_views(Device device);
// Slices of a wider projection, aligned or not, give what their copies give.
void check_slices(Device device);
// Rows so small that eps decides, and rows of zeros.
void check_tiny_rows(Device device);
// NaN and infinity make their own row NaN and no other; so do sums beyond the statistics' range,
// which on a GPU is that of f32.
void check_not_finite(Device device);
// A row of one channel has no variance.
void check_one_channel(Device device);

}  // namespace ebb::testing
