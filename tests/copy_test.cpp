// Copies and fills on the CPU: every pair of dtypes, any strides, shared memory.
#include <gtest/gtest.h>

#include "tensor/check.h"
#include "tests/layouts.h"

namespace ebb::testing {
namespace {

// Conversion by definition, in long double (exact for every source value).
template <class D, class S>
D converted(S v) {
  if constexpr (std::is_same_v<S, bf16>)
    return converted<D>(float(v));
  else if constexpr (std::is_same_v<D, S>)
    return v;
  else if constexpr (std::is_integral_v<D> && std::is_floating_point_v<S>) {
    if (std::isnan(v)) return 0;
    const long double whole = std::trunc(static_cast<long double>(v));
    const auto low = static_cast<long double>(std::numeric_limits<D>::min());
    const auto high = static_cast<long double>(std::numeric_limits<D>::max());
    return D(std::min(std::max(whole, low), high));
  } else if constexpr (std::is_same_v<D, bf16>)
    return bf16(float(v));
  else
    return static_cast<D>(v);
}

template <class D, class S>
void expect_copied(const Tensor& dst, const Tensor& src) {
  for (int64_t i = 0; i < dst.numel(); ++i) {
    const D want = converted<D, S>(element<S>(src, i));
    ASSERT_TRUE(same_value(element<D>(dst, i), want))
        << name(src.dtype()) << " to " << name(dst.dtype()) << " at " << i << " of "
        << dst.shape().str() << ": " << double(element<S>(src, i)) << " became "
        << double(element<D>(dst, i)) << ", want " << double(want);
  }
}

void check_copy(const Tensor& dst, const Tensor& src) {
  copy(dst, src);
  visit_any(dst.dtype(), [&]<class D>() {
    visit_any(src.dtype(), [&]<class S>() { expect_copied<D, S>(dst, src); });
  });
}

TEST(Copy, EveryPairOfTypesAndStrides) {
  Layouts random(21);
  for (const DType to : kAllTypes)
    for (const DType from : kAllTypes)
      for (int trial = 0; trial < 30; ++trial) {
        const Shape shape = random.shape(4, trial < 10 ? 3 : 9, trial == 0 ? 0 : 1);
        const Tensor src = random.strided_or_expanded(shape, from);
        random.fill(src);
        check_copy(random.strided(shape, to), src);
        if (::testing::Test::HasFatalFailure()) return;
      }
}

// Sizes that reach the parallel and tiled paths.
TEST(Copy, LargeOnes) {
  Layouts random(22);
  const auto layouts = [&](const Shape& s, DType t) {
    Shape swapped = s;
    std::swap(swapped[0], swapped[s.size() - 1]);
    return std::vector<Tensor>{Tensor::zeros(s, t),
                               Tensor::zeros(swapped, t).transpose(0, s.size() - 1)};
  };
  for (const Shape& shape : {Shape{100003}, Shape{333, 517}, Shape{3, 70, 1000}, Shape{9, 8200, 2},
                             Shape{40, 3, 8, 129}})
    for (const auto& [to, from] :
         {std::pair{DType::f32, DType::f32}, std::pair{DType::bf16, DType::f32},
          std::pair{DType::i64, DType::u8}})
      for (const Tensor& src : layouts(shape, from)) {
        random.fill(src);
        for (const Tensor& dst : layouts(shape, to)) {
          check_copy(dst, src);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
}

TEST(Copy, WritesNothingElse) {
  Layouts random(23);
  for (int trial = 0; trial < 200; ++trial) {
    const Shape shape = random.shape(3, 6);
    const Tensor dst = random.strided(shape, DType::i32), src = random.strided(shape, DType::f32);
    const int64_t cells = int64_t(dst.storage()->bytes) / 4;
    auto* raw = static_cast<int32_t*>(dst.storage()->data);
    std::fill(raw, raw + cells, 77);
    random.fill(src);
    copy(dst, src);
    std::vector<int32_t> want(size_t(cells), 77);
    for (int64_t i = 0; i < dst.numel(); ++i)
      want[size_t(&element<int32_t>(dst, i) - raw)] = element<int32_t>(dst, i);
    ASSERT_EQ(std::vector<int32_t>(raw, raw + cells), want);
  }
}

TEST(Copy, SharedMemoryReadsTheOldValues) {
  Layouts random(24);
  for (int trial = 0; trial < 300; ++trial) {
    const Tensor x = Tensor::arange(60, DType::i32).view({6, 10});
    const int64_t rows = random.integer(1, 4), columns = random.integer(1, 6);
    const auto window = [&] {
      const int64_t r = random.integer(0, 6 - rows), c = random.integer(0, 10 - columns);
      return x.slice(0, r, r + rows).slice(1, c, c + columns);
    };
    const Tensor dst = window(), src = window();
    const std::vector<int32_t> want = src.to_vector<int32_t>();
    copy(dst, src);
    ASSERT_EQ(dst.to_vector<int32_t>(), want);
  }
  const Tensor square = Tensor::arange(9).view({3, 3});
  square.copy_(square.transpose(0, 1));
  EXPECT_EQ(square.to_vector<int64_t>(), (std::vector<int64_t>{0, 3, 6, 1, 4, 7, 2, 5, 8}));
}

TEST(Copy, BroadcastsIntoPlace) {
  const Tensor x = Tensor::zeros({2, 3});
  x.copy_(Tensor::arange(3, DType::i64));
  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{0, 1, 2, 0, 1, 2}));
  EXPECT_THROW(x.copy_(Tensor::zeros({2})), Error);
  EXPECT_THROW(copy(x, Tensor::zeros({3})), Error);
  EXPECT_THROW(copy(x, Tensor()), Error);
}

TEST(Copy, OverlappingDestinationsAreRefused) {
  const Tensor row = Tensor::zeros({1, 3});
  EXPECT_THROW(row.expand({2, 3}).copy_(Tensor::zeros({2, 3})), Error);
  EXPECT_NO_THROW(row.expand({1, 3}).copy_(Tensor::zeros({1, 3})));
  const Tensor window = Tensor::wrap(row.storage(), DType::f32, {2, 2}, {1, 1}, 0);
  EXPECT_THROW(window.copy_(Tensor::zeros({2, 2})), Error);
  // One value for all is not ambiguous.
  row.expand({2, 3}).fill_(4);
  window.fill_(5);
  EXPECT_EQ(row.to_vector<float>(), (std::vector<float>{5, 5, 5}));
}

TEST(Fill, EveryTypeAndStride) {
  Layouts random(25);
  for (const DType t : kAllTypes)
    for (const double value : {0.0, -0.0, 1.0, -2.5, 300.0, 1e30, double(NAN)})
      for (int trial = 0; trial < 10; ++trial) {
        const Tensor x = random.strided(random.shape(3, 5, 0), t);
        x.fill_(value);
        visit_any(t, [&]<class T>() {
          const T want = converted<T>(value);
          for (int64_t i = 0; i < x.numel(); ++i)
            ASSERT_TRUE(same_value(element<T>(x, i), want)) << name(t) << " " << value;
        });
        if (::testing::Test::HasFatalFailure()) return;
      }
  EXPECT_EQ(Tensor::full({200000}, 3, DType::bf16).to_vector<float>(),
            std::vector<float>(200000, 3));
}

}  // namespace
}  // namespace ebb::testing
