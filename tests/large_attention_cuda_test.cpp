// B10 (FLA#1080, #1082): offsets of 32 bits wrapped once a tensor passed 2³¹ elements. The second
// row of these batches lies behind that mark, and its last tokens must be those of the row alone,
// for the operators of RWKV-7, linear attention by channel and the Transformer.
#include "autograd/tape.h"
#include "ops/attention.h"
#include "ops/dplr.h"
#include "ops/forget_gate.h"
#include "ops/gated_linear_attention.h"
#include "ops/log_cumsum_exp.h"
#include "ops/movement.h"
#include "ops/rotary.h"
#include "ops/token_shift.h"
#include "tensor/compare.h"
#include "tensor/random.h"
#include "tests/cuda_fixture.h"

namespace ebb::testing {
namespace {

constexpr int64_t kTime = 262145, kHeads = 64, kWidth = 64, kLast = 200;
static_assert(2 * kTime * kHeads * kWidth > int64_t(1) << 31);

class LargeAttention : public CudaTest {
 protected:
  Tensor draw(const Shape& shape, DType dtype, double low, double high) {
    const Tensor t = Tensor::empty(shape, dtype, gpu_);
    fill_uniform(t, {17, next_++}, low, high);
    return t;
  }
  // Rows of the batch from `first` on.
  using Rows = std::function<Tensor(const Tensor&)>;
  // What `run` makes of both rows and of the second one alone: [1 or 2, kTime, ...].
  void expect_same_tail(const std::function<std::vector<Tensor>(const Rows&)>& run, double limit) {
    std::vector<Tensor> tails[2];
    for (const int64_t first : {0, 1}) {
      const auto rows = [first](const Tensor& t) { return t.slice(0, first, 2); };
      for (const Tensor& t : run(rows))
        tails[first].push_back(
            t.select(0, t.size(0) - 1).slice(0, kTime - kLast, kTime).cpu().to(DType::f32));
      empty_cache(gpu_);
    }
    ASSERT_FALSE(tails[1].empty());
    for (size_t i = 0; i < tails[1].size(); ++i) {
      EXPECT_LE(relative_error(tails[0][i], tails[1][i]), limit) << i;
      EXPECT_GT(euclidean_norm(tails[1][i]), 0) << i;
    }
  }

 private:
  uint64_t next_ = 0;
};

// Segments of a sequence depend on how many there are: rounding may differ.
TEST_F(LargeAttention, Dplr) {
  struct Run {
    DType dtype;
    int64_t width, gb;
  };
  for (const auto& [dtype, width, gb] :
       {Run{DType::bf16, kWidth, 70}, Run{DType::bf16, 2 * kWidth, 95},
        Run{DType::f32, kWidth, 110}}) {
    if (!has_memory(gb << 30)) GTEST_SKIP() << "wants " << gb << " GB of GPU memory";
    const int64_t heads = kHeads * kWidth / width;
    const Shape keys{2, kTime, heads, width}, values{2, kTime, heads, 8};
    const Tensor r = draw(keys, dtype, -1, 1), w = draw(keys, DType::f32, -0.6, -0.01);
    const Tensor k = draw(keys, dtype, -0.3, 0.3), v = draw(values, dtype, -1, 1);
    const Tensor a = draw(keys, dtype, -0.2, 0), b = draw(keys, dtype, 0, 0.1);
    const Tensor d_o = draw(values, dtype, -1, 1);
    const auto run = [&](const Rows& rows) {
      const Var vr = Var::leaf(rows(r)), vv = Var::leaf(rows(v));
      const Var o =
          dplr(vr, rows(w), rows(k), vv, rows(a), rows(b), {}, {.lower_bound = -0.6066}).o;
      backward(o, rows(d_o));
      return std::vector{o.value(), vr.grad(), vv.grad()};
    };
    expect_same_tail(run, dtype == DType::bf16 ? 1e-2 : 1e-5);
  }
}

TEST_F(LargeAttention, LinearAttentionByChannel) {
  if (!has_memory(int64_t(60) << 30)) GTEST_SKIP() << "wants 60 GB of GPU memory";
  const Shape keys{2, kTime, kHeads, kWidth}, values{2, kTime, kHeads, 8};
  const Tensor q = draw(keys, DType::bf16, -1, 1), v = draw(values, DType::bf16, -1, 1);
  const Tensor g = draw(keys, DType::f32, -1, -0.01), d_o = draw(values, DType::bf16, -1, 1);
  for (const bool shared : {false, true}) {
    const Tensor k = shared ? Tensor() : draw(keys, DType::bf16, -0.3, 0.3);
    const auto run = [&](const Rows& rows) {
      const Var vq = Var::leaf(rows(q)), vg = Var::leaf(rows(g));
      const Var o =
          gated_linear_attention(vq, k ? Var(rows(k)) : Var(), rows(v), vg, {}, {.scale = 0.1}).o;
      backward(o, rows(d_o));
      return std::vector{o.value(), vq.grad(), vg.grad()};
    };
    expect_same_tail(run, 1e-2);
  }
}

TEST_F(LargeAttention, SoftmaxAttention) {
  if (!has_memory(int64_t(60) << 30)) GTEST_SKIP() << "wants 60 GB of GPU memory";
  const Shape shape{2, kTime, kHeads, kWidth};
  const Tensor q = draw(shape, DType::bf16, -1, 1), k = draw(shape, DType::bf16, -1, 1);
  const Tensor v = draw(shape, DType::bf16, -1, 1), d_o = draw(shape, DType::bf16, -1, 1);
  const auto run = [&](const Rows& rows) {
    const Var vq = Var::leaf(rows(q)), vk = Var::leaf(rows(k)), vv = Var::leaf(rows(v));
    const Var o = attention(vq, vk, vv, {.window = 100}).o;
    backward(o, rows(d_o));
    return std::vector{o.value(), vq.grad(), vk.grad(), vv.grad()};
  };
  expect_same_tail(run, 0);
}

// A cache of so many tokens, and what a step writes into it.
TEST_F(LargeAttention, AttentionStep) {
  if (!has_memory(int64_t(30) << 30)) GTEST_SKIP() << "wants 30 GB of GPU memory";
  const Shape cache{2, kTime, kHeads, kWidth}, token{2, kHeads, kWidth};
  const Tensor keys = draw(cache, DType::bf16, -1, 1), values = draw(cache, DType::bf16, -1, 1);
  const Tensor q = draw(token, DType::bf16, -1, 1), k = draw(token, DType::bf16, -1, 1);
  const Tensor v = draw(token, DType::bf16, -1, 1);
  const auto run = [&](const Rows& rows) {
    const Tensor at = Tensor::full({rows(q).size(0)}, double(kTime - 1), DType::i64, gpu_);
    const Tensor own = rows(keys).clone(), seen = rows(values).clone();
    const Tensor o = attention_step(rows(q), rows(k), rows(v), own, seen, at);
    EXPECT_TRUE(bitwise_equal(own.select(1, kTime - 1).cpu(), rows(k).cpu()));
    EXPECT_TRUE(bitwise_equal(seen.select(1, kTime - 1).cpu(), rows(v).cpu()));
    return std::vector{o.unsqueeze(1).expand({o.size(0), kTime, kHeads, kWidth})};
  };
  expect_same_tail(run, 1e-2);
}

TEST_F(LargeAttention, LogCumsumExp) {
  if (!has_memory(int64_t(70) << 30)) GTEST_SKIP() << "wants 70 GB of GPU memory";
  const Shape shape{2, kTime, kHeads * kWidth};
  const Tensor u = draw(shape, DType::bf16, -3, 3), dk = draw(shape, DType::bf16, -1, 1);
  const Tensor dg = draw(shape, DType::f32, -1, 1);
  const auto run = [&](const Rows& rows) {
    const Var vu = Var::leaf(rows(u));
    const LogCumsumExp r = log_cumsum_exp(vu, {});
    backward(std::vector{r.k, r.g}, std::vector{rows(dk), rows(dg)});
    return std::vector{r.k.value(), r.g.value(), vu.grad()};
  };
  expect_same_tail(run, 0);
}

TEST_F(LargeAttention, RotaryGatesAndTokenShift) {
  if (!has_memory(int64_t(60) << 30)) GTEST_SKIP() << "wants 60 GB of GPU memory";
  const Shape flat{2, kTime, kHeads * kWidth};
  const Tensor x = draw(flat, DType::bf16, -1, 1), dy = draw(flat, DType::bf16, -1, 1);
  const Tensor bias = draw({kHeads * kWidth}, DType::f32, -1, 1);
  const Tensor mix = draw({1, kHeads * kWidth}, DType::f32, 0, 1);
  const auto backward_of = [&](const Rows& rows, auto&& op) {
    const Var leaf = Var::leaf(rows(x));
    const Var y = op(leaf);
    backward(y, rows(dy).reshape(y.shape()).to(y.dtype()));
    return std::vector{y.value(), leaf.grad()};
  };
  expect_same_tail(
      [&](const Rows& rows) {
        return backward_of(rows, [&](const Var& v) {
          return rotary(reshape(v, {v.size(0), kTime, kHeads, kWidth}));
        });
      },
      0);
  expect_same_tail(
      [&](const Rows& rows) {
        return backward_of(rows, [&](const Var& v) { return forget_gate(v, {.bias = bias}); });
      },
      0);
  expect_same_tail(
      [&](const Rows& rows) {
        return backward_of(rows, [&](const Var& v) { return token_shift_mix(v, Var(mix)).out[0]; });
      },
      0);
}

}  // namespace
}  // namespace ebb::testing
