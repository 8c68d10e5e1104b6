// Copies, fills, sums and random numbers on the GPU, against the CPU.
#include <thread>

#include "tensor/compare.h"
#include "tensor/device_flags.h"
#include "tensor/graph.h"
#include "tensor/random.h"
#include "tests/cuda_fixture.h"
#include "tests/layouts.h"

namespace ebb::testing {
namespace {

using TensorCuda = CudaTest;

// Same values (any NaN equals any NaN); wherever the tensors live.
::testing::AssertionResult same(const Tensor& got, const Tensor& want) {
  const Tensor a = got.cpu(), b = want.cpu();
  if (a.shape() != b.shape() || a.dtype() != b.dtype())
    return ::testing::AssertionFailure() << a.shape().str() << " for " << b.shape().str();
  return visit_any(a.dtype(), [&]<class T>() -> ::testing::AssertionResult {
    for (int64_t i = 0; i < a.numel(); ++i)
      if (!same_value(element<T>(a, i), element<T>(b, i)))
        return ::testing::AssertionFailure()
               << "element " << i << " of " << a.shape().str() << " " << name(a.dtype()) << " is "
               << double(element<T>(a, i)) << ", want " << double(element<T>(b, i));
    return ::testing::AssertionSuccess();
  });
}

// The same values on the GPU, behind strides of their own.
Tensor on_gpu(Layouts& random, const Tensor& host, Device gpu, bool expand = false) {
  const Tensor t = expand ? random.strided_or_expanded(host.shape(), host.dtype(), gpu)
                          : random.strided(host.shape(), host.dtype(), gpu);
  if (!expand) t.copy_(host);
  return t;
}

TEST_F(TensorCuda, EveryPairOfTypesStridesAndDevices) {
  Layouts random(41);
  for (const DType to : kAllTypes)
    for (const DType from : kAllTypes)
      for (int trial = 0; trial < 24; ++trial) {
        const Shape shape = random.shape(4, trial < 8 ? 3 : 40, trial == 0 ? 0 : 1);
        if (shape.numel() > 200000) continue;
        const Tensor host = random.strided(shape, from);
        random.fill(host);
        const Tensor want = host.to(to).contiguous();
        const Tensor device = on_gpu(random, host, gpu_);
        ASSERT_TRUE(same(device, host)) << "upload of " << name(from);
        const Tensor there = random.strided(shape, to, gpu_), here = random.strided(shape, to);
        copy(there, device);
        ASSERT_TRUE(same(there, want)) << name(from) << " to " << name(to) << " on the GPU";
        copy(here, device);
        ASSERT_TRUE(same(here, want)) << name(from) << " to " << name(to) << " to the host";
        there.zero_();
        copy(there, host);
        ASSERT_TRUE(same(there, want)) << name(from) << " to " << name(to) << " from the host";
      }
}

TEST_F(TensorCuda, ExpandedSources) {
  Layouts random(42);
  for (const DType t : kAllTypes)
    for (int trial = 0; trial < 20; ++trial) {
      const Shape shape = random.shape(4, 12);
      Shape small = shape;
      for (int64_t& n : small)
        if (random.coin()) n = 1;
      const Tensor host = Tensor::empty(small, t);
      random.fill(host);
      const Tensor source = on_gpu(random, host, gpu_).expand(shape);
      ASSERT_TRUE(same(source.clone(), host.expand(shape)));
      ASSERT_TRUE(same(source.to(DType::f32), host.expand(shape).to(DType::f32)));
    }
}

// Every path of the transpose: tile edges, packs that fit and that do not, batches in any place.
TEST_F(TensorCuda, Transposes) {
  Layouts random(43);
  const Shape shapes[] = {{64, 64},   {8, 8},      {7, 300},     {333, 517},   {1, 1000},
                          {130, 258}, {2, 96, 64}, {3, 65, 129}, {5, 9, 8, 40}};
  for (const Shape& shape : shapes)
    for (const DType t : kAllTypes) {
      const Tensor host = Tensor::empty(shape, t);
      random.fill(host);
      for (int a = 0; a < shape.size(); ++a)
        for (int b = a + 1; b < shape.size(); ++b) {
          const Tensor view = host.to(gpu_).transpose(a, b), want = host.transpose(a, b);
          ASSERT_TRUE(same(view.contiguous(), want)) << shape.str() << a << b;
          const DType other = t == DType::f32 ? DType::bf16 : DType::f32;
          ASSERT_TRUE(same(view.to(other), want.to(other))) << shape.str() << a << b;
          if (shape[0] < 3) continue;
          // Odd offsets and row lengths forbid packs.
          const Tensor cut = view.slice(0, 1, view.size(0)),
                       cut_want = want.slice(0, 1, view.size(0));
          ASSERT_TRUE(same(cut.clone(), cut_want)) << shape.str() << a << b;
          const Tensor into = Tensor::zeros(view.shape(), t, gpu_).slice(0, 1, view.size(0));
          into.copy_(cut);
          ASSERT_TRUE(same(into, cut_want)) << shape.str() << a << b;
        }
    }
}

TEST_F(TensorCuda, WritesNothingElse) {
  Layouts random(44);
  for (const DType t : {DType::u8, DType::bf16, DType::f32})
    for (int trial = 0; trial < 60; ++trial) {
      const Tensor here = random.strided(random.shape(3, 40), t);
      const int64_t cells = int64_t(here.storage()->bytes) / item_size(t);
      const Tensor all = Tensor::full({cells}, 77, t), all_gpu = all.to(gpu_);
      const auto view = [&](const Tensor& base) {
        return Tensor::wrap(base.storage(), t, here.shape(), here.strides(), here.offset());
      };
      const Tensor source = Tensor::empty(here.shape(), DType::f32);
      random.fill(source);
      view(all).copy_(source);
      view(all_gpu).copy_(source.to(gpu_));
      ASSERT_TRUE(same(all_gpu, all)) << here.shape().str() << here.strides().str();
      view(all).fill_(3);
      view(all_gpu).fill_(3);
      ASSERT_TRUE(same(all_gpu, all)) << here.shape().str() << here.strides().str();
    }
}

TEST_F(TensorCuda, Fill) {
  Layouts random(45);
  for (const DType t : kAllTypes)
    for (const double value : {0.0, -0.0, 1.0, -2.5, 300.0, 1e30, double(NAN)})
      for (int trial = 0; trial < 8; ++trial) {
        const Shape shape = random.shape(3, 50, 0);
        const Tensor host = Tensor::empty(shape, t), device = random.strided(shape, t, gpu_);
        host.fill_(value);
        device.fill_(value);
        ASSERT_TRUE(same(device, host)) << name(t) << " " << value;
      }
  const Tensor row = Tensor::zeros({1, 3}, DType::f32, gpu_);
  row.expand({5, 3}).fill_(2);
  EXPECT_EQ(row.to_vector<float>(), std::vector<float>(3, 2));
}

TEST_F(TensorCuda, SharedMemoryAndOverlap) {
  const Tensor x = Tensor::arange(9, DType::f32, gpu_).view({3, 3});
  x.copy_(x.transpose(0, 1));
  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{0, 3, 6, 1, 4, 7, 2, 5, 8}));
  const Tensor y = Tensor::arange(100000, DType::i32, gpu_);
  y.slice(0, 1, 100000).copy_(y.slice(0, 0, 99999));
  const std::vector<int32_t> got = y.to_vector<int32_t>();
  for (int i = 1; i < 100000; ++i) ASSERT_EQ(got[size_t(i)], i - 1);
  EXPECT_THROW(Tensor::zeros({1, 3}, DType::f32, gpu_).expand({2, 3}).copy_(x.slice(0, 0, 2)),
               Error);
}

TEST_F(TensorCuda, SumsIntoPlace) {
  Layouts random(46);
  for (const DType to : {DType::f32, DType::f64, DType::bf16})
    for (const DType from : {DType::f32, DType::f64, DType::bf16})
      for (int trial = 0; trial < 20; ++trial) {
        const Shape shape = random.shape(4, trial ? 20 : 0, trial ? 1 : 0);
        const Tensor a = Tensor::empty(shape, to), b = random.strided_or_expanded(shape, from);
        random.fill(a);
        random.fill(b);
        const Tensor got = a.to(gpu_), term = random.strided(shape, from, gpu_);
        term.copy_(b);
        if constexpr (kWithCuda) gpu::add_into(got, term);
        visit_float(to, [&]<class D>() {
          visit_float(from, [&]<class S>() {
            for (int64_t i = 0; i < a.numel(); ++i) {
              D& d = element<D>(a, i);
              d = D(acc_t<D>(d) + acc_t<D>(element<S>(b, i)));
            }
          });
        });
        ASSERT_TRUE(same(got, a)) << name(to) << " += " << name(from);
      }
  const Tensor sum = Tensor::full({3, 4}, 1, DType::f32, gpu_);
  if constexpr (kWithCuda)
    gpu::add_into(sum, Tensor::full({1, 1}, 2, DType::f32, gpu_).expand({3, 4}));
  EXPECT_EQ(sum.to_vector<float>(), std::vector<float>(12, 3));
}

TEST_F(TensorCuda, RandomNumbersAreTheCpus) {
  for (const int64_t n : {0, 1, 3, 4, 5, 1000003})
    for (const DType t : {DType::f32, DType::f64, DType::bf16}) {
      const RandomKey key{uint64_t(n) * 77 + 5, 0x123456789abcdefu};
      const Tensor here = Tensor::empty({n}, t), there = Tensor::empty({n}, t, gpu_);
      fill_uniform(here, key, -0.3, 1.7);
      fill_uniform(there, key, -0.3, 1.7);
      ASSERT_TRUE(bitwise_equal(here, there)) << n << name(t);
      fill_normal(here, key, 0.5, 3);
      fill_normal(there, key, 0.5, 3);
      ASSERT_LE(relative_error(there, here), t == DType::f64 ? 1e-14 : 1e-6) << n << name(t);
    }
  const Tensor here = Tensor::empty({100001}, DType::i64), there = here.to(gpu_);
  fill_words(here, {9, 10});
  fill_words(there, {9, 10});
  EXPECT_TRUE(bitwise_equal(here, there));
  const Tensor strided = Tensor::zeros({50, 7}, DType::f32, gpu_).transpose(0, 1);
  const Tensor dense = Tensor::empty({7, 50});
  fill_uniform(strided, {1, 1});
  fill_uniform(dense, {1, 1});
  EXPECT_TRUE(same(strided, dense));
}

TEST_F(TensorCuda, HostValues) {
  const Tensor x = Tensor::arange(6, DType::i64, gpu_).view({2, 3});
  EXPECT_EQ(x.select(0, 1).select(0, 2).item(), 5);
  EXPECT_EQ(x.transpose(0, 1).to_vector<float>(), (std::vector<float>{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(x.str(), "[[0, 1, 2], [3, 4, 5]] [2,3] i64 cuda:0");
  EXPECT_EQ(Tensor::zeros({0, 2}, DType::f32, gpu_).to_vector<float>().size(), 0u);
  EXPECT_EQ(Tensor::full({}, 2, DType::bf16, gpu_).item(), 2);
}

TEST_F(TensorCuda, Flags) {
  EXPECT_EQ(read_and_clear_device_flags(gpu_), 0u);
  const int32_t one = 1;
  copy_bytes(device_flags(gpu_) + int(DeviceFlag::gather_index), gpu_, &one, Device::cpu(), 4);
  EXPECT_EQ(error_message([&] { check_device_flags(gpu_); }), describe(DeviceFlag::gather_index));
  EXPECT_NO_THROW(check_device_flags(gpu_));
}

TEST_F(TensorCuda, WorksInsideAGraph) {
  const Tensor x = Tensor::empty({300, 70}, DType::f32, gpu_);
  Tensor transposed, sum, random;
  const auto work = [&] {
    transposed = x.transpose(0, 1).to(DType::bf16);
    sum = Tensor::zeros({300, 70}, DType::f32, gpu_);
    sum.copy_(x.select(0, 1));
    random = Tensor::empty({1000}, DType::f32, gpu_);
    fill_uniform(random, {1, 2});
  };
  GraphCapture graph(gpu_);
  work();
  graph.capture(work);
  const Tensor drawn = Tensor::empty({1000});
  fill_uniform(drawn, {1, 2});
  for (uint64_t seed = 0; seed < 3; ++seed) {
    const Tensor host = Tensor::empty({300, 70});
    fill_normal(host, {seed, 0});
    x.copy_(host);
    graph.replay();
    ASSERT_TRUE(same(transposed, host.transpose(0, 1).to(DType::bf16)));
    ASSERT_TRUE(same(sum, host.select(0, 1).expand({300, 70})));
    ASSERT_TRUE(same(random, drawn));
  }
  transposed = sum = random = Tensor();
}

constexpr int64_t kBeyond32 = (int64_t(1) << 31) + 11;

TEST_F(TensorCuda, StridedCopyBeyond2To31Elements) {
  const int64_t n = (int64_t(1) << 30) + 7;  // 3n elements
  if (!has_memory(6 * n)) GTEST_SKIP() << "needs " << 6 * n << " bytes";
  const Tensor rows = Tensor::empty({3, n}, DType::u8, gpu_);
  for (int64_t r = 0; r < 3; ++r) rows.select(0, r).fill_(double(r + 1));
  rows.slice(1, n - 1, n).fill_(9);
  const Tensor columns = rows.transpose(0, 1).contiguous();  // [n,3]
  for (const int64_t at : {int64_t(0), n / 3, 2 * n / 3, (int64_t(1) << 31) / 3, n - 3})
    EXPECT_EQ(columns.slice(0, at, at + 2).to_vector<uint8_t>(),
              (std::vector<uint8_t>{1, 2, 3, 1, 2, 3}))
        << at;
  EXPECT_EQ(columns.select(0, n - 1).to_vector<uint8_t>(), (std::vector<uint8_t>{9, 9, 9}));
}

TEST_F(TensorCuda, ConversionBeyond2To31Elements) {
  if (!has_memory(6 * kBeyond32)) GTEST_SKIP() << "needs " << 6 * kBeyond32 << " bytes";
  const Tensor x = Tensor::full({kBeyond32}, 1.5, DType::f32, gpu_);
  const int64_t half = int64_t(1) << 31;
  x.slice(0, half, kBeyond32).fill_(-2.5);
  const Tensor y = x.to(DType::bf16);
  EXPECT_EQ(y.slice(0, half - 2, half + 2).to_vector<float>(),
            (std::vector<float>{1.5, 1.5, -2.5, -2.5}));
  EXPECT_EQ(y.slice(0, 0, 3).to_vector<float>(), std::vector<float>(3, 1.5));
  EXPECT_EQ(y.slice(0, kBeyond32 - 9, kBeyond32).to_vector<float>(), std::vector<float>(9, -2.5));
}

TEST_F(TensorCuda, TransposeBeyond2To31Elements) {
  const int64_t nx = 65541, ny = 32802;
  if (!has_memory(4 * nx * ny)) GTEST_SKIP() << "needs " << 4 * nx * ny << " bytes";
  const Tensor x = Tensor::full({ny, nx}, 1, DType::bf16, gpu_);
  for (const int64_t row : {int64_t(0), ny / 2, ny - 2, ny - 1})
    x.select(0, row).copy_(Tensor::arange(nx, DType::f32, gpu_));
  const Tensor y = x.transpose(0, 1).contiguous();
  const Tensor want = Tensor::arange(nx, DType::f32).to(DType::bf16);
  for (const int64_t row : {int64_t(0), ny / 2, ny - 2, ny - 1})
    EXPECT_TRUE(same(y.select(1, row), want)) << row;
  EXPECT_TRUE(same(y.select(1, 17), Tensor::full({nx}, 1, DType::bf16)));
}

TEST_F(TensorCuda, StridedFillBeyond2To31Elements) {
  if (!has_memory(2 * kBeyond32)) GTEST_SKIP() << "needs " << 2 * kBeyond32 << " bytes";
  const Tensor x = Tensor::zeros({kBeyond32, 2}, DType::u8, gpu_);
  x.select(1, 1).fill_(5);
  for (const int64_t at : {int64_t(0), int64_t(1) << 30, (int64_t(1) << 31) - 1, kBeyond32 - 2})
    EXPECT_EQ(x.slice(0, at, at + 2).to_vector<uint8_t>(), (std::vector<uint8_t>{0, 5, 0, 5}));
}

TEST_F(TensorCuda, RandomBeyond2To31Elements) {
  if (!has_memory(8 * kBeyond32)) GTEST_SKIP() << "needs " << 8 * kBeyond32 << " bytes";
  const RandomKey key{3, 4};
  const Tensor x = Tensor::empty({kBeyond32}, DType::i64, gpu_);
  fill_words(x, key);
  for (const int64_t at : {int64_t(0), (int64_t(1) << 31) - 2, kBeyond32 - 4}) {
    const std::vector<int64_t> got = x.slice(0, at, at + 4).to_vector<int64_t>();
    for (int64_t i = 0; i < 4; ++i)
      EXPECT_EQ(got[size_t(i)], int64_t(random_word(key, uint64_t(at + i)))) << at + i;
  }
}

TEST_F(TensorCuda, SeveralGpus) {
  if (cuda_device_count() < 2) GTEST_SKIP() << "one GPU";
  Layouts random(47);
  const Device other = Device::cuda(1);
  for (int trial = 0; trial < 50; ++trial) {
    const Tensor host = random.strided(random.shape(3, 30), DType::f32);
    random.fill(host);
    const Tensor first = on_gpu(random, host, gpu_), second = on_gpu(random, host, other);
    ASSERT_TRUE(same(second, host));
    ASSERT_TRUE(same(first.to(other), host));
    ASSERT_TRUE(same(second.to(DType::bf16, gpu_), host.to(DType::bf16)));
    const Tensor back = random.strided(host.shape(), DType::f32, gpu_);
    copy(back, second);
    ASSERT_TRUE(same(back, host));
  }
  EXPECT_EQ(error_message([&] {
              Tensor::zeros({1}, DType::f32, Device::cuda(63));
            }).rfind("cuda:63: there are ", 0),
            0u);
}

}  // namespace
}  // namespace ebb::testing
