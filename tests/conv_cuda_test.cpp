// Convolution, gates and token shift on the GPU: more than 2³¹ elements, bf16 next to f32 states.
#include "autograd/tape.h"
#include "ops/causal_conv1d.h"
#include "ops/decay_gate.h"
#include "ops/swiglu.h"
#include "ops/token_shift.h"
#include "tensor/compare.h"
#include "tensor/random.h"
#include "tests/cuda_fixture.h"

namespace ebb::testing {
namespace {

class ConvCuda : public CudaTest {
 protected:
  Tensor normal(const Shape& shape, DType dtype, uint64_t seed) const {
    Tensor t = Tensor::empty(shape, dtype, gpu_);
    fill_normal(t, {seed, 0});
    return t;
  }
};

// Offsets of 32 bits wrap in the second row of this batch (B10): its last tokens, against the same
// tokens run alone.
constexpr int64_t kTime = 262'200, kChannels = 4096, kTail = 200, kBorder = 8;
static_assert(2 * kTime * kChannels > (int64_t(1) << 31));

Tensor tail(const Tensor& t) { return t.slice(0, 1, 2).slice(1, kTime - kTail, kTime); }
// What does not depend on where the tail was cut off.
Tensor inner(const Tensor& t) { return t.slice(1, kBorder, kTail).contiguous(); }

TEST_F(ConvCuda, B10_ConvolutionBeyond32BitOffsets) {
  if (!has_memory(int64_t(6) * 2 * kTime * kChannels * 2)) GTEST_SKIP() << "not enough memory";
  const Tensor x = normal({2, kTime, kChannels}, DType::bf16, 1),
               w = normal({kChannels, 4}, DType::f32, 2);
  const Tensor dy = normal({2, kTime, kChannels}, DType::bf16, 3);
  const auto run = [&](const Tensor& x, const Tensor& dy) {
    const Var v = Var::leaf(x);
    const Var y = causal_conv1d(v, w).y;
    backward(y, dy);
    return std::pair(y.value(), v.grad());
  };
  const auto [y, dx] = run(x, dy);
  const auto [y_tail, dx_tail] = run(tail(x), tail(dy));
  EXPECT_TRUE(bitwise_equal(inner(tail(y)), inner(y_tail)));
  EXPECT_TRUE(bitwise_equal(inner(tail(dx)), inner(dx_tail)));
}

TEST_F(ConvCuda, B10_GatesBeyond32BitOffsets) {
  if (!has_memory(int64_t(5) * 2 * kTime * kChannels * 4)) GTEST_SKIP() << "not enough memory";
  const Tensor x = normal({2, kTime, kChannels}, DType::bf16, 1);
  {
    const Tensor y = swiglu(x).value(), alone = swiglu(tail(x)).value();
    EXPECT_TRUE(bitwise_equal(tail(y).contiguous(), alone));
  }
  {
    const Tensor delta = token_shift(x).delta.value(), alone = token_shift(tail(x)).delta.value();
    EXPECT_TRUE(bitwise_equal(inner(tail(delta)), inner(alone)));
  }
  const Tensor A = normal({64}, DType::f32, 2), bias = normal({kChannels}, DType::f32, 3);
  const Tensor g = decay_gate(x, A, bias).value(), alone = decay_gate(tail(x), A, bias).value();
  EXPECT_TRUE(bitwise_equal(tail(g).contiguous(), alone));
}

// A state in f32 next to bf16 tokens goes through a prompt shorter than the window unrounded.
TEST_F(ConvCuda, StatesKeepTheirType) {
  const Tensor x = normal({2, 2, 8}, DType::bf16, 1), w = normal({8, 4}, DType::f32, 2);
  const Tensor state = normal({2, 8, 4}, DType::f32, 3);
  const CausalConv1d wide = causal_conv1d(x, w, {}, state, {.final_state = true});
  EXPECT_EQ(wide.final_state.dtype(), DType::f32);
  EXPECT_TRUE(bitwise_equal(wide.final_state.value().slice(2, 0, 2).contiguous(),
                            state.slice(2, 2, 4).contiguous()));
  const CausalConv1d narrow = causal_conv1d(x, w, {}, {}, {.final_state = true});
  EXPECT_EQ(narrow.final_state.dtype(), DType::bf16);
  const Tensor y = causal_conv1d_step(x.select(1, 0), w, {}, state, ConvActivation::silu);
  EXPECT_TRUE(bitwise_equal(y, wide.y.value().select(1, 0).contiguous()));
}

}  // namespace
}  // namespace ebb::testing
