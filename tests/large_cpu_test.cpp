// Tensors of more than 2^31 elements on the CPU: one byte each, and mostly never touched.
#include <gtest/gtest.h>

#include "ops/indexing.h"
#include "ops/movement.h"
#include "tensor/check.h"

namespace ebb::testing {
namespace {

constexpr int64_t kFar = int64_t(1) << 31;

class LargeCpu : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      big_ = Tensor::empty({kFar + 16}, DType::u8);  // pages come with the first write
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
  }
  static std::vector<int64_t> values(const Tensor& t) { return t.to_vector<int64_t>(); }
  Tensor big_;
};

TEST_F(LargeCpu, ViewsAndCopies) {
  const Tensor tail = big_.slice(0, kFar + 8, kFar + 16);
  tail.copy_(Tensor::arange(8, DType::i32));
  EXPECT_EQ(values(tail), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(big_.select(0, kFar + 15).item(), 7);
  EXPECT_EQ(static_cast<const uint8_t*>(big_.raw())[kFar + 13], 5);
  tail.slice(0, 2, 8, 2).fill_(9);
  EXPECT_EQ(tail.to(DType::f32).to_vector<float>(), (std::vector<float>{0, 1, 9, 3, 9, 5, 9, 7}));
  // As [2, 2^30+8]: the second row begins at 2^30+8, steps of whole rows lie far apart.
  const Tensor rows = big_.view({2, kFar / 2 + 8});
  rows.slice(1, kFar / 2 + 6, kFar / 2 + 8).copy_(Tensor::arange(4, DType::u8).view({2, 2}));
  EXPECT_EQ(values(big_.slice(0, kFar + 14, kFar + 16)), (std::vector<int64_t>{2, 3}));
  const Tensor columns = rows.transpose(0, 1).slice(0, kFar / 2 + 7, kFar / 2 + 8);
  EXPECT_EQ(values(columns.contiguous()), (std::vector<int64_t>{1, 3}));
  big_.slice(0, 15, 16).fill_(6);
  EXPECT_EQ(values(big_.slice(0, 15, kFar + 16, kFar)), (std::vector<int64_t>{6, 3}));
}

TEST_F(LargeCpu, Indices) {
  big_.slice(0, kFar, kFar + 16).copy_(Tensor::arange(16, DType::u8));
  big_.slice(0, 0, 2).fill_(77);
  const Tensor ids = Tensor::from(std::vector<int64_t>{kFar + 15, 1, kFar}, {3});
  EXPECT_EQ(values(index_select(big_, 0, ids).value()), (std::vector<int64_t>{15, 77, 0}));
  EXPECT_EQ(values(gather(big_, 0, ids).value()), (std::vector<int64_t>{15, 77, 0}));
  EXPECT_THROW(index_select(big_, 0, Tensor::full({1}, double(kFar + 16), DType::i64)), Error);
}

TEST_F(LargeCpu, Results) {
  const Tensor head = Tensor::full({1}, 5, DType::u8).expand({kFar});
  const Tensor y = concat({head, Tensor::arange(8, DType::u8)}, 0).value();
  ASSERT_EQ(y.numel(), kFar + 8);
  EXPECT_EQ(values(y.slice(0, kFar - 2, kFar + 8)),
            (std::vector<int64_t>{5, 5, 0, 1, 2, 3, 4, 5, 6, 7}));
}

// Broadcasts hold nothing, whatever their size; what would hold too much is refused.
TEST(LargeExpanded, PrintingSlicingAndRefusal) {
  const int64_t huge = int64_t(1) << 50;
  const Tensor t = Tensor::full({1}, 3, DType::u8).expand({huge, 2});
  EXPECT_EQ(t.str(2), "[[3, 3], ..., [3, 3]] [1125899906842624,2] u8 cpu");
  EXPECT_EQ(t.slice(0, huge - 3, huge).to_vector<int64_t>(), (std::vector<int64_t>(6, 3)));
  EXPECT_EQ(t.select(0, huge - 1).select(0, 1).item(), 3);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // those stop the process
  try {
    t.contiguous();
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("out of memory on cpu: asked for 2251799813685248 bytes"),
              std::string::npos)
        << e.what();
  }
#endif
}

}  // namespace
}  // namespace ebb::testing
