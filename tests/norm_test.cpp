#include <gtest/gtest.h>
#include <omp.h>

#include "autograd/tape.h"
#include "ops/gated_rms_norm.h"
#include "ops/l2_norm.h"
#include "ops/layer_norm.h"
#include "ops/rms_norm.h"
#include "tensor/compare.h"
#include "tests/norm_properties.h"
#include "tests/op_harness.h"

namespace ebb::testing {
namespace {

const Device kCpu = Device::cpu();

TEST(Norm, AnyNumberOfRows) { check_row_counts(kCpu, {1, 2, 8, 63, 64, 65, 131, 133}, 64); }
TEST(Norm, GroupsAreSeparate) { check_groups_are_separate(kCpu); }
TEST(Norm, UpstreamViews) { check_upstream_views(kCpu); }
TEST(Norm, SlicesOfAProjection) { check_slices(kCpu); }
TEST(Norm, TinyRows) { check_tiny_rows(kCpu); }
TEST(Norm, NotFinite) { check_not_finite(kCpu); }
TEST(Norm, OneChannel) { check_one_channel(kCpu); }

TEST(Norm, ThreadsDoNotMatter) {
  const RunOptions f32{.dtype = DType::f32};
  for (const std::string& name : norm_names()) {
    const OpCase c = norm_case(name, {1000, 64});
    const int before = omp_get_max_threads();
    omp_set_num_threads(1);
    const RunResult one = run_case(c, f32);
    omp_set_num_threads(3);
    const RunResult three = run_case(c, f32);
    omp_set_num_threads(before);
    expect_bitwise(name, one, three);
  }
}

TEST(Norm, NothingIsKeptWithoutGradients) {
  const Tensor x = Tensor::full({4, 8}, 1.5), w = Tensor::full({8}, 1);
  EXPECT_FALSE(rms_norm(x, w, 1e-5f).requires_grad());
  const Var leaf = Var::leaf(x);
  const Var y = l2_norm(leaf);
  // y and one statistic per row; x is not kept.
  EXPECT_EQ(saved_bytes(y), 4 * 8 * 4 + 4 * 4);
}

TEST(Norm, CostsCountEachTensorOnce) {
  const Shape x{32768, 512};
  const double n = 32768.0 * 512, rows = 32768;
  EXPECT_EQ(rms_norm_cost(Pass::forward, x, DType::bf16).bytes, 4 * n + 4 * 512 + 4 * rows);
  EXPECT_EQ(rms_norm_cost(Pass::backward, x, DType::bf16).bytes, 6 * n + 8 * 512 + 4 * rows);
  EXPECT_EQ(add_rms_norm_cost(Pass::forward, x, DType::bf16, DType::f32).bytes,
            (2 + 2 + 4 + 4) * n + 4 * 512 + 4 * rows);
  // u, du in f32 and dy in; the gradient out in both dtypes.
  EXPECT_EQ(add_rms_norm_cost(Pass::backward, x, DType::bf16, DType::f32).bytes,
            (4 + 4 + 2 + 2 + 4) * n + 8 * 512 + 4 * rows);
  EXPECT_EQ(add_rms_norm_cost(Pass::backward, x, DType::bf16, DType::bf16).bytes,
            (2 + 2 + 2 + 2) * n + 8 * 512 + 4 * rows);
  EXPECT_EQ(l2_norm_cost(Pass::forward, {32768, 8, 64}, DType::bf16).bytes, 4 * n + 4 * 8 * rows);
  EXPECT_EQ(gated_rms_norm_cost(Pass::backward, {32768, 4, 128}, DType::bf16).bytes,
            10 * n + 8 * 128 + 4 * 4 * rows);
  EXPECT_EQ(layer_norm_cost(Pass::forward, x, DType::f32, 8).bytes,
            8 * n + 8 * 512 + 2 * 4 * 8 * rows);
}

}  // namespace
}  // namespace ebb::testing
