// Embedding and losses on the CPU beyond what the op table generates.
#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "ops/embedding.h"
#include "ops/linear_cross_entropy.h"
#include "ops/matmul.h"
#include "tensor/compare.h"
#include "tests/op_table.h"

namespace ebb::testing {
namespace {

Tensor random(const Shape& s) {
  static Draw draw(501);
  return draw.normal(s);
}
Tensor ids(const std::vector<int64_t>& v) { return Tensor::from(v, {int64_t(v.size())}); }
Tensor scalar(double v) { return Tensor::full({}, v, DType::f64); }

TEST(LinearCrossEntropy, EqualsTheTwoOperatorsForEveryChunkSize) {
  const Tensor x = random({23, 7}), w = random({19, 7});
  const Tensor labels = Draw(3).integers({23}, 0, 19);
  for (int64_t i = 0; i < 23; i += 4) labels.data<int64_t>()[i] = -100;
  const Var x1 = Var::leaf(x), w1 = Var::leaf(w);
  const CrossEntropy plain = cross_entropy(linear(x1, w1), labels);
  backward(plain.loss, scalar(1.7));
  for (const int64_t chunk : {1, 2, 7, 22, 23, 24, 1000, 0}) {
    const Var x2 = Var::leaf(x), w2 = Var::leaf(w);
    const CrossEntropy fused = linear_cross_entropy(x2, w2, labels, {.chunk_rows = chunk});
    backward(fused.loss, scalar(1.7));
    EXPECT_LE(relative_error(fused.loss.value(), plain.loss.value()), 1e-14) << chunk;
    EXPECT_LE(relative_error(fused.token_loss, plain.token_loss), 1e-14) << chunk;
    EXPECT_LE(relative_error(fused.lse, plain.lse), 1e-14) << chunk;
    EXPECT_EQ(fused.count.item(), 17) << chunk;
    EXPECT_LE(relative_error(x2.grad(), x1.grad()), 1e-13) << chunk;
    EXPECT_LE(relative_error(w2.grad(), w1.grad()), 1e-13) << chunk;
  }
}

TEST(LinearCrossEntropy, TokenWeightsEqualPerTokenUpstreamGradients) {
  const Tensor x = random({12, 5}), w = random({9, 5}), weights = Draw(4).uniform({12}, 0, 3);
  const Tensor labels = Draw(5).integers({12}, 0, 9);
  const Var x1 = Var::leaf(x), w1 = Var::leaf(w), x2 = Var::leaf(x), w2 = Var::leaf(w);
  backward(cross_entropy(linear(x1, w1), labels, {.reduction = Reduction::none}).loss, weights);
  const CrossEntropy fused = linear_cross_entropy(
      x2, w2, labels, {.reduction = Reduction::sum, .token_weights = weights, .chunk_rows = 5});
  backward(fused.loss);
  EXPECT_LE(relative_error(x2.grad(), x1.grad()), 1e-13);
  EXPECT_LE(relative_error(w2.grad(), w1.grad()), 1e-13);
}

TEST(LinearCrossEntropy, RetainedGraphsGiveTheSameGradientsAgain) {
  const Var x = Var::leaf(random({6, 4})), w = Var::leaf(random({5, 4}));
  const Var loss = linear_cross_entropy(x, w, Draw(6).integers({6}, 0, 5)).loss;
  backward(loss, scalar(2), {.retain = true});
  const Tensor dx = x.grad().clone(), dw = w.grad().clone();
  x.zero_grad(), w.zero_grad();
  backward(loss, scalar(2));
  EXPECT_TRUE(bitwise_equal(x.grad(), dx));
  EXPECT_TRUE(bitwise_equal(w.grad(), dw));
}

TEST(LinearCrossEntropy, FormsOnlyTheGradientsThatAreWanted) {
  const Tensor x = random({64, 8}), w = random({128, 8});
  const Tensor labels = Draw(7).integers({64}, 0, 128);
  EXPECT_EQ(saved_bytes(linear_cross_entropy(Var::leaf(x), w, labels).loss), x.nbytes());
  EXPECT_EQ(saved_bytes(linear_cross_entropy(x, Var::leaf(w), labels).loss), w.nbytes());
  EXPECT_FALSE(linear_cross_entropy(x, w, labels).loss.requires_grad());
}

// Micro-batch losses 2 (1 token) and 1 (99 tokens): the mean over all tokens is 1.01, not 1.5.
TEST(Losses, GlobalCountMakesMicroBatchesEqualOneBatch) {
  // With classes 0 and 1 and logits (0, log(e^l − 1)), the loss of class 0 is l.
  Tensor logits = Tensor::zeros({100, 2}, DType::f64);
  for (int64_t n = 0; n < 100; ++n)
    logits.data<double>()[2 * n + 1] = std::log(std::exp(n == 0 ? 2.0 : 1.0) - 1);
  const Tensor labels = Tensor::zeros({100}, DType::i64);
  const Var all = Var::leaf(logits);
  const Var whole = cross_entropy(all, labels).loss;
  EXPECT_NEAR(whole.value().item(), 1.01, 1e-12);
  backward(whole);

  const Tensor count = count_labels(labels);
  EXPECT_EQ(count.item(), 100);
  const Var parts = Var::leaf(logits),
            weights = Var::leaf(Tensor::from(std::vector<double>{1, 0, 0, 1}, {2, 2}));
  double loss = 0, fused = 0;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {1, 100}}) {
    const Var z = Var::leaf(logits.slice(0, begin, end));
    const CrossEntropy r = cross_entropy(z, labels.slice(0, begin, end), {.count = count});
    EXPECT_EQ(r.count.item(), double(end - begin));
    loss += r.loss.value().item();
    backward(r.loss);
    EXPECT_LE(relative_error(z.grad(), all.grad().slice(0, begin, end)), 1e-14);
    const CrossEntropy f = linear_cross_entropy(logits.slice(0, begin, end), weights,
                                                labels.slice(0, begin, end), {.count = count});
    fused += f.loss.value().item();
    backward(f.loss);
  }
  EXPECT_NEAR(loss, 1.01, 1e-12);
  EXPECT_NEAR(fused, 1.01, 1e-12);
  const Var once = Var::leaf(weights.value());
  backward(linear_cross_entropy(logits, once, labels).loss);
  EXPECT_LE(relative_error(weights.grad(), once.grad()), 1e-13);
}

TEST(Losses, VocabulariesBeyond16Bits) {
  const int64_t v = 131072, id = 70000;
  const Tensor table = Tensor::arange(v, DType::f64).view({v, 1});
  EXPECT_EQ(embedding(table, ids({id})).value().item(), 70000);
  const Tensor logits = Tensor::zeros({1, v}, DType::f64);
  logits.data<double>()[id] = 30;
  EXPECT_LT(cross_entropy(logits, ids({id})).loss.value().item(), 1e-7);
  EXPECT_GT(cross_entropy(logits, ids({id - 65536})).loss.value().item(), 29);
}

TEST(Losses, AllIgnoredGivesZeroLossAndZeroGradients) {
  const Tensor labels = Tensor::full({4}, -100, DType::i64);
  for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
    const Var z = Var::leaf(random({4, 6})), x = Var::leaf(random({4, 3})),
              w = Var::leaf(random({6, 3}));
    const Var a = cross_entropy(z, labels, {.reduction = reduction}).loss;
    const Var b = linear_cross_entropy(x, w, labels, {.reduction = reduction}).loss;
    EXPECT_EQ(a.value().item(), 0);
    EXPECT_EQ(b.value().item(), 0);
    backward(a);
    backward(b);
    for (const Tensor& g : {z.grad(), x.grad(), w.grad()})
      for (const double value : g.to_vector<double>()) EXPECT_EQ(value, 0);
  }
}

TEST(Losses, NaNShowsInKeptRowsAndStaysOutOfIgnoredOnes) {
  const Tensor logits = random({2, 5});
  logits.data<double>()[1] = NAN;
  const Var ignored = Var::leaf(logits), kept = Var::leaf(logits);
  const Var a = cross_entropy(ignored, ids({-100, 3})).loss;
  EXPECT_TRUE(std::isfinite(a.value().item()));
  backward(a);
  EXPECT_TRUE(all_finite(ignored.grad()));
  const Var b = cross_entropy(kept, ids({2, 3})).loss;
  EXPECT_TRUE(std::isnan(b.value().item()));
  backward(b);
  for (int64_t j = 0; j < 5; ++j) {
    EXPECT_TRUE(std::isnan(kept.grad().to_vector<double>()[size_t(j)]));
    EXPECT_TRUE(std::isfinite(kept.grad().to_vector<double>()[size_t(5 + j)]));
  }
}

TEST(Losses, AddIntoExistingAccumulators) {
  const Var w = Var::leaf(random({6, 3})), table = Var::leaf(random({6, 3}));
  const Tensor before_w = random({6, 3}), before_table = random({6, 3});
  w.slot()->grad = before_w.clone();
  table.slot()->grad = before_table.clone();
  const Tensor sum_w = w.grad(), sum_table = table.grad();
  const Tensor x = random({5, 3}), labels = ids({0, 1, 2, 3, -100});
  backward(linear_cross_entropy(x, w, labels).loss, scalar(3));
  backward(embedding(table, ids({4, 1, 4})), Tensor::full({3, 3}, 1, DType::f64));
  EXPECT_TRUE(w.grad().same_storage(sum_w));
  EXPECT_TRUE(table.grad().same_storage(sum_table));
  const Var fresh = Var::leaf(w.value());
  backward(linear_cross_entropy(x, fresh, labels).loss, scalar(3));
  for (int64_t i = 0; i < 18; ++i) {
    EXPECT_NEAR(sum_w.data<double>()[i],
                before_w.data<double>()[i] + fresh.grad().data<double>()[i], 1e-14);
    const double times = i / 3 == 4 ? 2 : i / 3 == 1 ? 1 : 0;
    EXPECT_NEAR(sum_table.data<double>()[i], before_table.data<double>()[i] + times, 1e-14);
  }
}

TEST(Losses, ChunksAreEvenAndBounded) {
  const Device gpu = Device::cuda(), cpu = Device::cpu();
  EXPECT_EQ(linear_cross_entropy_chunk(32768, 32000, DType::bf16, gpu), 8192);
  EXPECT_EQ(linear_cross_entropy_chunk(9000, 32000, DType::bf16, gpu), 4608);  // not 8192 + 808
  EXPECT_EQ(linear_cross_entropy_chunk(32768, 131072, DType::bf16, gpu), 4096);
  EXPECT_EQ(linear_cross_entropy_chunk(100, 32000, DType::bf16, gpu), 128);
  EXPECT_EQ(linear_cross_entropy_chunk(0, 32000, DType::f32, cpu), 1);
  EXPECT_LE(linear_cross_entropy_chunk(32768, 32000, DType::f32, cpu) * 32000 * 4, int64_t(136)
                                                                                       << 20);
}

TEST(Losses, CostsCountTheProducts) {
  const double one = 2.0 * 100 * 8 * 50;
  const Cost head = linear_cross_entropy_cost(Pass::forward, 100, 8, 50, DType::bf16);
  EXPECT_EQ(head.flops, 3 * one + 5 * 100 * 50);
  EXPECT_LT(head.bytes, 10000);  // without the logits
  EXPECT_GE(cross_entropy_cost(Pass::backward, 100, 50, DType::bf16).bytes, 2 * 2 * 100 * 50);
  EXPECT_EQ(embedding_cost(Pass::forward, 10, 8, DType::bf16).bytes, 2 * 2 * 10 * 8 + 80);
}

}  // namespace
}  // namespace ebb::testing
