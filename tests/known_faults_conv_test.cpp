// Faults other implementations of convolution, gates and token shift were reported to have, on
// every device there is.
#include <gtest/gtest.h>
#include <omp.h>

#include "autograd/tape.h"
#include "ops/causal_conv1d.h"
#include "ops/decay_gate.h"
#include "ops/sigmoid_gate.h"
#include "ops/swiglu.h"
#include "ops/token_shift.h"
#include "tensor/random.h"
#include "tests/op_harness.h"
#include "tests/reference/conv.h"

namespace ebb::testing {
namespace {

class KnownFaultsConv : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (GetParam().is_cuda() && cuda_device_count() == 0)
      GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  Tensor normal(const Shape& shape, uint64_t seed, double scale = 1) const {
    Tensor t = Tensor::empty(shape, DType::f32);
    fill_normal(t, {seed, 0}, 0, scale);
    return t.to(GetParam());
  }
  SeqLayout packed(const std::vector<int64_t>& cu) const {
    return SeqLayout::packed(cu, GetParam());
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, KnownFaultsConv, ::testing::Values(Device::cpu(), Device::cuda()),
                         [](const auto& info) { return info.param.is_cuda() ? "cuda" : "cpu"; });

Tensor forward(const Tensor& x, const Tensor& w, const SeqLayout& layout = {},
               const Tensor& bias = {}) {
  return causal_conv1d(x, w, bias, {}, {.layout = layout}).y.value();
}

struct ConvRun {
  Tensor y, dx, dw, dbias;
};
ConvRun train(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& dy,
              const SeqLayout& layout = {}) {
  const Var vx = Var::leaf(x), vw = Var::leaf(w), vb = Var::leaf(bias);
  const Var y = causal_conv1d(vx, vw, vb, {}, {.layout = layout}).y;
  backward(y, dy);
  return {y.value(), vx.grad(), vw.grad(), vb.grad()};
}

// B14: sequence borders hold in both directions.
TEST_P(KnownFaultsConv, B14_TokensDoNotSeeTheSequenceBefore) {
  const Tensor w = normal({8, 4}, 1), bias = normal({8}, 2), dy = normal({1, 8, 8}, 3);
  const Tensor x = normal({1, 8, 8}, 4), other = x.clone();
  other.slice(1, 0, 3).copy_(normal({1, 3, 8}, 5));
  const SeqLayout layout = packed({0, 3, 8});
  const ConvRun a = train(x, w, bias, dy, layout), b = train(other, w, bias, dy, layout);
  EXPECT_TRUE(bitwise_equal(a.y.slice(1, 3, 8), b.y.slice(1, 3, 8)));
  EXPECT_TRUE(bitwise_equal(a.dx.slice(1, 3, 8), b.dx.slice(1, 3, 8)));
  const auto shift = [&](const Tensor& t) {
    return token_shift(t, {}, {.layout = layout}).delta.value().slice(1, 3, 8);
  };
  EXPECT_TRUE(bitwise_equal(shift(x), shift(other)));
  // The first token of a sequence follows zeros.
  EXPECT_EQ((shift(x).select(1, 0).to_vector<float>()[0]), -x.to_vector<float>()[3 * 8]);
}

// B16: packed sequences in several rows of a batch, against the same tokens in one row.
TEST_P(KnownFaultsConv, B16_WeightGradientsOfPackedRows) {
  const Tensor x = normal({2, 1024, 768}, 1), w = normal({768, 4}, 2, 0.5), bias = normal({768}, 3);
  const Tensor dy = normal({2, 1024, 768}, 4);
  const ConvRun rows = train(x, w, bias, dy, packed({0, 1024, 2048}));
  const ConvRun flat =
      train(x.view({1, 2048, 768}), w, bias, dy.view({1, 2048, 768}), packed({0, 1024, 2048}));
  const ConvRun dense = train(x, w, bias, dy);
  for (const ConvRun& other : {flat, dense}) {
    EXPECT_TRUE(bitwise_equal(rows.dw, other.dw));
    EXPECT_TRUE(bitwise_equal(rows.dbias, other.dbias));
    EXPECT_TRUE(bitwise_equal(rows.dx, other.dx.view({2, 1024, 768})));
  }
  // And not by being equally wrong.
  const auto exact = [](const Tensor& t) { return t.cpu().to(DType::f64); };
  const ConvRun f64 = train(exact(x), exact(w), exact(bias), exact(dy));
  EXPECT_LE(relative_error(rows.dw.cpu(), f64.dw), 2e-6);
  EXPECT_LE(relative_error(rows.dbias.cpu(), f64.dbias), 2e-6);
}

// B22: prompts shorter than the window, then decoding; axes of size 1 with odd strides.
TEST_P(KnownFaultsConv, B22_ShortPromptsThenDecoding) {
  const Tensor w = normal({6, 4}, 1), bias = normal({6}, 2), x = normal({2, 8, 6}, 3);
  const Tensor whole = forward(x, w, {}, bias);
  for (const int64_t prompt : {1, 2, 3}) {
    const CausalConv1d r = causal_conv1d(x.slice(1, 0, prompt), w, bias, {}, {.final_state = true});
    const Tensor state = r.final_state.value();
    EXPECT_TRUE(bitwise_equal(state.slice(2, 0, 4 - prompt),
                              Tensor::zeros({2, 6, 4 - prompt}, DType::f32, GetParam())));
    for (int64_t t = prompt; t < prompt + 5; ++t) {
      const Tensor y = causal_conv1d_step(x.select(1, t), w, bias, state, ConvActivation::silu);
      EXPECT_LE(relative_error(y.cpu(), whole.select(1, t).cpu()), 1e-6) << prompt << " " << t;
    }
  }
  const Tensor one = Tensor::wrap(x.storage(), x.dtype(), {1, 1, 6}, {12345, 777, 1}, 0);
  EXPECT_LE(
      relative_error(forward(one, w, {}, bias).cpu(), whole.slice(0, 0, 1).slice(1, 0, 1).cpu()),
      1e-6);
}

// B26: a reused slot must not leak the request before it; step after prefill equals the whole.
TEST_P(KnownFaultsConv, B26_SecondPromptInTheSameSlot) {
  const Tensor w = normal({6, 4}, 1), a = normal({1, 5, 6}, 2), b = normal({1, 7, 6}, 3);
  const Tensor pool = Tensor::full({3, 10, 6, 4}, NAN, DType::f32, GetParam());
  const Tensor slots = pool.select(1, 4);  // rows 10·6·4 apart
  const auto prefill = [&](const Tensor& prompt) {
    const CausalConv1d r = causal_conv1d(prompt.slice(1, 0, 3), w, {}, {}, {.final_state = true});
    slots.slice(0, 1, 2).copy_(r.final_state.value());
    return r.y.value();
  };
  prefill(a);
  for (const Tensor& prompt : {a, b, a}) {
    const Tensor whole = forward(prompt, w);
    EXPECT_TRUE(bitwise_equal(prefill(prompt), whole.slice(1, 0, 3).contiguous()));
    for (int64_t t = 3; t < 5; ++t) {
      const Tensor y = causal_conv1d_step(prompt.select(1, t), w, {}, slots.slice(0, 1, 2),
                                          ConvActivation::silu);
      EXPECT_LE(relative_error(y.cpu(), whole.select(1, t).cpu()), 1e-6);
    }
  }
  EXPECT_TRUE(std::isnan(slots.select(0, 0).cpu().slice(0, 0, 1).slice(1, 0, 1).item()));
}

// B28: padding on the left, cut off as a sequence of its own, whatever the batch size.
TEST_P(KnownFaultsConv, B28_LeftPaddingDoesNotLeak) {
  const Tensor w = normal({6, 4}, 1), bias = normal({6}, 2), tokens = normal({1, 7, 6}, 3);
  const Tensor want = forward(tokens, w, {}, bias);
  for (const int64_t batch : {1, 3}) {
    const Tensor x = normal({batch, 12, 6}, 4, 100);
    std::vector<int64_t> cu{0};
    for (int64_t b = 0; b < batch; ++b) {
      x.slice(0, b, b + 1).slice(1, 5, 12).copy_(tokens);
      cu.push_back(12 * b + 5);
      cu.push_back(12 * b + 12);
    }
    const Tensor y = forward(x, w, packed(cu), bias);
    for (int64_t b = 0; b < batch; ++b)
      EXPECT_TRUE(
          bitwise_equal(y.slice(0, b, b + 1).slice(1, 5, 12).contiguous(), want.contiguous()));
  }
}

// B36: a log decay is never positive, however extreme its inputs.
TEST_P(KnownFaultsConv, B36_DecaysAreNeverPositive) {
  const Tensor a = normal({1, 200, 4}, 1, 60), A = normal({4}, 2, 4), bias = normal({4}, 3, 10);
  for (const double bound : {0.0, -5.0})
    for (const float g :
         decay_gate(a, A, bias, {.lower_bound = bound}).value().to_vector<float>()) {
      EXPECT_LE(g, 0);
      EXPECT_FALSE(std::isnan(g));
      if (bound < 0) {
        EXPECT_GE(g, bound);
      }
    }
}

// B38: upstream gradients that are views.
TEST_P(KnownFaultsConv, B38_UpstreamGradientsOfAnyStrides) {
  const int64_t B = 2, T = 37, D = 24;
  const Tensor x = normal({B, T, D}, 1), w = normal({D, 4}, 2), mu = normal({3, D}, 3);
  const Tensor A = normal({D}, 4), bias = normal({D}, 5);
  const std::vector<std::function<Var(const Var&)>> ops = {
      [&](const Var& v) { return causal_conv1d(v, w, bias).y; },
      [&](const Var& v) {
        return swiglu(v, normal({B, T, D}, 6));
      },
      [&](const Var& v) { return token_shift(v).delta; },
      [&](const Var& v) { return token_shift_mix(v, mu).out[1]; },
      [&](const Var& v) { return decay_gate(v, A, bias); },
      [&](const Var& v) { return sigmoid_gate(v); }};
  const std::vector<Tensor> upstream = {
      normal({T, D, B}, 7).permute({2, 0, 1}),     normal({D, T, B}, 8).transpose(0, 2),
      normal({B, T, 5 * D}, 9).slice(2, D, 2 * D), normal({B, T, D + 3}, 9).slice(2, 3, D + 3),
      normal({1}, 10).expand({B, T, D}),           normal({D}, 11).expand({B, T, D})};
  for (size_t i = 0; i < ops.size(); ++i)
    for (size_t j = 0; j < upstream.size(); ++j) {
      std::vector<Tensor> dx;
      for (const Tensor& dy : {upstream[j], upstream[j].contiguous()}) {
        const Var v = Var::leaf(x);
        backward(ops[i](v), dy);
        dx.push_back(v.grad());
      }
      EXPECT_TRUE(bitwise_equal(dx[0], dx[1])) << "op " << i << " upstream " << j;
    }
}

// B44: gate parameters move in f32, also beside bf16 activations.
TEST_P(KnownFaultsConv, B44_GateParametersKeepF32Steps) {
  const bool gpu = GetParam().is_cuda();
  const Tensor a = normal({1, 64, 2}, 1).to(gpu ? DType::bf16 : DType::f32);
  const Tensor bias = Tensor::zeros({2}, DType::f32, GetParam());
  const auto gate = [&](double A) {
    const Var log = Var::leaf(Tensor::full({2}, A, DType::f32, GetParam()));
    const Var g = decay_gate(a, log, bias);
    backward(g, Tensor::full(g.shape(), 1, DType::f32, GetParam()));
    EXPECT_EQ(g.dtype(), DType::f32);
    EXPECT_EQ(log.grad().dtype(), DType::f32);
    return g.value().cpu();
  };
  const double step = 1e-3;  // the bf16 numbers next to 2.7707 are 0.0156 apart
  const Tensor before = gate(2.7707), after = gate(2.7707 + step);
  for (int64_t i = 0; i < before.numel(); ++i) {
    const double ratio = double(after.data<float>()[i]) / double(before.data<float>()[i]);
    EXPECT_NEAR(ratio, std::exp(step), 2e-6);
  }
}

// B58: every combination of present and wanted optional inputs.
TEST_P(KnownFaultsConv, B58_OptionalInputsInAnyCombination) {
  const auto var = [](const Tensor& t, bool present, bool wanted) {
    return !present ? Var() : wanted ? Var::leaf(t) : Var(t);
  };
  const Tensor x = normal({2, 9, 6}, 1), w = normal({6, 4}, 2), bias = normal({6}, 3);
  const Tensor state = normal({2, 6, 4}, 4), last = normal({2, 6}, 5), mu = normal({2, 6}, 6);
  const Tensor dy = normal({2, 9, 6}, 7);
  for (int bits = 0; bits < 256; ++bits) {
    const auto bit = [bits](int i) { return bool(bits >> i & 1); };
    const Var vx = var(x, true, bit(0)), vw = var(w, true, bit(1));
    const Var vb = var(bias, bit(2), bit(3)), vs = var(state, bit(4), bit(5));
    const CausalConv1d r = causal_conv1d(vx, vw, vb, vs, {.final_state = bit(6)});
    ASSERT_EQ(r.final_state.defined(), bit(6));
    if (r.y.requires_grad()) backward(r.y, dy);
    const Var m = var(mu, true, bit(1)), l = var(last, bit(4), bit(5));
    const TokenShiftMix s = token_shift_mix(vx, m, l, {.last = bit(6)});
    ASSERT_EQ(s.last.defined(), bit(6));
    if (s.out[bit(7)].requires_grad()) backward(s.out[bit(7)], dy);
    const Var vd = var(bias, bit(2), bit(3)), A = var(normal({6}, 8), true, bit(5));
    const Var g = decay_gate(vx, A, vd, {.lower_bound = bit(7) ? -5.0 : 0.0});
    if (g.requires_grad()) backward(g, dy);
    for (const Var* v : {&vx, &vw, &vb, &vs, &m, &l, &vd, &A})
      EXPECT_EQ(v->grad().defined(), v->requires_grad()) << bits;
  }
}

// B18's kind: nothing behind a tensor is read, whatever the length.
TEST_P(KnownFaultsConv, NothingBehindTheTensorIsRead) {
  const Tensor w = normal({8, 4}, 1), bias = normal({8}, 2);
  for (const int64_t T : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 129}) {
    const auto inside = [&](uint64_t seed) {
      const Tensor buffer = Tensor::full({1, T + 20, 24}, NAN, DType::f32, GetParam());
      const Tensor view = buffer.slice(1, 10, 10 + T).slice(2, 8, 16);
      view.copy_(normal({1, T, 8}, seed));
      return view;
    };
    const Tensor x = inside(3), dy = inside(4);
    const ConvRun got = train(x, w, bias, dy);
    const ConvRun want = train(x.contiguous(), w, bias, dy.contiguous());
    EXPECT_TRUE(bitwise_equal(got.y, want.y)) << T;
    EXPECT_TRUE(bitwise_equal(got.dx, want.dx)) << T;
    EXPECT_TRUE(bitwise_equal(got.dw, want.dw)) << T;
    EXPECT_TRUE(
        bitwise_equal(token_shift(x).delta.value(), token_shift(x.contiguous()).delta.value()));
    EXPECT_LE(
        relative_error(got.y.cpu(), reference::causal_conv1d(
                                        x.cpu().to(DType::f64).contiguous(), w.cpu().to(DType::f64),
                                        bias.cpu().to(DType::f64), {}, true)[0]),
        1e-6)
        << T;
  }
}

// Sums over 2·10⁵ tokens that f32 addition in a row would lose digits of.
TEST_P(KnownFaultsConv, GateGradientsOverManyTokens) {
  const int64_t T = 200'000;
  const Tensor a = normal({1, T, 2}, 1), A = normal({2}, 2), bias = normal({2}, 3);
  const Tensor dg = Tensor::full({1, T, 2}, 1, DType::f32, GetParam());
  const auto gradients = [&](DType t, Device device) {
    const Var A_log = Var::leaf(A.to(t, device)), dt = Var::leaf(bias.to(t, device));
    backward(decay_gate(a.to(t, device), A_log, dt), dg.to(t, device));
    return std::vector{A_log.grad().cpu(), dt.grad().cpu()};
  };
  const auto got = gradients(DType::f32, GetParam()), want = gradients(DType::f64, {});
  // exp(A_log), a factor of every term, is itself good to 2 ulp (2.4e-7).
  for (size_t i = 0; i < 2; ++i) EXPECT_LE(relative_error(got[i], want[i]), 4e-7) << i;
}

TEST(ConvCpu, ThreadsDoNotChangeABit) {
  Tensor x = Tensor::empty({2, 700, 40}), w = Tensor::empty({40, 4}), b = Tensor::empty({40});
  Tensor dy = Tensor::empty({2, 700, 40});
  uint64_t seed = 0;
  for (const Tensor& t : {x, w, b, dy}) fill_normal(t, {++seed, 0});
  const int before = omp_get_max_threads();
  std::vector<std::vector<Tensor>> results;
  for (const int threads : {1, 2, 7}) {
    omp_set_num_threads(threads);
    const ConvRun r = train(x, w, b, dy);
    const Var vx = Var::leaf(x), mu = Var::leaf(w.transpose(0, 1).contiguous());
    backward(token_shift_mix(vx, mu).out[2], dy);
    const Var A = Var::leaf(b), dt = Var::leaf(b);
    backward(decay_gate(x, A, dt), dy);
    results.push_back({r.y, r.dx, r.dw, r.dbias, vx.grad(), mu.grad(), A.grad(), dt.grad()});
  }
  omp_set_num_threads(before);
  for (size_t i = 0; i < results[0].size(); ++i)
    for (const size_t other : {1, 2})
      EXPECT_TRUE(bitwise_equal(results[0][i], results[other][i])) << i;
}

TEST(Rows, ViewsAreReadInPlaceWhereTheyCanBe) {
  const Tensor wide = Tensor::arange(2 * 5 * 12, DType::f32).view({2, 5, 12});
  const auto in_place = [&](const Tensor& t, int inner = 1) {
    return as_rows(t, inner).t.same_storage(wide);
  };
  const Rows slice = as_rows(wide.slice(2, 4, 8));
  EXPECT_TRUE(slice.t.same_storage(wide));
  EXPECT_EQ(slice.count, 10);
  EXPECT_EQ(slice.width, 4);
  EXPECT_EQ(slice.stride, 12);
  EXPECT_TRUE(in_place(wide));
  EXPECT_TRUE(in_place(wide.slice(0, 1, 2).slice(1, 1, 4)));
  EXPECT_TRUE(in_place(wide.select(0, 0).slice(0, 2, 3)));
  EXPECT_TRUE(in_place(wide.slice(2, 0, 4).view({2, 5, 2, 2}), 2));
  EXPECT_TRUE(in_place(wide.slice(2, 3, 4)));  // a last dimension of one
  EXPECT_FALSE(in_place(wide.slice(1, 0, 4)));
  EXPECT_FALSE(in_place(wide.transpose(0, 1)));
  EXPECT_FALSE(in_place(wide.transpose(1, 2)));
  EXPECT_EQ(as_rows(wide.transpose(1, 2)).stride, 5);
  const Tensor repeated = wide.select(0, 0).select(0, 0).expand({3, 7, 12});
  EXPECT_TRUE(in_place(repeated));
  EXPECT_EQ(as_rows(repeated).stride, 0);
  EXPECT_EQ(as_rows(repeated).count, 21);
  EXPECT_TRUE(rows_aligned(as_rows(wide), 4));
  EXPECT_FALSE(rows_aligned(as_rows(wide.slice(2, 1, 5)), 4));
  EXPECT_FALSE(rows_aligned(as_rows(wide.slice(2, 0, 3)), 4));
}

}  // namespace
}  // namespace ebb::testing
