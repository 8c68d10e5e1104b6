// The tensor handle: creation, access, versions, printing, bounds; element types.
#include "tensor/tensor.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "tensor/check.h"
#include "tests/layouts.h"

namespace ebb::testing {
namespace {

template <class F>
std::string message(F fn) {
  try {
    fn();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(Tensor, Creation) {
  EXPECT_EQ(Tensor::zeros({2, 2}, DType::i32).to_vector<int32_t>(), std::vector<int32_t>(4, 0));
  EXPECT_EQ(Tensor::full({3}, -2.5, DType::bf16).to_vector<float>(), std::vector<float>(3, -2.5f));
  EXPECT_EQ(Tensor::arange(4, DType::f64).to_vector<double>(), (std::vector<double>{0, 1, 2, 3}));
  EXPECT_EQ(Tensor::arange(0).numel(), 0);
  const Tensor t = Tensor::from(std::vector<float>{1, 2, 3, 4, 5, 6}, {2, 3});
  EXPECT_EQ(t.select(1, 2).to_vector<float>(), (std::vector<float>{3, 6}));
  EXPECT_EQ(t.nbytes(), 24);
  EXPECT_EQ(t.size(-1), 3);
  EXPECT_EQ(t.stride(0), 3);
  EXPECT_EQ(message([] { Tensor::from(std::vector<float>{1}, {2}); }),
            "tensor: 1 values for shape [2]");
  EXPECT_EQ(Tensor::empty_like(t).shape(), t.shape());
  EXPECT_EQ(Tensor::zeros_like(t.to(DType::u8)).dtype(), DType::u8);
}

TEST(Tensor, UndefinedOnesSaySo) {
  const Tensor none;
  EXPECT_FALSE(none.defined());
  EXPECT_FALSE(bool(none));
  EXPECT_EQ(none.version(), 0u);
  EXPECT_EQ(none.str(), "undefined");
  EXPECT_THROW(none.device(), Error);
  EXPECT_THROW(none.raw(), Error);
  EXPECT_THROW(none.fill_(1), Error);
  EXPECT_THROW(none.clone(), Error);
  EXPECT_THROW(none.item(), Error);
}

TEST(Tensor, AccessChecksTheType) {
  const OpScope op("demo");
  const Tensor t = Tensor::zeros({2}, DType::i32);
  EXPECT_EQ(message([&] { t.data<float>(); }), "demo: tensor [2] is i32, accessed as f32");
}

TEST(Tensor, Item) {
  for (const DType t : kAllTypes) EXPECT_EQ(Tensor::full({1, 1}, 3, t).item(), 3.0) << name(t);
  EXPECT_EQ(Tensor::arange(6).view({2, 3}).select(0, 1).select(0, 2).item(), 5.0);
  EXPECT_THROW(Tensor::zeros({2}).item(), Error);
  EXPECT_THROW(Tensor::zeros({0}).item(), Error);
}

TEST(Tensor, VersionsCountChangesOfTheStorage) {
  const Tensor x = Tensor::zeros({2, 3}), row = x.select(0, 1);
  EXPECT_EQ(x.version(), 0u);
  row.fill_(1);
  EXPECT_EQ(x.version(), 1u);
  x.zero_();
  x.copy_(Tensor::zeros({3}));
  EXPECT_EQ(row.version(), 3u);
  const Tensor other = x.clone();
  copy(x, other);
  EXPECT_EQ(row.version(), 4u);
  copy(other, x);
  EXPECT_EQ(row.version(), 4u);
  EXPECT_EQ(x.to(DType::f32).version(), 4u);  // itself
  EXPECT_TRUE(x.contiguous().same_storage(x));
  EXPECT_FALSE(x.transpose(0, 1).contiguous().same_storage(x));
}

TEST(Tensor, WrapChecksBounds) {
  const std::shared_ptr<Storage> s = Tensor::zeros({10}).storage();
  const auto wrap = [&](const Shape& shape, const Shape& strides, int64_t offset,
                        DType t = DType::f32) {
    return Tensor::wrap(s, t, shape, strides, offset);
  };
  EXPECT_EQ(wrap({10}, {1}, 0).numel(), 10);
  EXPECT_EQ(wrap({2, 3}, {4, 2}, 1).numel(), 6);  // last element: 1 + 4 + 4 = 9
  EXPECT_THROW(wrap({2, 3}, {4, 2}, 2), Error);   // 10
  EXPECT_THROW(wrap({10}, {1}, 1), Error);
  EXPECT_THROW(wrap({10}, {1}, 0, DType::f64), Error);
  EXPECT_EQ(wrap({5}, {1}, 0, DType::f64).numel(), 5);
  EXPECT_EQ(wrap({}, {}, 9).dim(), 0);
  EXPECT_THROW(wrap({}, {}, 10), Error);
  EXPECT_THROW(wrap({}, {}, -1), Error);
  EXPECT_THROW(wrap({2}, {-1}, 5), Error);
  EXPECT_THROW(wrap({-2}, {1}, 5), Error);
  EXPECT_THROW(wrap({2, 2}, {1}, 0), Error);
  EXPECT_EQ(wrap({0, 4}, {100, 100}, 10).numel(), 0);
  EXPECT_THROW(wrap({0, 4}, {100, 100}, 11), Error);
  EXPECT_THROW(wrap({3}, {INT64_MAX}, 0), Error);
  EXPECT_THROW(wrap({2, 2, 2}, {INT64_MAX, INT64_MAX, 1}, 0), Error);
  EXPECT_THROW(wrap({1}, {1}, INT64_MAX), Error);
  EXPECT_THROW(wrap({int64_t(1) << 40, int64_t(1) << 40}, {0, 0}, 0), Error);
  EXPECT_THROW(Tensor::wrap(nullptr, DType::f32, {1}, {1}, 0), Error);
}

TEST(Tensor, Printing) {
  EXPECT_EQ(Tensor::from(std::vector<float>{1, 2.5f, -3}, {3}).str(), "[1, 2.5, -3] [3] f32 cpu");
  EXPECT_EQ(Tensor::full({}, 0.1, DType::f64).str(), "0.1 [] f64 cpu");
  EXPECT_EQ(Tensor::zeros({0, 2}).str(), "[] [0,2] f32 cpu");
  EXPECT_EQ(Tensor::arange(100).str(4), "[0, 1, ..., 98, 99] [100] i64 cpu");
  EXPECT_EQ(Tensor::arange(4).view({2, 2}).transpose(0, 1).str(), "[[0, 2], [1, 3]] [2,2] i64 cpu");
  EXPECT_EQ(Tensor::from(std::vector<int64_t>{INT64_MAX, INT64_MIN}, {2}).str(),
            "[9223372036854775807, -9223372036854775808] [2] i64 cpu");
  EXPECT_EQ(Tensor::full({1}, NAN, DType::bf16).str(), "[nan] [1] bf16 cpu");
  EXPECT_EQ(Tensor::arange(12, DType::u8).view({3, 4}).str(2),
            "[[0, ..., 3], ..., [8, ..., 11]] [3,4] u8 cpu");
}

TEST(Tensor, EightDimensionsAtMost) {
  const Shape eight{1, 2, 1, 2, 1, 2, 1, 2};
  EXPECT_EQ(Tensor::zeros(eight).numel(), 16);
  EXPECT_THROW(Tensor::zeros(eight).unsqueeze(0), Error);
  EXPECT_THROW(Shape(std::vector<int64_t>(9, 1)), Error);
}

TEST(Device, Parse) {
  EXPECT_EQ(Device::parse("cpu"), Device::cpu());
  EXPECT_EQ(Device::parse("cuda"), Device::cuda(0));
  EXPECT_EQ(Device::parse("cuda:12"), Device::cuda(12));
  for (const char* bad : {"", "gpu", "cuda:", "cuda:-1", "cuda:1x", "CPU", "cuda:99999999999"})
    EXPECT_EQ(message([&] { Device::parse(bad); }),
              fmt::format("device '{}': want cpu, cuda or cuda:N", bad));
  EXPECT_EQ(Device::cuda(3).str(), "cuda:3");
}

TEST(Device, AbsentGpusAreRefusedWithTheReason) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_FALSE(cuda_unavailable_reason().empty());
  const std::string text = message([] { Tensor::zeros({1}, DType::f32, Device::cuda()); });
  EXPECT_NE(text.find(cuda_unavailable_reason()), std::string::npos) << text;
}

// bf16 against rounding by definition: the nearer neighbour, the even one of equally near ones.
float rounded_to_bf16(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  const float below = std::bit_cast<float>(u & 0xffff0000u);
  const uint32_t next = (u & 0xffff0000u) + 0x10000u;
  // The neighbour away from zero; past the largest finite value that is 2^128.
  const double above = (next & 0x7f800000u) == 0x7f800000u ? std::copysign(std::ldexp(1.0, 128), f)
                                                           : double(std::bit_cast<float>(next));
  const double to_below = std::abs(double(f) - double(below)), to_above = std::abs(above - f);
  const bool up = to_above < to_below || (to_above == to_below && (u >> 16 & 1u));
  return up ? std::bit_cast<float>(next) : below;
}

TEST(Bf16, RoundsToNearestEven) {
  std::mt19937_64 rng(5);
  for (int i = 0; i < 2000000; ++i) {
    uint32_t u = uint32_t(rng());
    if (i % 3 == 0) u = (u & 0xffff0000u) | 0x8000u;  // ties
    if (i % 7 == 0) u &= 0x807fffffu;                 // subnormals
    const float f = std::bit_cast<float>(u);
    if (!std::isfinite(f)) continue;
    const float got = float(bf16(f)), want = rounded_to_bf16(f);
    ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want)) << std::hex << u;
  }
}

TEST(Bf16, SpecialValues) {
  EXPECT_EQ(bf16(INFINITY).bits, 0x7f80);
  EXPECT_EQ(bf16(-INFINITY).bits, 0xff80);
  EXPECT_EQ(bf16(0.f).bits, 0);
  EXPECT_EQ(bf16(-0.f).bits, 0x8000);
  EXPECT_EQ(bf16(std::numeric_limits<float>::max()).bits, 0x7f80);  // rounds up to infinity
  EXPECT_EQ(bf16(1.f).bits, 0x3f80);
  EXPECT_EQ(bf16(1.00390625f).bits, 0x3f80);  // 1 + 2^-8, halfway: down to even
  EXPECT_EQ(bf16(1.01171875f).bits, 0x3f82);  // 1 + 3·2^-8, halfway: up to even
  EXPECT_EQ(bf16(9.2e-41f).bits, 1);          // the smallest subnormal is 2^-133
  for (const uint32_t nan : {0x7fc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu}) {
    const bf16 b(std::bit_cast<float>(nan));
    EXPECT_TRUE(std::isnan(float(b))) << std::hex << nan;
    EXPECT_EQ(b.bits >> 15, nan >> 31);
  }
  for (uint32_t bits = 0; bits < 65536; ++bits) {  // all values survive the round trip
    bf16 b;
    b.bits = uint16_t(bits);
    if (std::isnan(float(b))) continue;
    ASSERT_EQ(bf16(float(b)).bits, bits);
  }
}

}  // namespace
}  // namespace ebb::testing
