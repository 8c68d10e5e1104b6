// Gated delta rule against closed forms and against faults other implementations had; the same
// tests on every device (instantiated in delta_rule_test.cpp and delta_rule_cuda_test.cpp). The ids
// B.. name reports in the trackers of such projects, given at each test.
#pragma once
#include <array>
#include <limits>

#include "ops/decay_gate.h"
#include "ops/l2_norm.h"
#include "ops/sigmoid_gate.h"
#include "tensor/random.h"
#include "tests/delta_rule_inputs.h"

namespace ebb::testing {

class GatedDeltaRule : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (GetParam().is_cuda() && cuda_device_count() == 0)
      GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  Device device() const { return GetParam(); }
  GdnResult f32(const GdnInputs& in) const { return run(in, DType::f32, device()); }
  // bf16 where it exists; f32 on the CPU.
  DType low() const { return device().is_cuda() ? DType::bf16 : DType::f32; }
  double low_outputs() const { return device().is_cuda() ? 8e-3 : 2e-5; }
  double low_gradients() const { return device().is_cuda() ? 1.5e-2 : 2e-5; }
};

// FLA#99, #111: exp(g_i − g_j) for j > i overflowed before it was masked.
TEST_P(GatedDeltaRule, B02StrongDecayStaysFinite) {
  GdnInputs in = gdn_inputs({.time = 128, .key_dim = 16, .value_dim = 16});
  in.g.fill_(-30);
  in.h0 = in.dht = {};
  for (const DType dtype : {DType::f32, low()}) {
    const GdnResult r = run(in, dtype, device());
    EXPECT_TRUE(finite(r));
    EXPECT_LE(relative_error(r.dg, Tensor::zeros_like(r.dg)), 1e-9);  // an absolute bound
    Tensor want = Tensor::zeros_like(in.v);
    const Tensor q = in.q.to(dtype).to(DType::f64), k = in.k.to(dtype).to(DType::f64);
    for (int64_t t = 0; t < 128; ++t) {
      double qk = 0;
      for (int64_t j = 0; j < 16; ++j)
        qk += q.data<double>()[t * 16 + j] * k.data<double>()[t * 16 + j];
      for (int64_t j = 0; j < 16; ++j)
        want.data<double>()[t * 16 + j] =
            in.scale * in.beta.data<double>()[t] * qk * in.v.data<double>()[t * 16 + j];
    }
    EXPECT_LE(relative_error(r.o, want), dtype == DType::bf16 ? 8e-3 : 1e-5);
  }
}

// FLA#104, #389: terms with exponent 0 were dropped.
TEST_P(GatedDeltaRule, B04DecayOfExactlyOneIsThePlainDeltaRule) {
  for (const int64_t time : {7, 50, 1000, 4096}) {
    GdnInputs in = gdn_inputs({.time = time, .key_dim = 8, .value_dim = 8});
    in.g.fill_(0);
    // S ← S + β k (v − Sᵀk)ᵀ, no exponential anywhere.
    std::vector<double> s = in.h0.to_vector<double>();
    const auto q = in.q.to_vector<double>(), k = in.k.to_vector<double>(),
               v = in.v.to_vector<double>(), beta = in.beta.to_vector<double>();
    const Tensor want = Tensor::zeros_like(in.v);
    for (int64_t t = 0; t < time; ++t)
      for (int64_t j = 0; j < 8; ++j) {
        double read = 0, out = 0;
        for (int64_t i = 0; i < 8; ++i) read += s[size_t(i * 8 + j)] * k[size_t(t * 8 + i)];
        for (int64_t i = 0; i < 8; ++i) {
          s[size_t(i * 8 + j)] +=
              beta[size_t(t)] * k[size_t(t * 8 + i)] * (v[size_t(t * 8 + j)] - read);
          out += in.scale * q[size_t(t * 8 + i)] * s[size_t(i * 8 + j)];
        }
        want.data<double>()[t * 8 + j] = out;
      }
    EXPECT_LE(relative_error(f32(in).o, want), 1e-5) << time;
    for (int64_t t = 1; t < time; t += 2) in.g.data<double>()[t] = -0.7;
    expect_parity(f32(in), exact(in, DType::f32), 1e-5, 2e-5,
                  "every second " + std::to_string(time));
  }
}

// FlashKDA#34: Neumann series of the inverse; its terms reach 3432 for equal keys and must cancel.
TEST_P(GatedDeltaRule, B06IdenticalKeys) {
  GdnInputs in = gdn_inputs({.time = 256, .key_dim = 16, .value_dim = 8});
  in.h0 = in.dht = {};
  in.g.fill_(0);
  in.beta.fill_(1);
  in.k.copy_(in.k.slice(1, 0, 1).clone().expand(in.k.shape()));
  for (const DType dtype : {DType::f32, low()}) {
    // S_t = k v_tᵀ for a k of length 1; bf16 rounds k, so measure against the recurrence there.
    const GdnResult r = run(in, dtype, device());
    const bool exact_length = dtype != DType::bf16;
    Tensor want = exact(in, dtype).o;
    if (exact_length)
      for (int64_t t = 0; t < 256; ++t) {
        double qk = 0;
        for (int64_t i = 0; i < 16; ++i)
          qk += in.q.data<double>()[t * 16 + i] * in.k.data<double>()[i];
        for (int64_t j = 0; j < 8; ++j)
          want.data<double>()[t * 8 + j] = in.scale * qk * in.v.data<double>()[t * 8 + j];
      }
    // In bf16 the written values v_t − v_{t−1} are rounded and must add up to v_t over a chunk: 64
    // roundings of 2^-9 √2 come to 2.2e-2. A Neumann series in 16 bits misses by 0.4 or more.
    EXPECT_LE(relative_error(r.o, want), exact_length ? 1e-5 : 5e-2);
  }
  // beta = 2 reflects: with constant v the read-out along k alternates 2v, 0, 2v, 0 ...
  in.beta.fill_(2);
  in.q.copy_(in.k);
  in.v.copy_(in.v.slice(1, 0, 1).clone().expand(in.v.shape()));
  in.scale = 1;
  const Tensor o = f32(in).o;
  for (int64_t t = 0; t < 256; ++t)
    for (int64_t j = 0; j < 8; ++j)
      EXPECT_NEAR(o.data<double>()[t * 8 + j], t % 2 ? 0 : 2 * in.v.data<double>()[j], 1e-3)
          << "token " << t;
}

// FLA#172: batch·heads beyond 65,535 on a grid dimension that ends there.
TEST_P(GatedDeltaRule, B08ManySequences) {
  const int64_t batch = 10923, half = 5461;
  GdnInputs in = gdn_inputs(
      {.batch = batch, .time = 32, .heads = 6, .value_heads = 6, .key_dim = 2, .value_dim = 3});
  const auto part = [&](int64_t begin, int64_t end) {
    GdnInputs p = in;
    for (Tensor* t : {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.h0, &p.d_o, &p.dht})
      *t = t->slice(0, begin, end);
    return p;
  };
  const GdnResult all = f32(in), a = f32(part(0, half)), b = f32(part(half, batch));
  const auto whole = fields(all), first = fields(a), second = fields(b);
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_TRUE(bitwise_equal(whole[i].slice(0, 0, half), first[i])) << kGdnNames[i];
    EXPECT_TRUE(bitwise_equal(whole[i].slice(0, half, batch), second[i])) << kGdnNames[i];
  }
}

// FLA#792: a mask was missing on the last, partial chunk's off-diagonal blocks.
TEST_P(GatedDeltaRule, B18NothingIsReadBehindTheLastToken) {
  for (const int64_t time : {65, 80, 97, 127}) {
    GdnInputs in = gdn_inputs({.time = time, .key_dim = 16, .value_dim = 32});
    for (const DType dtype : {DType::f32, low()}) {
      const GdnResult want = exact(in, dtype);
      GdnInputs guarded = in;
      for (Tensor* t :
           {&guarded.q, &guarded.k, &guarded.v, &guarded.g, &guarded.beta, &guarded.d_o}) {
        Shape longer = t->shape();
        longer[1] = 192;
        const DType to = t == &guarded.g || t == &guarded.beta ? accumulate_type(dtype) : dtype;
        const Tensor buffer =
            Tensor::full(longer, std::numeric_limits<double>::quiet_NaN(), to, device());
        const Tensor view = buffer.slice(1, 0, time);
        view.copy_(t->to(to, device()));
        ASSERT_TRUE(view.is_contiguous());  // so that the kernels see the NaNs behind it
        *t = view;
      }
      expect_parity(run(guarded, dtype, device()), want, dtype == DType::bf16 ? 8e-3 : 2e-5,
                    dtype == DType::bf16 ? 1.5e-2 : 2e-5, std::to_string(time));
    }
  }
}

// FLA#941, #1018: blocks of V overwrote each other's sums.
TEST_P(GatedDeltaRule, B40ValueColumnsAreIndependentAndSummed) {
  const GdnInputs in = gdn_inputs({.batch = 2, .time = 100, .key_dim = 32, .value_dim = 128});
  const auto half = [&](int64_t begin) {
    GdnInputs p = in;
    for (Tensor* t : {&p.v, &p.h0, &p.d_o, &p.dht}) *t = t->slice(3, begin, begin + 64);
    return f32(p);
  };
  const GdnResult all = f32(in), a = half(0), b = half(64);
  EXPECT_LE(relative_error(all.o.slice(3, 0, 64), a.o), 1e-6);
  EXPECT_LE(relative_error(all.o.slice(3, 64, 128), b.o), 1e-6);
  EXPECT_LE(relative_error(all.dv.slice(3, 0, 64), a.dv), 1e-6);
  EXPECT_LE(relative_error(all.dh0.slice(3, 64, 128), b.dh0), 1e-6);
  const auto whole = fields(all), first = fields(a), second = fields(b);
  for (const size_t i : {2, 3, 5, 6}) {
    const Tensor sum = first[i].clone();
    for (int64_t j = 0; j < sum.numel(); ++j) sum.data<double>()[j] += second[i].data<double>()[j];
    EXPECT_LE(relative_error(whole[i], sum), 2e-6) << kGdnNames[i];
  }
}

// Keeping the inputs only changes what is saved and not a bit of what comes out.
TEST_P(GatedDeltaRule, RecomputeGivesTheSameBits) {
  for (const DType dtype : {DType::f32, low()}) {
    GdnInputs in = gdn_inputs({.time = 150, .value_heads = 2, .key_dim = 64, .value_dim = 32});
    const auto kept = fields(run(in, dtype, device()));
    in.recompute = true;
    const auto again = fields(run(in, dtype, device()));
    for (size_t i = 0; i < kept.size(); ++i)
      EXPECT_TRUE(bitwise_equal(kept[i], again[i])) << kGdnNames[i];
  }
}

// FLA#1214: the state's gradient overflowed a 16-bit type. It is f32 here.
TEST_P(GatedDeltaRule, B42LargeUpstreamGradient) {
  GdnInputs in = gdn_inputs({.time = 200, .key_dim = 32, .value_dim = 32});
  in.g.fill_(-1e-3);
  for (Tensor* t : {&in.d_o, &in.dht})
    for (int64_t i = 0; i < t->numel(); ++i) t->data<double>()[i] *= 1e6;
  expect_parity(run(in, low(), device()), exact(in, low()), low_outputs(), low_gradients());
}

// NVlabs/GatedDeltaNet#15: a 0/1 mask where the decay ratio belongs gives 0.25 for the second.
TEST_P(GatedDeltaRule, B62TwoTokensByHand) {
  GdnInputs in = gdn_inputs({.time = 2, .key_dim = 2, .value_dim = 2});
  in.h0 = in.dht = {};
  in.scale = 1;
  in.beta.fill_(0.5);
  in.g.fill_(std::log(0.1));
  for (Tensor* t : {&in.q, &in.k, &in.v}) {
    t->fill_(0);
    t->select(3, 0).fill_(1);
  }
  // u_1 = 0.5, S_1 = 0.5; u_2 = 0.5 (1 − 0.05) = 0.475, S_2 = 0.05 + 0.475
  Tensor o = f32(in).o;
  EXPECT_NEAR(o.data<double>()[0], 0.5, 1e-6);
  EXPECT_NEAR(o.data<double>()[2], 0.525, 1e-6);
  in.v.select(1, 1).fill_(0);  // nothing written at the second token: 0.05 − 0.5·0.05
  o = f32(in).o;
  EXPECT_NEAR(o.data<double>()[0], 0.5, 1e-6);
  EXPECT_NEAR(o.data<double>()[2], 0.025, 1e-6);
  EXPECT_NEAR(o.data<double>()[3], 0, 1e-6);
}

// FLA#988: wrong dk and dbeta at one chunk length only.
TEST_P(GatedDeltaRule, B64ChunkLengthDoesNotMatter) {
  GdnInputs in = gdn_inputs(
      {.batch = 1, .time = 300, .heads = 2, .value_heads = 4, .key_dim = 32, .value_dim = 24}, 5,
      {0, 31, 31, 170, 300});
  const GdnResult f32_want = exact(in, DType::f32), low_want = exact(in, low());
  for (const int64_t chunk : {16, 32, 64, 128}) {
    in.chunk = chunk;
    expect_parity(f32(in), f32_want, 1e-5, 1e-5, "chunk " + std::to_string(chunk));
    expect_parity(run(in, low(), device()), low_want, low_outputs(), low_gradients(),
                  "chunk " + std::to_string(chunk));
  }
}

// exp(a−b) written as exp(a)·exp(−b) fails once the decay inside a tile passes e^88.
TEST_P(GatedDeltaRule, DecayBeyondTheRangeOfFloats) {
  for (const double g : {-1.4, -3.0, -6.0, -60.0, -2000.0}) {
    GdnInputs in = gdn_inputs({.time = 130, .key_dim = 16, .value_dim = 16});
    for (int64_t t = 0; t < 130; ++t) in.g.data<double>()[t] = t % 7 == 3 ? -1e-4 : g;
    expect_parity(f32(in), exact(in, DType::f32), 1e-5, 2e-5, std::to_string(g));
  }
}

// A Neumann series of the inverse loses 3e-2 (tf32) to 0.4 (bf16) here; substitution in f32 does
// not.
TEST_P(GatedDeltaRule, SimilarKeys) {
  for (const double beta : {1.0, 2.0}) {
    GdnInputs in = gdn_inputs({.time = 200, .key_dim = 64, .value_dim = 64});
    const Tensor common = in.k.slice(1, 0, 1).clone();
    for (int64_t t = 0; t < 200; ++t)
      for (int64_t j = 0; j < 64; ++j) {
        double& k = in.k.data<double>()[t * 64 + j];
        k = std::sqrt(0.8) * common.data<double>()[j] + std::sqrt(0.2) * k;
      }
    normalize_rows(in.k);
    in.beta.fill_(beta);
    for (int64_t t = 0; t < 200; ++t) in.g.data<double>()[t] *= 0.01;
    expect_parity(f32(in), exact(in, DType::f32), 2e-5, 2e-5, std::to_string(beta));
    if (beta == 1)
      expect_parity(run(in, low(), device()), exact(in, low()), low_outputs(), low_gradients());
  }
}

TEST_P(GatedDeltaRule, InfiniteDecayStartsAfresh) {
  GdnInputs in = gdn_inputs({.time = 140, .key_dim = 16, .value_dim = 16});
  in.dht = {};
  in.g.data<double>()[77] = -INFINITY;
  const GdnResult got = f32(in);
  in.cu = {0, 77, 140};
  const Tensor two = Tensor::zeros({2, 1, 16, 16}, DType::f64);
  two.slice(0, 0, 1).copy_(in.h0);
  in.h0 = two;
  GdnResult want = f32(in);
  for (int64_t t = 77; t < 78; ++t) EXPECT_EQ(got.dg.data<double>()[t], 0);
  want.dg.data<double>()[77] = 0;
  EXPECT_TRUE(finite(got));
  want.dh0 = want.dh0.slice(0, 0, 1);
  expect_parity(got, want, 2e-6, 4e-6);
}

// o and the final state of prefilling `split` tokens and decoding the rest one by one.
inline std::pair<Tensor, Tensor> prefill_and_step(const GdnInputs& in, int64_t split, DType dtype,
                                                  Device device) {
  const DType gate = accumulate_type(dtype);
  const Tensor q = in.q.to(dtype, device), k = in.k.to(dtype, device), v = in.v.to(dtype, device);
  const Tensor g = in.g.to(gate, device), beta = in.beta.to(gate, device);
  const auto first = [&](const Tensor& t) { return t.slice(1, 0, split); };
  const DeltaRuleOutput head =
      gated_delta_rule(first(q), first(k), first(v), first(g), first(beta), in.h0.to(gate, device),
                       {.scale = in.scale, .want_final_state = true, .layout = {}});
  const Tensor state = head.ht.value(), o = Tensor::zeros_like(v);
  first(o).copy_(head.o.value());
  for (int64_t t = split; t < v.size(1); ++t)
    o.select(1, t).copy_(gated_delta_rule_step(q.select(1, t), k.select(1, t), v.select(1, t),
                                               g.select(1, t), beta.select(1, t), state,
                                               {.scale = in.scale, .layout = {}}));
  return {o.to(DType::f64, {}), state.to(DType::f64, {})};
}

TEST_P(GatedDeltaRule, PrefillThenStepsEqualsTheWholeSequence) {
  for (const int64_t width : {5, 64, 144}) {
    const GdnInputs in = gdn_inputs({.batch = 2,
                                     .time = 70,
                                     .heads = 2,
                                     .value_heads = 4,
                                     .key_dim = width,
                                     .value_dim = width + 1});
    for (const DType dtype : {DType::f32, low()}) {
      const GdnResult want = exact(in, dtype);
      const double limit = dtype == DType::bf16 ? 8e-3 : 1e-5;
      for (const int64_t split : {0, 1, 64, 69}) {
        const auto [o, state] = prefill_and_step(in, split, dtype, device());
        EXPECT_LE(relative_error(o, want.o), limit) << width << " split " << split;
        EXPECT_LE(relative_error(state, want.ht), limit) << width << " split " << split;
      }
    }
  }
}

// Lengths, decays and β made by the step from rows that lie apart: as from finished inputs.
TEST_P(GatedDeltaRule, StepTakesLogits) {
  const int64_t heads = 2, value_heads = 4;
  using Sizes = std::array<int64_t, 3>;
  for (const auto& [batch, k, v] : {Sizes{2, 5, 6}, Sizes{2, 64, 128}, Sizes{200, 64, 128}})
    for (const DType dtype : {DType::f32, low()}) {
      const DType wide = accumulate_type(dtype);
      const auto on_device = [&](const Tensor& t, DType to) { return t.to(to, device()); };
      Draw draw(11);
      const int64_t keys = heads * k, values = value_heads * v;
      const Tensor qkv = on_device(draw.normal({batch, 2 * keys + values}), dtype);
      const Tensor zb = on_device(draw.normal({batch, 2 * value_heads}), dtype);
      const Tensor q = qkv.slice(1, 0, keys).reshape({batch, heads, k});
      const Tensor key = qkv.slice(1, keys, 2 * keys).reshape({batch, heads, k});
      const Tensor value =
          qkv.slice(1, 2 * keys, 2 * keys + values).reshape({batch, value_heads, v});
      const Tensor z = zb.slice(1, 0, value_heads), b = zb.slice(1, value_heads, 2 * value_heads);
      const Tensor A_log = on_device(draw.uniform({value_heads}, -1, 0.5), wide);
      const Tensor dt_bias = on_device(draw.normal({value_heads}), wide);
      const Tensor state = on_device(draw.normal({batch, value_heads, k, v}), wide);
      const Tensor want_state = state.to(DType::f64, {}).clone();
      const auto exact_of = [](const Tensor& t) { return t.to(DType::f64, {}); };
      const Tensor want = gated_delta_rule_step(
          l2_norm(exact_of(q)).value(), l2_norm(exact_of(key)).value(), exact_of(value),
          decay_gate(exact_of(z), exact_of(A_log), exact_of(dt_bias)).value(),
          sigmoid_gate(exact_of(b), 2).value(), want_state, {.scale = 0.3, .layout = {}});
      DeltaRuleOptions options{.scale = 0.3, .layout = {}};
      options.normalize_qk = options.sigmoid = true, options.beta_scale = 2;
      options.A_log = A_log, options.dt_bias = dt_bias;
      const Tensor o = gated_delta_rule_step(q, key, value, z, b, state, options);
      EXPECT_LE(relative_error(o.to(DType::f64, {}), want), dtype == DType::bf16 ? 8e-3 : 1e-5);
      EXPECT_LE(relative_error(state.to(DType::f64, {}), want_state), 1e-5);
    }
}

// No more than twice what it is given, returns and keeps per chunk.
TEST_P(GatedDeltaRule, MemoryIsBounded) {
  const int64_t b = 2, t = 512, h = 4, k = 64, v = 128, c = 64;
  const DType dtype = low(), gate = accumulate_type(dtype);
  const GdnInputs in = gdn_inputs(
      {.batch = b, .time = t, .heads = h, .value_heads = h, .key_dim = k, .value_dim = v});
  const int64_t before = memory_stats(device()).current;
  {
    const Var q = Var::leaf(in.q.to(dtype, device())), key = Var::leaf(in.k.to(dtype, device())),
              value = Var::leaf(in.v.to(dtype, device())), g = Var::leaf(in.g.to(gate, device())),
              beta = Var::leaf(in.beta.to(gate, device()));
    const Tensor d_o = in.d_o.to(dtype, device());
    reset_peak_memory(device());
    backward(gated_delta_rule(q, key, value, g, beta, {}, {.scale = 1}).o, d_o);
  }
  // q, k, v, o, dO; gradients of q, k, v (f32 at the leaves) and the gates; states and A.
  const int64_t item = item_size(dtype), rows = b * t * h;
  const int64_t bound = rows * (2 * k + 3 * v) * item + rows * (2 * k + v) * 4 + 4 * rows * 4 +
                        b * (t / c) * h * k * v * item;
  EXPECT_LE(memory_stats(device()).peak - before, 2 * bound);
}

}  // namespace ebb::testing
