// The delta rule with a decay per channel against closed forms and against faults other
// implementations had; the same tests on every device and for KDA and GDN2 (instantiated in
// delta_rule_channel_test.cpp and delta_rule_channel_cuda_test.cpp). The ids B.. name reports in
// the trackers of such projects, given at each test.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "ops/delta_rule_channel.h"
#include "tensor/random.h"
#include "tests/op_harness.h"
#include "tests/reference/delta_rule.h"
#include "tests/result_parity.h"

namespace ebb::testing {

// Inputs and upstream gradients in f64 on the CPU; run_channel() converts them. KDA: b is beta
// [B,T,HV] and w undefined.
struct ChannelInputs {
  Tensor q, k, v, g, b, w, h0, d_o, dht;
  double scale = 1;
  std::vector<int64_t> cu = {};
  int64_t chunk = 64;
  bool recompute = false;
  bool kimi() const { return !w.defined(); }
};
struct ChannelShape {
  int64_t batch = 1, time = 1, heads = 1, value_heads = 1, key_dim = 16, value_dim = 16;
};
inline const char* const kChannelNames[] = {"o", "ht", "dq", "dk", "dv", "dg", "db", "dw", "dh0"};
using ChannelResult = std::vector<Tensor>;  // by these names; undefined where there is none
enum ChannelField { kO, kHt, kDq, kDk, kDv, kDg, kDb, kDw, kDh0 };

inline ChannelInputs channel_inputs(DeltaGates gates, const ChannelShape& s, uint64_t seed = 3,
                                    std::vector<int64_t> cu = {}) {
  Draw draw(seed);
  const Shape qk{s.batch, s.time, s.heads, s.key_dim};
  const Shape v{s.batch, s.time, s.value_heads, s.value_dim};
  const Shape wide{s.batch, s.time, s.value_heads, s.key_dim};
  const int64_t n = cu.empty() ? s.batch : int64_t(cu.size()) - 1;
  const Shape state{n, s.value_heads, s.key_dim, s.value_dim};
  const bool kimi = gates == DeltaGates::kda;
  ChannelInputs in{draw.normal(qk),
                   draw.normal(qk),
                   draw.normal(v),
                   draw.uniform(wide, -1.5, 0),
                   draw.uniform(kimi ? v.first(3) : wide, 0, 1),
                   kimi ? Tensor() : draw.uniform(v, 0, 1),
                   draw.normal(state),
                   draw.normal(v),
                   draw.normal(state)};
  normalize_rows(in.q);
  normalize_rows(in.k);
  in.scale = 1 / std::sqrt(double(s.key_dim));
  in.cu = std::move(cu);
  return in;
}

inline DeltaRuleOutput apply_channel(const ChannelInputs& in, const Var& q, const Var& k,
                                     const Var& v, const Var& g, const Var& b, const Var& w,
                                     const Var& h0, bool final_state) {
  DeltaRuleOptions options{.scale = in.scale,
                           .want_final_state = final_state,
                           .chunk = in.chunk,
                           .recompute = in.recompute};
  if (!in.cu.empty()) options.layout = SeqLayout::packed(in.cu, q.device());
  return in.kimi() ? kda(q, k, v, g, b, h0, options) : gdn2(q, k, v, g, b, w, h0, options);
}

inline ChannelResult run_channel(const ChannelInputs& in, DType dtype, Device device) {
  const DType gate = accumulate_type(dtype);
  const auto leaf = [&](const Tensor& t, DType to) {
    return t.defined() ? Var::leaf(t.to(to, device)) : Var();
  };
  const Var q = leaf(in.q, dtype), k = leaf(in.k, dtype), v = leaf(in.v, dtype);
  const Var g = leaf(in.g, gate), b = leaf(in.b, gate), w = leaf(in.w, gate);
  const Var h0 = leaf(in.h0, gate);
  const DeltaRuleOutput out = apply_channel(in, q, k, v, g, b, w, h0, in.dht.defined());
  std::vector<Var> roots{out.o};
  std::vector<Tensor> dy{in.d_o.to(dtype, device)};
  if (in.dht.defined()) roots.push_back(out.ht), dy.push_back(in.dht.to(gate, device));
  backward(roots, dy);
  const auto host = [](const Tensor& t) { return t.defined() ? t.to(DType::f64, {}) : Tensor(); };
  return {host(out.o.value()), host(out.ht.value()), host(q.grad()), host(k.grad()), host(v.grad()),
          host(g.grad()),      host(b.grad()),       host(w.grad()), host(h0.grad())};
}

// The recurrence on the inputs as `dtype` rounds them.
inline ChannelResult exact_channel(const ChannelInputs& in, DType dtype = DType::f64) {
  const DType gate = accumulate_type(dtype);
  const auto round = [](const Tensor& t, DType to) {
    return t.defined() ? t.to(to).to(DType::f64) : Tensor();
  };
  const auto over = [](const Tensor& beta, const Shape& shape) {
    return beta.unsqueeze(-1).expand(shape).contiguous();
  };
  const Tensor b = round(in.b, gate);
  reference::DeltaRule r({round(in.q, dtype), round(in.k, dtype), round(in.v, dtype),
                          round(in.g, gate), in.kimi() ? over(b, in.g.shape()) : b,
                          in.kimi() ? over(b, in.v.shape()) : round(in.w, gate), round(in.h0, gate),
                          in.scale, in.cu});
  r.backward(round(in.d_o, dtype), round(in.dht, gate));
  ChannelResult out{r.o,  in.dht.defined() ? r.ht : Tensor(), r.dq, r.dk, r.dv, r.dg, r.db,
                    r.dw, in.h0.defined() ? r.dh0 : Tensor()};
  if (!in.kimi()) return out;
  out[kDb] = Tensor::zeros_like(in.b);
  out[kDw] = Tensor();
  for (const Tensor& t : {r.db, r.dw}) {
    const int64_t width = t.shape().back();
    for (int64_t i = 0; i < t.numel(); ++i)
      out[kDb].data<double>()[i / width] += t.data<double>()[i];
  }
  return out;
}

inline void expect_channel_parity(const ChannelResult& got, const ChannelResult& want,
                                  double outputs, double gradients, const std::string& what = "") {
  expect_results_near(got, want, kChannelNames, 2, outputs, gradients, what);
}

struct ChannelParam {
  Device device;
  DeltaGates gates;
};
inline std::string channel_param_name(const ::testing::TestParamInfo<ChannelParam>& info) {
  return std::string(info.param.device.is_cuda() ? "cuda_" : "cpu_") +
         (info.param.gates == DeltaGates::kda ? "kda" : "gdn2");
}
inline void PrintTo(const ChannelParam& p, std::ostream* out) {
  *out << (p.gates == DeltaGates::kda ? "kda" : "gdn2");
}

class ChannelDeltaRule : public ::testing::TestWithParam<ChannelParam> {
 protected:
  void SetUp() override {
    if (device().is_cuda() && cuda_device_count() == 0)
      GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  Device device() const { return GetParam().device; }
  ChannelInputs inputs(const ChannelShape& s, uint64_t seed = 3,
                       std::vector<int64_t> cu = {}) const {
    return channel_inputs(GetParam().gates, s, seed, std::move(cu));
  }
  ChannelResult f32(const ChannelInputs& in) const { return run_channel(in, DType::f32, device()); }
  // bf16 where it exists; f32 on the CPU.
  DType low() const { return device().is_cuda() ? DType::bf16 : DType::f32; }
  double low_outputs() const { return device().is_cuda() ? 8e-3 : 2e-5; }
  double low_gradients() const { return device().is_cuda() ? 1.5e-2 : 2e-5; }
};

// FLA#99, #111: exp(g_i − g_j) for j > i overflowed before it was masked.
TEST_P(ChannelDeltaRule, B02StrongDecayStaysFinite) {
  ChannelInputs in = inputs({.time = 128, .key_dim = 16, .value_dim = 16});
  in.g.fill_(-30);
  in.h0 = in.dht = {};
  for (const DType dtype : {DType::f32, low()}) {
    const ChannelResult r = run_channel(in, dtype, device());
    EXPECT_TRUE(all_values_finite(r));
    EXPECT_LE(relative_error(r[kDg], Tensor::zeros_like(r[kDg])), 1e-9);  // an absolute bound
    EXPECT_LE(relative_error(r[kO], exact_channel(in, dtype)[kO]),
              dtype == DType::bf16 ? 8e-3 : 1e-5);
  }
}

// FLA#104, #389: terms with exponent 0 were dropped.
TEST_P(ChannelDeltaRule, B04DecayOfExactlyOneIsThePlainDeltaRule) {
  for (const int64_t time : {7, 50, 1000}) {
    ChannelInputs in = inputs({.time = time, .key_dim = 8, .value_dim = 8});
    in.g.fill_(0);
    expect_channel_parity(f32(in), exact_channel(in, DType::f32), 1e-5, 2e-5,
                          "none " + std::to_string(time));
    for (int64_t i = 0; i < in.g.numel(); i += 3) in.g.data<double>()[i] = -0.7;
    expect_channel_parity(f32(in), exact_channel(in, DType::f32), 1e-5, 2e-5,
                          "every third " + std::to_string(time));
  }
}

// FlashKDA#34: Neumann series of the inverse; its terms reach 3432 for equal keys and must cancel.
TEST_P(ChannelDeltaRule, B06IdenticalKeys) {
  ChannelInputs in = inputs({.time = 256, .key_dim = 16, .value_dim = 8});
  in.h0 = in.dht = {};
  in.g.fill_(0);
  in.b.fill_(1);
  if (in.w) in.w.fill_(1);
  in.k.copy_(in.k.slice(1, 0, 1).clone().expand(in.k.shape()));
  // The written values v_t − v_{t−1} add up to v_t again; in bf16 each is rounded.
  for (const DType dtype : {DType::f32, low()})
    EXPECT_LE(relative_error(run_channel(in, dtype, device())[kO], exact_channel(in, dtype)[kO]),
              dtype == DType::bf16 ? 5e-2 : 1e-5);
  // Erasing twice what is there reflects: with constant v the read-out along k alternates between
  // 2v and 0 (a write gate of 1 instead of 2: v and 0).
  in.b.fill_(2);
  in.q.copy_(in.k);
  in.v.copy_(in.v.slice(1, 0, 1).clone().expand(in.v.shape()));
  in.scale = 1;
  const Tensor o = f32(in)[kO];
  for (int64_t t = 0; t < 256; ++t)
    for (int64_t j = 0; j < 8; ++j)
      EXPECT_NEAR(o.data<double>()[t * 8 + j],
                  t % 2 ? 0 : (in.kimi() ? 2 : 1) * in.v.data<double>()[j], 1e-3)
          << "token " << t;
}

// FLA#172: batch·heads beyond 65,535 on a grid dimension that ends there.
TEST_P(ChannelDeltaRule, B08ManySequences) {
  const int64_t batch = 10923, half = 5461;
  const ChannelInputs in = inputs(
      {.batch = batch, .time = 20, .heads = 6, .value_heads = 6, .key_dim = 2, .value_dim = 3});
  const auto part = [&](int64_t begin, int64_t end) {
    ChannelInputs p = in;
    for (Tensor* t : {&p.q, &p.k, &p.v, &p.g, &p.b, &p.w, &p.h0, &p.d_o, &p.dht})
      if (t->defined()) *t = t->slice(0, begin, end);
    return p;
  };
  const ChannelResult all = f32(in), a = f32(part(0, half)), b = f32(part(half, batch));
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].defined()) continue;
    EXPECT_TRUE(bitwise_equal(all[i].slice(0, 0, half), a[i])) << kChannelNames[i];
    EXPECT_TRUE(bitwise_equal(all[i].slice(0, half, batch), b[i])) << kChannelNames[i];
  }
}

// FLA#792: a mask was missing on the last, partial chunk's off-diagonal blocks.
TEST_P(ChannelDeltaRule, B18NothingIsReadBehindTheLastToken) {
  for (const int64_t time : {65, 80, 97, 127}) {
    const ChannelInputs in = inputs({.time = time, .key_dim = 16, .value_dim = 32});
    for (const DType dtype : {DType::f32, low()}) {
      ChannelInputs guarded = in;
      for (Tensor* t :
           {&guarded.q, &guarded.k, &guarded.v, &guarded.d_o, &guarded.g, &guarded.b, &guarded.w}) {
        if (!t->defined()) continue;
        Shape longer = t->shape();
        longer[1] = 192;
        const bool gate = t == &guarded.g || t == &guarded.b || t == &guarded.w;
        const DType to = gate ? accumulate_type(dtype) : dtype;
        const Tensor buffer =
            Tensor::full(longer, std::numeric_limits<double>::quiet_NaN(), to, device());
        const Tensor view = buffer.slice(1, 0, time);
        view.copy_(t->to(to, device()));
        ASSERT_TRUE(view.is_contiguous());  // so that the kernels see the NaNs behind it
        *t = view;
      }
      expect_channel_parity(run_channel(guarded, dtype, device()), exact_channel(in, dtype),
                            dtype == DType::bf16 ? 8e-3 : 2e-5,
                            dtype == DType::bf16 ? 1.5e-2 : 2e-5, std::to_string(time));
    }
  }
}

// FLA#941, #1018: blocks of V overwrote each other's sums.
TEST_P(ChannelDeltaRule, B40ValueColumnsAreIndependentAndSummed) {
  const ChannelInputs in = inputs({.batch = 2, .time = 100, .key_dim = 32, .value_dim = 128});
  const auto half = [&](int64_t begin) {
    ChannelInputs p = in;
    for (Tensor* t : {&p.v, &p.w, &p.h0, &p.d_o, &p.dht})
      if (t->defined()) *t = t->slice(3, begin, begin + 64);
    return f32(p);
  };
  const ChannelResult all = f32(in), a = half(0), b = half(64);
  EXPECT_LE(relative_error(all[kO].slice(3, 0, 64), a[kO]), 1e-6);
  EXPECT_LE(relative_error(all[kO].slice(3, 64, 128), b[kO]), 1e-6);
  EXPECT_LE(relative_error(all[kDv].slice(3, 0, 64), a[kDv]), 1e-6);
  EXPECT_LE(relative_error(all[kDh0].slice(3, 64, 128), b[kDh0]), 1e-6);
  for (const ChannelField i : {kDq, kDk, kDg, kDb}) {
    const Tensor sum = a[i].clone();
    for (int64_t j = 0; j < sum.numel(); ++j) sum.data<double>()[j] += b[i].data<double>()[j];
    EXPECT_LE(relative_error(all[i], sum), 2e-6) << kChannelNames[i];
  }
}

// Keeping the inputs only changes what is saved and not a bit of what comes out.
TEST_P(ChannelDeltaRule, RecomputeGivesTheSameBits) {
  for (const DType dtype : {DType::f32, low()}) {
    ChannelInputs in = inputs({.time = 150, .value_heads = 2, .key_dim = 64, .value_dim = 32});
    const ChannelResult kept = run_channel(in, dtype, device());
    in.recompute = true;
    const ChannelResult again = run_channel(in, dtype, device());
    for (size_t i = 0; i < kept.size(); ++i) {
      if (!kept[i].defined()) continue;
      EXPECT_TRUE(bitwise_equal(kept[i], again[i])) << kChannelNames[i];
    }
  }
}

// FLA#1214: the state's gradient overflowed a 16-bit type. It is f32 here.
TEST_P(ChannelDeltaRule, B42LargeUpstreamGradient) {
  ChannelInputs in = inputs({.time = 200, .key_dim = 32, .value_dim = 32});
  in.g.fill_(-1e-3);
  for (Tensor* t : {&in.d_o, &in.dht})
    for (int64_t i = 0; i < t->numel(); ++i) t->data<double>()[i] *= 1e6;
  expect_channel_parity(run_channel(in, low(), device()), exact_channel(in, low()), low_outputs(),
                        low_gradients());
}

// FLA#988: wrong dk and dbeta at one chunk length only.
TEST_P(ChannelDeltaRule, B64ChunkLengthDoesNotMatter) {
  ChannelInputs in = inputs(
      {.batch = 1, .time = 300, .heads = 2, .value_heads = 4, .key_dim = 32, .value_dim = 24}, 5,
      {0, 31, 31, 170, 300});
  const ChannelResult f32_want = exact_channel(in, DType::f32), low_want = exact_channel(in, low());
  for (const int64_t chunk : {16, 32, 64, 128}) {
    in.chunk = chunk;
    expect_channel_parity(f32(in), f32_want, 1e-5, 1e-5, "chunk " + std::to_string(chunk));
    expect_channel_parity(run_channel(in, low(), device()), low_want, low_outputs(),
                          low_gradients(), "chunk " + std::to_string(chunk));
  }
}

// exp(a−b) written as exp(a)·exp(−b) fails once the decay inside a tile passes e^88; here channels
// of one head differ by as much.
TEST_P(ChannelDeltaRule, DecayBeyondTheRangeOfFloats) {
  for (const double g : {-1.4, -3.0, -6.0, -60.0, -2000.0}) {
    ChannelInputs in = inputs({.time = 130, .key_dim = 16, .value_dim = 16});
    for (int64_t i = 0; i < in.g.numel(); ++i)
      in.g.data<double>()[i] = (i / 16 + i % 16) % 7 == 3 ? -1e-4 : i % 16 == 5 ? -0.01 : g;
    expect_channel_parity(f32(in), exact_channel(in, DType::f32), 1e-5, 2e-5, std::to_string(g));
    expect_channel_parity(run_channel(in, low(), device()), exact_channel(in, low()), low_outputs(),
                          low_gradients(), "low " + std::to_string(g));
  }
}

// Where every decay is near zero its gradient is tiny; taken as a difference of sums it is noise,
// which the gate's backward would multiply by exp(A_log).
TEST_P(ChannelDeltaRule, GradientOfTinyDecaysIsAccurate) {
  ChannelInputs in = inputs({.time = 70, .key_dim = 16, .value_dim = 32});
  for (int64_t i = 0; i < in.g.numel(); ++i) in.g.data<double>()[i] = -20 - 0.1 * double(i % 5);
  EXPECT_LE(relative_error(f32(in)[kDg], exact_channel(in, DType::f32)[kDg]), 1e-5);
}

// A Neumann series of the inverse loses 3e-2 (tf32) to 0.4 (bf16) here; substitution in f32 does
// not.
TEST_P(ChannelDeltaRule, SimilarKeys) {
  for (const double erase : {1.0, 2.0}) {
    ChannelInputs in = inputs({.time = 200, .key_dim = 64, .value_dim = 64});
    const Tensor common = in.k.slice(1, 0, 1).clone();
    for (int64_t t = 0; t < 200; ++t)
      for (int64_t j = 0; j < 64; ++j) {
        double& k = in.k.data<double>()[t * 64 + j];
        k = std::sqrt(0.8) * common.data<double>()[j] + std::sqrt(0.2) * k;
      }
    normalize_rows(in.k);
    in.b.fill_(erase);
    for (int64_t i = 0; i < in.g.numel(); ++i) in.g.data<double>()[i] *= 0.01;
    expect_channel_parity(f32(in), exact_channel(in, DType::f32), 2e-5, 2e-5,
                          std::to_string(erase));
    if (erase == 1)
      expect_channel_parity(run_channel(in, low(), device()), exact_channel(in, low()),
                            low_outputs(), low_gradients());
  }
}

// A decay of −inf clears its channel and nothing else.
TEST_P(ChannelDeltaRule, InfiniteDecayClearsAChannel) {
  ChannelInputs in = inputs({.time = 140, .key_dim = 16, .value_dim = 16});
  ChannelInputs finite = in;
  finite.g = in.g.clone();
  for (const int64_t d : {0, 3, 15}) {
    in.g.data<double>()[77 * 16 + d] = -INFINITY;
    finite.g.data<double>()[77 * 16 + d] = -1e4;
  }
  const ChannelResult got = f32(in);
  EXPECT_TRUE(all_values_finite(got));
  for (const int64_t d : {0, 3, 15}) EXPECT_EQ(got[kDg].data<double>()[77 * 16 + d], 0);
  expect_channel_parity(got, exact_channel(finite, DType::f32), 1e-5, 2e-5);
}

// Equal channels are one decay per head: the scalar member of the family, separately written.
TEST_P(ChannelDeltaRule, EqualChannelsAreTheScalarDecay) {
  ChannelInputs in = inputs({.batch = 2, .time = 150, .heads = 2, .value_heads = 4, .key_dim = 32});
  const Shape heads = in.v.shape().first(3);
  const Tensor g = in.g.slice(3, 0, 1).clone(), beta = Draw(9).uniform(heads, 0, 1);
  in.g.copy_(g.expand(in.g.shape()));
  in.b = in.kimi() ? beta : beta.unsqueeze(-1).expand(in.g.shape()).contiguous();
  if (!in.kimi()) in.w = beta.unsqueeze(-1).expand(in.v.shape()).contiguous();
  const auto on = [&](const Tensor& t) { return t.to(DType::f32, device()); };
  const DeltaRuleOutput want =
      gated_delta_rule(on(in.q), on(in.k), on(in.v), on(g.reshape(heads)), on(beta), on(in.h0),
                       {.scale = in.scale, .want_final_state = true});
  const ChannelResult got = f32(in);
  EXPECT_LE(relative_error(got[kO], want.o.value().to(DType::f64, {})), 2e-6);
  EXPECT_LE(relative_error(got[kHt], want.ht.value().to(DType::f64, {})), 2e-6);
}

// o and the final state of prefilling `split` tokens and decoding the rest one by one.
inline std::pair<Tensor, Tensor> channel_prefill_and_step(const ChannelInputs& in, int64_t split,
                                                          DType dtype, Device device) {
  const DType gate = accumulate_type(dtype);
  const Tensor q = in.q.to(dtype, device), k = in.k.to(dtype, device), v = in.v.to(dtype, device);
  const Tensor g = in.g.to(gate, device), b = in.b.to(gate, device);
  const Tensor w = in.w ? in.w.to(gate, device) : Tensor();
  const auto first = [&](const Tensor& t) { return t ? t.slice(1, 0, split) : Tensor(); };
  const DeltaRuleOutput head = apply_channel(in, first(q), first(k), first(v), first(g), first(b),
                                             first(w), in.h0.to(gate, device), true);
  const Tensor state = head.ht.value(), o = Tensor::zeros_like(v);
  first(o).copy_(head.o.value());
  for (int64_t t = split; t < v.size(1); ++t) {
    const auto now = [&](const Tensor& x) { return x.select(1, t); };
    o.select(1, t).copy_(w ? gdn2_step(now(q), now(k), now(v), now(g), now(b), now(w), state,
                                       {.scale = in.scale, .layout = {}})
                           : kda_step(now(q), now(k), now(v), now(g), now(b), state,
                                      {.scale = in.scale, .layout = {}}));
  }
  return {o.to(DType::f64, {}), state.to(DType::f64, {})};
}

TEST_P(ChannelDeltaRule, PrefillThenStepsEqualsTheWholeSequence) {
  for (const int64_t width : {5, 64, 144}) {
    const ChannelInputs in = inputs({.batch = 2,
                                     .time = 70,
                                     .heads = 2,
                                     .value_heads = 4,
                                     .key_dim = width,
                                     .value_dim = width + 1});
    for (const DType dtype : {DType::f32, low()}) {
      const ChannelResult want = exact_channel(in, dtype);
      const double limit = dtype == DType::bf16 ? 8e-3 : 1e-5;
      for (const int64_t split : {0, 1, 64, 69}) {
        const auto [o, state] = channel_prefill_and_step(in, split, dtype, device());
        EXPECT_LE(relative_error(o, want[kO]), limit) << width << " split " << split;
        EXPECT_LE(relative_error(state, want[kHt]), limit) << width << " split " << split;
      }
    }
  }
}

}  // namespace ebb::testing
