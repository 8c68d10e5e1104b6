// Philox and the fills on the CPU. Known answers: Random123's kat_vectors for philox4x32-10.
#include "tensor/random.h"

#include <gtest/gtest.h>
#include <omp.h>

#include "tensor/check.h"
#include "tensor/compare.h"
#include "tests/layouts.h"

namespace ebb::testing {
namespace {

using Words = std::vector<uint32_t>;

Words philox_words(const Words& counter, const Words& key) {
  const Philox4 r = philox4x32_10(counter.data(), key.data());
  return Words(r.v, r.v + 4);
}

TEST(Philox, KnownAnswers) {
  const uint32_t ones = 0xffffffffu;
  EXPECT_EQ(philox_words({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox_words({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      philox_words({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, CounterIsTheElementAndKeyTheSeed) {
  const RandomKey key{0x299f31d0a4093822u, 0x0370734413198a2eu};
  const uint64_t block = 0x85a308d3243f6a88u;
  EXPECT_EQ(philox(key, block).v[2], 0x5001e420u);
  EXPECT_EQ(random_word(key, 4), philox(key, 1).v[0]);
  EXPECT_EQ(random_word(key, 7), philox(key, 1).v[3]);
}

TEST(Random, UniformStaysInside) {
  EXPECT_EQ(uniform_open(0), 0x1p-24f);
  EXPECT_EQ(uniform_open(0xffffffffu), 1 - 0x1p-24f);  // 1 would make log(1 - u) infinite
  const Tensor x = Tensor::empty({100000}, DType::f64);
  fill_uniform(x, {1, 2}, -2, 6);
  double sum = 0, squares = 0;
  for (const double v : x.to_vector<double>()) {
    ASSERT_GT(v, -2);
    ASSERT_LT(v, 6);
    sum += v;
    squares += (v - 2) * (v - 2);
  }
  EXPECT_NEAR(sum / 1e5, 2, 0.03);              // standard error 0.0073
  EXPECT_NEAR(squares / 1e5, 64.0 / 12, 0.08);  // standard error 0.015
}

TEST(Random, NormalHasItsMoments) {
  const Tensor x = Tensor::empty({200000}, DType::f64);
  fill_normal(x, {3, 4}, 1, 2);
  double m1 = 0, m2 = 0, m4 = 0, lag = 0, before = 0;
  for (const double v : x.to_vector<double>()) {
    const double z = (v - 1) / 2;
    m1 += z, m2 += z * z, m4 += z * z * z * z, lag += z * before;
    before = z;
  }
  const double n = 200000;
  EXPECT_NEAR(m1 / n, 0, 0.01);
  EXPECT_NEAR(m2 / n, 1, 0.015);
  EXPECT_NEAR(m4 / n, 3, 0.12);
  EXPECT_NEAR(lag / n, 0, 0.01);
}

TEST(Random, ValuesDependOnKeyAndElementOnly) {
  const auto draw = [](RandomKey key, const Shape& shape, DType t = DType::f32) {
    const Tensor x = Tensor::empty(shape, t);
    fill_uniform(x, key);
    return x;
  };
  const Tensor x = draw({7, 8}, {3, 1000});
  EXPECT_TRUE(bitwise_equal(x, draw({7, 8}, {3000}).view({3, 1000})));
  EXPECT_FALSE(bitwise_equal(x, draw({7, 9}, {3, 1000})));
  EXPECT_FALSE(bitwise_equal(x, draw({8, 8}, {3, 1000})));
  // A longer draw starts with the same numbers.
  EXPECT_TRUE(bitwise_equal(x.view({3000}), draw({7, 8}, {5000}).slice(0, 0, 3000)));
  EXPECT_TRUE(bitwise_equal(x.to(DType::bf16), draw({7, 8}, {3, 1000}, DType::bf16)));
  const Tensor strided = Tensor::zeros({1000, 3}).transpose(0, 1);
  fill_uniform(strided, {7, 8});
  EXPECT_TRUE(bitwise_equal(x, strided.contiguous()));
}

TEST(Random, ThreadCountDoesNotMatter) {
  const auto draw = [](int threads) {
    omp_set_num_threads(threads);
    const Tensor x = Tensor::empty({200001});
    fill_normal(x, {5, 6});
    return x;
  };
  const int before = omp_get_max_threads();
  const Tensor one = draw(1), three = draw(3);
  omp_set_num_threads(before);
  EXPECT_TRUE(bitwise_equal(one, three));
}

TEST(Random, WordsAndErrors) {
  const Tensor x = Tensor::empty({6}, DType::i64);
  fill_words(x, {0, 0});
  EXPECT_EQ(x.select(0, 0).to_vector<int64_t>(), std::vector<int64_t>{0x6627e8d5});
  for (int64_t i = 0; i < 6; ++i)
    EXPECT_EQ(element<int64_t>(x, i), int64_t(random_word({0, 0}, uint64_t(i))));
  EXPECT_THROW(fill_words(Tensor::empty({1}), {0, 0}), Error);
  EXPECT_THROW(fill_uniform(x, {0, 0}), Error);
  EXPECT_THROW(fill_normal(x, {0, 0}), Error);
  EXPECT_THROW(fill_uniform(Tensor::empty({1, 2}).expand({2, 2}), {0, 0}), Error);
  const Tensor none = Tensor::empty({0});
  fill_normal(none, {0, 0});
}

TEST(Random, StateRewinds) {
  const RandomState before = random_state();
  const RandomKey a = next_random_key(), b = next_random_key();
  EXPECT_NE(a.purpose, b.purpose);
  random_state() = before;
  EXPECT_EQ(next_random_key().purpose, a.purpose);
  random_state() = before;
}

}  // namespace
}  // namespace ebb::testing
