// Gated linear attention with a decay per channel against closed forms and against faults other
// implementations had; the same tests on every device (instantiated in
// gated_linear_attention_test.cpp and, for the GPU, gated_linear_attention_cuda_test.cpp). The ids
// B.. as in linear_attention_cases.h.
#pragma once
#include <limits>

#include "tests/device_param.h"
#include "tests/linear_attention_inputs.h"

namespace ebb::testing {

class ChannelLinearAttention : public OnDevice {
 protected:
  GlaResult f32(const GlaInputs& in) const { return run(in, DType::f32, device()); }
  // bf16 where it exists; f32 on the CPU.
  DType low() const { return device().is_cuda() ? DType::bf16 : DType::f32; }
  double low_outputs() const { return device().is_cuda() ? 8e-3 : 2e-5; }
  double low_gradients() const { return device().is_cuda() ? 1.5e-2 : 2e-5; }
  void expect_both(const GlaInputs& in, const std::string& what) const {
    expect_parity(f32(in), exact(in, DType::f32), 2e-5, 2e-5, what);
    expect_parity(run(in, low(), device()), exact(in, low()), low_outputs(), low_gradients(),
                  what + " low");
  }
  static GlaInputs inputs(GlaShape s, uint64_t seed = 3, std::vector<int64_t> cu = {}) {
    s.by_channel = true;
    return gla_inputs(s, seed, std::move(cu));
  }
};

TEST_P(ChannelLinearAttention, B02StrongDecayStaysFinite) {
  GlaInputs in = inputs({.time = 128, .heads = 2});
  in.g.fill_(-30);
  for (const DType dtype : {DType::f32, low()}) EXPECT_TRUE(finite(run(in, dtype, device())));
  expect_both(in, "");
}

TEST_P(ChannelLinearAttention, B04DecayOfExactlyOneIsPlainLinearAttention) {
  for (const int64_t time : {7, 50, 1000}) {
    GlaInputs in = inputs({.time = time, .key_dim = 8, .value_dim = 8});
    in.g.fill_(0);
    expect_parity(f32(in), exact(in, DType::f32), 1e-5, 2e-5, std::to_string(time));
    for (int64_t i = 0; i < in.g.numel(); i += 2) in.g.data<double>()[i] = -0.7;
    expect_parity(f32(in), exact(in, DType::f32), 1e-5, 2e-5, std::to_string(time));
  }
}

TEST_P(ChannelLinearAttention, B08ManySequences) {
  const int64_t batch = 10923, half = 5461;
  const GlaInputs in =
      inputs({.batch = batch, .time = 6, .groups = 2, .heads = 6, .key_dim = 2, .value_dim = 3});
  const auto part = [&](int64_t begin, int64_t end) {
    GlaInputs p = in;
    for (Tensor* t : {&p.q, &p.k, &p.v, &p.g, &p.h0, &p.d_o, &p.dht}) *t = t->slice(0, begin, end);
    return p;
  };
  const auto whole = fields(f32(in)), first = fields(f32(part(0, half))),
             second = fields(f32(part(half, batch)));
  for (size_t i = 0; i < whole.size(); ++i) {
    if (!whole[i].defined()) continue;
    EXPECT_TRUE(bitwise_equal(whole[i].slice(0, 0, half), first[i])) << kGlaNames[i];
    EXPECT_TRUE(bitwise_equal(whole[i].slice(0, half, batch), second[i])) << kGlaNames[i];
  }
}

TEST_P(ChannelLinearAttention, B18NothingIsReadBehindTheLastToken) {
  for (const int64_t time : {1, 65, 80, 97, 127})
    for (const DType dtype : {DType::f32, low()}) {
      const GlaInputs in = inputs({.time = time, .heads = 2, .value_dim = 32});
      const GlaResult want = exact(in, dtype);
      GlaInputs guarded = in;
      for (Tensor* t : {&guarded.q, &guarded.k, &guarded.v, &guarded.g, &guarded.d_o}) {
        Shape longer = t->shape();
        longer[1] = 192;
        const DType to = t == &guarded.g ? accumulate_type(dtype) : dtype;
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

TEST_P(ChannelLinearAttention, B30EveryShapeOfTile) {
  const int64_t sizes[][2] = {{1, 1},    {8, 8},    {16, 64},   {64, 16},  {72, 40},
                              {128, 64}, {64, 128}, {100, 200}, {256, 256}};
  uint64_t seed = 30;
  for (const auto& [k, v] : sizes)
    for (const int64_t time : {1, 15, 63, 64, 65, 200})
      expect_both(
          inputs({.batch = 2,
                  .time = time,
                  .groups = time == 65 ? 1 : 2,
                  .heads = time == 63 ? 6 : 2,
                  .key_dim = k,
                  .value_dim = v},
                 ++seed),
          "K " + std::to_string(k) + " V " + std::to_string(v) + " T " + std::to_string(time));
}

TEST_P(ChannelLinearAttention, B40ValueColumnsAreIndependentAndSummed) {
  const GlaInputs in =
      inputs({.batch = 2, .time = 100, .heads = 2, .key_dim = 32, .value_dim = 128});
  const auto half = [&](int64_t begin) {
    GlaInputs p = in;
    for (Tensor* t : {&p.v, &p.h0, &p.d_o, &p.dht}) *t = t->slice(3, begin, begin + 64);
    return f32(p);
  };
  const GlaResult all = f32(in), a = half(0), b = half(64);
  EXPECT_LE(relative_error(all.o.slice(3, 0, 64), a.o), 1e-6);
  EXPECT_LE(relative_error(all.o.slice(3, 64, 128), b.o), 1e-6);
  EXPECT_LE(relative_error(all.dv.slice(3, 0, 64), a.dv), 1e-6);
  EXPECT_LE(relative_error(all.dh0.slice(3, 64, 128), b.dh0), 1e-6);
  const auto whole = fields(all), first = fields(a), second = fields(b);
  for (const size_t i : {3, 4, 6}) {
    const Tensor sum = first[i].clone();
    for (int64_t j = 0; j < sum.numel(); ++j) sum.data<double>()[j] += second[i].data<double>()[j];
    EXPECT_LE(relative_error(whole[i], sum), 3e-6) << kGlaNames[i];
  }
}

TEST_P(ChannelLinearAttention, B42LargeUpstreamGradient) {
  GlaInputs in = inputs({.time = 200, .heads = 2, .key_dim = 32, .value_dim = 32});
  in.g.fill_(-1e-3);
  for (Tensor* t : {&in.d_o, &in.dht})
    for (int64_t i = 0; i < t->numel(); ++i) t->data<double>()[i] *= 1e6;
  expect_parity(run(in, low(), device()), exact(in, low()), low_outputs(), low_gradients());
}

TEST_P(ChannelLinearAttention, B46AnyChunkLength) {
  for (const int64_t time : {17, 200}) {
    GlaInputs in = inputs({.time = time, .groups = 1, .heads = 3, .value_dim = 24}, 5);
    for (const int64_t chunk : {1, 16, 37, 40, 50, 64, 100, 128, 256}) {
      in.chunk = chunk;
      expect_both(in, "chunk " + std::to_string(chunk) + " T " + std::to_string(time));
    }
  }
}

// Each channel with its own kind of decay: some keep everything, some nothing.
TEST_P(ChannelLinearAttention, DecayBeyondTheRangeOfFloats) {
  for (const double g : {-1.4, -3.0, -6.0, -60.0, -2000.0}) {
    GlaInputs in = inputs({.time = 130}, 3);
    for (int64_t i = 0; i < in.g.numel(); ++i)
      in.g.data<double>()[i] = (i + i / 16) % 7 == 3 ? -1e-4 : g;
    expect_both(in, std::to_string(g));
  }
}

TEST_P(ChannelLinearAttention, EqualChannelsAreOneDecayPerHead) {
  GlaInputs in = inputs({.batch = 2, .time = 150, .heads = 2, .key_dim = 32, .value_dim = 24});
  GlaInputs scalar = in;
  scalar.g = in.g.slice(3, 0, 1).contiguous().view({2, 150, 2});
  in.g = scalar.g.view({2, 150, 2, 1}).expand({2, 150, 2, 32}).contiguous();
  const GlaResult a = f32(in), b = f32(scalar);
  EXPECT_LE(relative_error(a.o, b.o), 2e-6);
  EXPECT_LE(relative_error(a.dk, b.dk), 4e-6);
  const Tensor sum = Tensor::zeros_like(b.dg);
  for (int64_t i = 0; i < a.dg.numel(); ++i) sum.data<double>()[i / 32] += a.dg.data<double>()[i];
  EXPECT_LE(relative_error(sum, b.dg), 1e-5);
}

TEST_P(ChannelLinearAttention, InfiniteDecayStartsAfresh) {
  GlaInputs in = inputs({.time = 140});
  in.dht = {};
  in.g.select(1, 77).fill_(-std::numeric_limits<double>::infinity());
  const GlaResult got = f32(in);
  in.cu = {0, 77, 140};
  const Tensor two = Tensor::zeros({2, 1, 16, 16}, DType::f64);
  two.slice(0, 0, 1).copy_(in.h0);
  in.h0 = two;
  GlaResult want = f32(in);
  EXPECT_EQ(euclidean_norm(got.dg.select(1, 77)), 0);
  want.dg.select(1, 77).fill_(0);
  EXPECT_TRUE(finite(got));
  want.dh0 = want.dh0.slice(0, 0, 1);
  expect_parity(got, want, 2e-6, 4e-6);
}

// models.md 4.2 with k = 1 − e^g, whose gradient goes to g.
TEST_P(ChannelLinearAttention, SharedKey) {
  for (const int64_t width : {5, 64, 128}) {
    GlaInputs in = inputs(
        {.batch = 2, .time = 100, .groups = 2, .heads = 2, .key_dim = width, .value_dim = width});
    in.k = {};
    expect_both(in, std::to_string(width));
  }
}

TEST_P(ChannelLinearAttention, B26PrefillThenStepsEqualsTheWholeSequence) {
  for (const bool shared : {false, true})
    for (const int64_t width : {5, 64, 200}) {
      GlaInputs in = inputs({.batch = 2,
                             .time = 70,
                             .groups = shared ? 4 : 2,
                             .heads = 4,
                             .key_dim = width,
                             .value_dim = width == 64 ? 128 : width});
      if (shared) in.k = {};
      for (const DType dtype : {DType::f32, low()}) {
        const DType gate = accumulate_type(dtype);
        const Tensor q = in.q.to(dtype, device()), v = in.v.to(dtype, device());
        const Tensor k = shared ? Tensor() : in.k.to(dtype, device());
        const Tensor g = in.g.to(gate, device());
        const GlaResult want = exact(in, dtype);
        for (const int64_t split : {0, 1, 64, 69}) {
          const auto first = [&](const Tensor& t) { return t ? t.slice(1, 0, split) : Tensor(); };
          const LinearAttentionOutput head = gated_linear_attention(
              first(q), first(k), first(v), first(g), in.h0.to(gate, device()),
              {.scale = in.scale, .want_final_state = true});
          const Tensor state = head.ht.value().clone(), o = Tensor::zeros_like(v);
          first(o).copy_(head.o.value());
          for (int64_t t = split; t < 70; ++t)
            o.select(1, t).copy_(gated_linear_attention_step(
                q.select(1, t), shared ? Tensor() : k.select(1, t), v.select(1, t), g.select(1, t),
                state, {.scale = in.scale}));
          const double limit = dtype == DType::bf16 ? 8e-3 : 1e-5;
          EXPECT_LE(relative_error(o, want.o), limit) << "split " << split;
          EXPECT_LE(relative_error(state, want.ht), limit) << "split " << split;
        }
      }
    }
}

}  // namespace ebb::testing
