// Embedding and losses on the GPU beyond what the op table generates: flags, long runs of one id,
// every kernel variant by vocabulary size, capture in a graph, memory and time of the head.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "autograd/tape.h"
#include "ops/embedding.h"
#include "ops/linear_cross_entropy.h"
#include "ops/matmul.h"
#include "tensor/compare.h"
#include "tensor/device_flags.h"
#include "tensor/event.h"
#include "tensor/graph.h"
#include "tensor/random.h"
#include "tests/op_table.h"

namespace ebb::testing {
namespace {

class LossCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  void TearDown() override {
    if (cuda_device_count()) {
      EXPECT_NO_THROW(check_device_flags(gpu_));
    }
  }
  Tensor random(const Shape& s, DType t, double scale = 1) {
    return draw_.normal(s, scale).to(t, gpu_);
  }
  Tensor labels(int64_t n, int64_t v) {
    const Tensor l = draw_.integers({n}, 0, v);
    for (int64_t i = 2; i < n; i += 5) l.data<int64_t>()[i] = -100;
    return l.to(gpu_);
  }
  static Tensor wide(const Tensor& t) { return t ? t.to(DType::f64, Device::cpu()) : t; }
  void expect_flag(DeviceFlag flag) {
    EXPECT_EQ(read_and_clear_device_flags(gpu_), 1u << int(flag));
  }
  const Device gpu_ = Device::cuda();
  Draw draw_{321};
};

TEST_F(LossCuda, IdsOutsideTheTableReadZerosAndRaiseTheFlag) {
  const Var table = Var::leaf(random({10, 8}, DType::bf16));
  const Tensor ids = Tensor::from(std::vector<int64_t>{3, 10, -1, int64_t(1) << 40, 3}, {5}, gpu_);
  const Var y = embedding(table, ids);
  expect_flag(DeviceFlag::embedding_id);
  for (const int64_t row : {1, 2, 3}) EXPECT_EQ(euclidean_norm(y.value().select(0, row)), 0);
  EXPECT_TRUE(bitwise_equal(y.value().select(0, 4), table.value().select(0, 3)));
  backward(y, Tensor::full({5, 8}, 1, DType::bf16, gpu_));
  const auto grad = table.grad().to_vector<float>();
  for (size_t i = 0; i < grad.size(); ++i) EXPECT_EQ(grad[i], i / 8 == 3 ? 2 : 0);
}

TEST_F(LossCuda, LabelsOutsideTheClassesCountAsIgnoredAndRaiseTheFlag) {
  const Tensor bad = Tensor::from(std::vector<int64_t>{1, 97, -5, 2}, {4}, gpu_);
  const Var z = Var::leaf(random({4, 97}, DType::f32));
  const CrossEntropy r = cross_entropy(z, bad, {.reduction = Reduction::sum});
  expect_flag(DeviceFlag::cross_entropy_label);
  backward(r.loss);
  const Var x = Var::leaf(random({4, 16}, DType::bf16)),
            w = Var::leaf(random({97, 16}, DType::bf16));
  const CrossEntropy fused = linear_cross_entropy(x, w, bad, {.reduction = Reduction::sum});
  expect_flag(DeviceFlag::cross_entropy_label);
  backward(fused.loss);
  for (const int64_t row : {1, 2}) {
    EXPECT_EQ(r.token_loss.select(0, row).item(), 0);
    EXPECT_EQ(fused.token_loss.select(0, row).item(), 0);
    EXPECT_EQ(euclidean_norm(z.grad().select(0, row)), 0);
    EXPECT_EQ(euclidean_norm(x.grad().select(0, row)), 0);
  }
}

TEST_F(LossCuda, EmbeddingGradientsOfFrequentIds) {
  const int64_t n = 100003, v = 300;
  Tensor zipf = draw_.integers({n}, 0, int64_t(1) << 30);  // id k about as often as 1/k
  for (int64_t i = 0; i < n; ++i) {
    const double u = double(zipf.data<int64_t>()[i] + 1) / double(int64_t(1) << 30);
    zipf.data<int64_t>()[i] = int64_t(std::pow(double(v), u)) % v;
  }
  for (const Tensor& ids : {zipf, Tensor::full({n}, 7, DType::i64)})
    for (const DType t : {DType::f32, DType::bf16})
      for (const int64_t d : {5, 24}) {
        const Var table = Var::leaf(random({v, d}, t)), exact = Var::leaf(wide(table.value()));
        const Tensor dy = random({n, d}, t);
        backward(embedding(table, ids.to(gpu_)), dy);
        backward(embedding(exact, ids), wide(dy));
        EXPECT_EQ(table.grad().dtype(), DType::f32);
        EXPECT_LE(relative_error(table.grad(), exact.grad()), 1e-6) << name(t) << d;
        const Tensor first = table.grad().clone();
        table.zero_grad();
        backward(embedding(table, ids.to(gpu_)), dy);
        EXPECT_TRUE(bitwise_equal(table.grad(), first)) << name(t) << d;
        const Tensor sum = table.grad();  // a third pass adds
        backward(embedding(table, ids.to(gpu_)), dy);
        EXPECT_TRUE(table.grad().same_storage(sum));
        for (const Tensor& g : {exact.grad()})
          for (int64_t i = 0; i < g.numel(); ++i) g.data<double>()[i] *= 2;
        EXPECT_LE(relative_error(sum, exact.grad()), 1e-6) << name(t) << d;
      }
}

TEST_F(LossCuda, EmbeddingOfLargeVocabulariesAndInF32) {
  const Tensor table = random({131072, 8}, DType::bf16);
  const Tensor ids = Tensor::from(std::vector<int32_t>{70000, 131071, 0}, {3}, gpu_);
  const Tensor y = embedding(table, ids, DType::f32).value();
  EXPECT_EQ(y.dtype(), DType::f32);
  for (const auto& [row, id] : {std::pair{0, 70000}, {1, 131071}, {2, 0}})
    EXPECT_EQ(relative_error(y.select(0, row), wide(table.select(0, id))), 0);
}

// Rows of every alignment and length: 1 thread's worth up to rows read twice.
TEST_F(LossCuda, CrossEntropyForEveryRowLengthAndAlignment) {
  for (const DType t : {DType::f32, DType::bf16})
    for (const int64_t v : {1, 2, 7, 8, 97, 1023, 4096, 50257, 131072})
      for (const int64_t offset : {0, 1, 3}) {
        const int64_t n = 6;
        const Tensor buffer = random({n * v + offset}, t, 3);
        const Var z = Var::leaf(buffer.slice(0, offset, n * v + offset).view({n, v}));
        const Tensor l = labels(n, v), dy = random({n}, DType::f32);
        const CrossEntropy r = cross_entropy(z, l, {.reduction = Reduction::none});
        backward(r.loss, dy);
        const Var exact = Var::leaf(wide(z.value()));
        const CrossEntropy want = cross_entropy(exact, l.cpu(), {.reduction = Reduction::none});
        backward(want.loss, wide(dy));
        EXPECT_LE(relative_error(r.token_loss, want.token_loss), 5e-6) << name(t) << v;
        EXPECT_LE(relative_error(r.lse, want.lse), 1e-6) << name(t) << v;
        EXPECT_LE(relative_error(z.grad(), exact.grad()), t == DType::f32 ? 5e-6 : 4e-3)
            << name(t) << " V " << v << " offset " << offset;
      }
}

// 128, 256, 512, 1024 threads and the two-pass path; whole and ragged 16-byte packs.
TEST_F(LossCuda, LinearCrossEntropyForEveryVocabulary) {
  for (const DType t : {DType::f32, DType::bf16})
    for (const int64_t v : {1, 33, 97, 512, 4100, 5001, 17000, 32000, 33001, 70000}) {
      const int64_t n = 19, d = 16;
      const Var x = Var::leaf(random({n, d}, t)), w = Var::leaf(random({v, d}, t, 0.4));
      const Tensor l = labels(n, v), weights = draw_.uniform({n}, 0, 2).to(DType::f32, gpu_);
      const LinearCrossEntropyOptions options{.token_weights = weights, .chunk_rows = 8};
      const CrossEntropy r = linear_cross_entropy(x, w, l, options);
      backward(r.loss, Tensor::full({}, 0.5, DType::f32, gpu_));
      const Var ex = Var::leaf(wide(x.value())), ew = Var::leaf(wide(w.value()));
      LinearCrossEntropyOptions host = options;
      host.token_weights = wide(weights);
      const CrossEntropy want = linear_cross_entropy(ex, ew, l.cpu(), host);
      backward(want.loss, Tensor::full({}, 0.5, DType::f64));
      const bool f32 = t == DType::f32;
      EXPECT_EQ(w.grad().dtype(), DType::f32);
      EXPECT_LE(relative_error(r.loss.value(), want.loss.value()), f32 ? 5e-6 : 8e-3) << v;
      EXPECT_LE(relative_error(r.token_loss, want.token_loss), f32 ? 5e-6 : 8e-3) << v;
      EXPECT_LE(relative_error(r.lse, want.lse), f32 ? 5e-6 : 8e-3) << v;
      EXPECT_LE(relative_error(x.grad(), ex.grad()), f32 ? 2e-5 : 1.5e-2) << name(t) << v;
      EXPECT_LE(relative_error(w.grad(), ew.grad()), f32 ? 2e-5 : 1.5e-2) << name(t) << v;
      // Without recording: the same losses to the last bits of f32 sums.
      const CrossEntropy eval = linear_cross_entropy(x.value(), w.value(), l, options);
      EXPECT_LE(relative_error(eval.loss.value(), r.loss.value()), 5e-6) << name(t) << v;
    }
}

TEST_F(LossCuda, NaNShowsInKeptRowsAndStaysOutOfIgnoredOnes) {
  for (const DType t : {DType::f32, DType::bf16}) {
    const Tensor values = random({2, 512}, t);
    values.slice(0, 0, 1).slice(1, 5, 6).fill_(NAN);
    for (const int64_t first : {-100, 2}) {
      const Var z = Var::leaf(values);
      const Tensor l = Tensor::from(std::vector<int64_t>{first, 3}, {2}, gpu_);
      const Var loss = cross_entropy(z, l).loss;
      EXPECT_EQ(std::isnan(loss.value().item()), first == 2);
      backward(loss);
      EXPECT_EQ(all_finite(z.grad().select(0, 0)), first != 2);
      EXPECT_TRUE(all_finite(z.grad().select(0, 1)));
    }
  }
}

TEST_F(LossCuda, NothingWaitsForTheHost) {
  const Var table = Var::leaf(random({64, 32}, DType::bf16)),
            w = Var::leaf(random({64, 32}, DType::bf16));
  const Tensor ids = draw_.integers({200}, 0, 64).to(gpu_), l = labels(200, 64);
  table.slot()->grad = Tensor::zeros({64, 32}, DType::f32, gpu_);
  w.slot()->grad = Tensor::zeros({64, 32}, DType::f32, gpu_);
  const auto step = [&] {
    table.grad().zero_(), w.grad().zero_();
    const Var y = linear(embedding(table, ids), w);
    const Var both = cross_entropy(y, l).loss;
    backward(both);
    backward(linear_cross_entropy(embedding(table, ids), w, l, {.chunk_rows = 64}).loss);
  };
  step();
  const Tensor dt = table.grad().clone(), dw = w.grad().clone();
  GraphCapture graph(gpu_);
  graph.capture(step);
  table.grad().fill_(5), w.grad().fill_(5);
  graph.replay();
  EXPECT_TRUE(bitwise_equal(table.grad(), dt));
  EXPECT_TRUE(bitwise_equal(w.grad(), dw));
}

TEST_F(LossCuda, HeadOfThe100MModelStaysBelowOneGigabyte) {
  const int64_t n = 32768, d = 512, v = 32000;
  const Tensor x = Tensor::empty({n, d}, DType::bf16, gpu_),
               w = Tensor::empty({v, d}, DType::bf16, gpu_);
  fill_normal(x, {1, 1}), fill_normal(w, {1, 2}, 0, 0.04);
  const Tensor l = draw_.integers({n}, 0, v).to(gpu_);
  const Var xv = Var::leaf(x), wv = Var::leaf(w);
  wv.slot()->grad = Tensor::zeros({v, d}, DType::f32, gpu_);
  xv.slot()->grad = Tensor::zeros({n, d}, DType::f32, gpu_);
  set_matmul_autotune(true);
  const auto step = [&] { backward(linear_cross_entropy(xv, wv, l).loss); };
  step();
  set_matmul_autotune(false);
  synchronize(gpu_);
  const int64_t before = memory_stats(gpu_).current;
  reset_peak_memory(gpu_);
  step();
  EXPECT_LT(memory_stats(gpu_).peak - before, 1000000000);
  std::vector<double> ms;
  for (int i = 0; i < 20; ++i) {
    Event start(gpu_), stop(gpu_);
    start.record();
    step();
    stop.record();
    ms.push_back(start.milliseconds_until(stop));
  }
  std::sort(ms.begin(), ms.end());
  std::printf(
      "linear_cross_entropy 32768x512, V 32000, bf16, forward and backward: %.3f ms, %.0f MB\n",
      ms[10], double(memory_stats(gpu_).peak - before) / 1e6);
}

}  // namespace
}  // namespace ebb::testing
