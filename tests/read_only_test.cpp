// What must not be written to is refused before the first byte: a write into a mapped file would
// end the process. And in-place changes are noticed, by whichever function they are made.
#include <gtest/gtest.h>

#include "autograd/parameter.h"
#include "autograd/tape.h"
#include "ops/adamw.h"
#include "ops/causal_conv1d.h"
#include "ops/delta_rule.h"
#include "ops/delta_rule_channel.h"
#include "ops/elementwise.h"
#include "ops/gemm.h"
#include "ops/matmul.h"
#include "ops/reduce.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/random.h"
#include "tensor/safetensors.h"
#include "tests/temporary_folder.h"

namespace ebb::testing {
namespace {

class ReadOnly : public ::testing::Test {
 protected:
  // A tensor in a mapped file.
  Tensor mapped(const Shape& shape, DType dtype = DType::f32) const {
    save_safetensors(folder_.file("x.safetensors"), {{"x", Tensor::full(shape, 0.5, dtype)}});
    return SafeTensors(folder_.file("x.safetensors")).get("x");
  }
  template <class F>
  static std::string message(F fn) {
    try {
      fn();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }
  TemporaryFolder folder_;
};

TEST_F(ReadOnly, OperatorsThatWriteInPlace) {
  const auto zeros = [](const Shape& s) { return Tensor::zeros(s); };
  const Tensor state = mapped({1, 1, 4, 2}), cache = mapped({1, 4, 3}), matrix = mapped({2, 2});
  const Tensor other = zeros({2, 2});
  const std::vector<std::function<void()>> writers = {
      [&] {
        gated_delta_rule_step(zeros({1, 1, 4}), zeros({1, 1, 4}), zeros({1, 1, 2}), zeros({1, 1}),
                              zeros({1, 1}), state);
      },
      [&] {
        kda_step(zeros({1, 1, 4}), zeros({1, 1, 4}), zeros({1, 1, 2}), zeros({1, 1, 4}),
                 zeros({1, 1}), state);
      },
      [&] {
        causal_conv1d_step(zeros({1, 4}), zeros({4, 3}), {}, cache, ConvActivation::silu);
      },
      [&] { matmul_into(other, other, matrix); },
      [&] { matmul_into(other, other, matrix.transpose(0, 1), Beta::one); },
      [&] {
        fill_normal(matrix, {1, 1});
      },
      [&] { matrix.copy_(other); },
      [&] { copy(matrix, other); },
      [&] { zero_all(TensorList({matrix})); },
      [&] { sum_of_squares(TensorList({other}), mapped({}, DType::f64)); },
      [&] {
        adamw_begin(mapped({int64_t(sizeof(AdamWScalars) / 8)}, DType::f64),
                    Tensor::zeros({}, DType::f64), {});
      },
  };
  for (size_t i = 0; i < writers.size(); ++i)
    EXPECT_NE(message(writers[i]).find("in-place change of read-only memory"), std::string::npos)
        << i << ": " << message(writers[i]);
  AdamWList list;
  list.set({{.master = matrix, .grad = other, .m = other.clone(), .v = other.clone()}});
  EXPECT_NE(message([&] { adamw(list, adamw_scalars({.lr = 1}, {}), {}); }).find("read-only"),
            std::string::npos);
}

TEST_F(ReadOnly, GradientsInAMappedFileAreAddedToInACopy) {
  const Tensor x = Tensor::full({3, 2}, 2);
  const Parameter w(Tensor::zeros({4, 2}));
  const Tensor stored = mapped({4, 2});
  for (const bool by_accumulator : {true, false}) {
    w.set_grad(stored);
    const Var y = by_accumulator ? linear(x, w.var()) : mul(sum(w.var(), 0), 6);
    backward(y, Tensor::full(y.shape(), 1));
    EXPECT_EQ(w.grad().to_vector<float>(), std::vector<float>(8, 6.5f));
    EXPECT_EQ(stored.to_vector<float>(), std::vector<float>(8, 0.5f));
  }
}

TEST(InPlace, GradientsOfAnotherShapeAreRefused) {
  const Parameter w(Tensor::zeros({4, 2}));
  EXPECT_THROW(w.set_grad(Tensor::zeros({4, 3})), Error);
  EXPECT_THROW(w.set_grad(Tensor::zeros({4, 2}, DType::i32)), Error);
  EXPECT_NO_THROW(w.set_grad({}));
  // Even when set behind everyone's back.
  w.slot()->grad = Tensor::zeros({2});
  EXPECT_THROW(backward(sum(w.var())), Error);
  w.slot()->grad = Tensor::zeros({2});
  const Var y = linear(Tensor::zeros({3, 2}), w.var());
  EXPECT_THROW(backward(y, Tensor::zeros({3, 4})), Error);
}

TEST(InPlace, StatesThatOverlapThemselvesAreRefused) {
  const Tensor one = Tensor::zeros({1, 4, 3}), x = Tensor::zeros({2, 4}), w = Tensor::zeros({4, 3});
  EXPECT_THROW(causal_conv1d_step(x, w, {}, one.expand({2, 4, 3}), ConvActivation::silu), Error);
  const Tensor a = Tensor::zeros({2, 2, 2});
  EXPECT_THROW(matmul_into(a, a, Tensor::zeros({1, 2, 2}).expand({2, 2, 2})), Error);
  EXPECT_THROW(matmul_into(a, a, Tensor::zeros({2, 2, 1}).expand({2, 2, 2})), Error);
}

TEST(InPlace, EveryWriterIsNoticed) {
  const auto state = [] { return Tensor::zeros({1, 1, 2, 2}); };
  const Tensor k = Tensor::zeros({1, 1, 2}), g = Tensor::zeros({1, 1});
  const std::vector<std::function<void(const Tensor&)>> writers = {
      [](const Tensor& t) { t.fill_(1); },
      [](const Tensor& t) { t.select(2, 1).copy_(Tensor::zeros({2})); },
      [](const Tensor& t) {
        copy(t, Tensor::zeros({1, 1, 2, 2}));
      },
      [](const Tensor& t) {
        fill_uniform(t, {1, 1});
      },
      [](const Tensor& t) {
        matmul_into(Tensor::zeros({2, 2}), Tensor::zeros({2, 2}), t.view({2, 2}));
      },
      [](const Tensor& t) { zero_all(TensorList({t})); },
      [&](const Tensor& t) { gated_delta_rule_step(k, k, k, g, g, t); },
      [](const Tensor& t) {
        causal_conv1d_step(Tensor::zeros({1, 2}), Tensor::zeros({2, 2}), {}, t.view({1, 2, 2}),
                           ConvActivation::silu);
      }};
  for (size_t i = 0; i < writers.size(); ++i) {
    const Tensor x = state();
    const Var v = Var::leaf(x), y = square(v);
    writers[i](x);
    try {
      backward(y, state());
      ADD_FAILURE() << "writer " << i << " was not noticed";
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()),
                "square: a tensor of shape [1,1,2,2] saved for backward was changed in place after "
                "the forward pass");
    }
  }
}

}  // namespace
}  // namespace ebb::testing
