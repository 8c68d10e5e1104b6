#include <cmath>

#include "autograd/tape.h"
#include "ops/l2_norm.h"
#include "ops/rms_norm.h"
#include "tensor/compare.h"
#include "tests/cuda_fixture.h"
#include "tests/norm_properties.h"
#include "tests/op_harness.h"

namespace ebb::testing {
namespace {

using NormCuda = CudaTest;

TEST_F(NormCuda, AnyNumberOfRows) { check_row_counts(gpu_, {1, 2, 8, 131, 133}, 64); }
TEST_F(NormCuda, ManyRowsPerBlock) {
  // More rows than the persistent grid holds at once, and not a multiple of that.
  check_row_counts(gpu_, {20011}, 64);
  check_row_counts(gpu_, {5003}, 512);
  check_row_counts(gpu_, {3001}, 34);
  check_row_counts(gpu_, {1501}, 1024);
}
TEST_F(NormCuda, WideRows) { check_row_counts(gpu_, {3, 140}, 20000); }
TEST_F(NormCuda, GroupsAreSeparate) { check_groups_are_separate(gpu_); }
TEST_F(NormCuda, UpstreamViews) { check_upstream_views(gpu_); }
TEST_F(NormCuda, SlicesOfAProjection) { check_slices(gpu_); }
TEST_F(NormCuda, TinyRows) { check_tiny_rows(gpu_); }
TEST_F(NormCuda, NotFinite) { check_not_finite(gpu_); }
TEST_F(NormCuda, OneChannel) { check_one_channel(gpu_); }

TEST_F(NormCuda, ResidualStreamStaysF32) {
  const OpCase c = norm_case("add_rms_norm", {333, 512});
  const Tensor x = c.inputs[0].value.to(DType::bf16), stream = c.inputs[2].value.to(DType::f32);
  const Tensor dy = norm_case("l2_norm", {333, 512}, 0.7).inputs[0].value.to(DType::bf16);
  const Tensor du = norm_case("l2_norm", {333, 512}, 0.3).inputs[0].value.to(DType::f32);
  const auto run = [&](Device device, DType narrow, DType wide) {
    std::vector<Var> in = {Var::leaf(x.to(narrow, device)), Var::leaf(stream.to(wide, device)),
                           Var::leaf(c.inputs[1].value.to(DType::f32).to(wide, device))};
    const AddRmsNorm r = add_rms_norm(in[0], in[1], in[2], 1e-6f);
    EXPECT_EQ(r.y.dtype(), narrow);
    EXPECT_EQ(r.u.dtype(), wide);
    const std::vector<Var> roots = {r.y, r.u};
    const std::vector<Tensor> upstream = {dy.to(narrow, device), du.to(wide, device)};
    backward(roots, upstream);
    return std::vector{r.y.value(), r.u.value(), in[0].grad(), in[1].grad(), in[2].grad()};
  };
  const auto got = run(gpu_, DType::bf16, DType::f32), want = run({}, DType::f64, DType::f64);
  const double limits[] = {4e-3, 1e-7, 4e-3, 2e-6, 2e-6};  // y, u, dx, dresidual, dw
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT_LE(relative_error(got[i], want[i]), limits[i]) << "tensor " << i;
}

// More than 2³¹ elements: the last rows equal the same rows run alone.
TEST_F(NormCuda, HugeOffsets) {
  const int64_t d = 1024, n = (int64_t(1) << 21) + 5, last = 7;
  if (!has_memory(int64_t(40) << 30)) GTEST_SKIP() << "wants 40 GB of GPU memory";
  const Tensor x = Tensor::full({n, d}, 0.25, DType::bf16, gpu_);
  const Tensor dy = Tensor::full({n, d}, 0.5, DType::bf16, gpu_);
  Draw draw(3);
  const Tensor tail = draw.normal({last, d}).to(DType::bf16, gpu_);
  const Tensor tail_dy = draw.normal({last, d}).to(DType::bf16, gpu_);
  x.slice(0, n - last, n).copy_(tail);
  dy.slice(0, n - last, n).copy_(tail_dy);
  const Var w = Tensor::full({d}, 1.25, DType::f32, gpu_);
  for (const bool rms : {true, false}) {
    const auto norm = [&](const Var& v) { return rms ? rms_norm(v, w, 1e-6f) : l2_norm(v); };
    const Var all = Var::leaf(x), few = Var::leaf(tail);
    const Var y = norm(all), want = norm(few);
    EXPECT_TRUE(bitwise_equal(y.value().slice(0, n - last, n), want.value()));
    backward(y, dy);
    backward(want, tail_dy);
    EXPECT_TRUE(bitwise_equal(all.grad().slice(0, n - last, n), few.grad()));
  }
}

}  // namespace
}  // namespace ebb::testing
