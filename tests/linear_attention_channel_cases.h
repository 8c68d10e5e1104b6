// Gated linear attention with a decay per channel against closed forms and against faults other
// implementations had; the same tests on every device (instantiated in
// gated_linear_attention_test.cpp and, for the GPU, gated_linear_attention_cuda_test.cpp). The ids
// B.. as in linear_attention_cases.h.
#pragma once
#include "tests/linear_attention_shared_cases.h"

namespace ebb::testing {

class ChannelLinearAttention : public LinearAttentionCases {
 protected:
  ChannelLinearAttention() : LinearAttentionCases(true) {}
};

TEST_P(ChannelLinearAttention, B02StrongDecayStaysFinite) { strong_decay_stays_finite(); }
TEST_P(ChannelLinearAttention, B08ManySequences) { many_sequences(); }
TEST_P(ChannelLinearAttention, B18NothingIsReadBehindTheLastToken) {
  nothing_is_read_behind_the_last_token();
}
TEST_P(ChannelLinearAttention, B30EveryShapeOfTile) { every_shape_of_tile(); }
TEST_P(ChannelLinearAttention, B40ValueColumnsAreIndependentAndSummed) {
  value_columns_are_independent_and_summed();
}
TEST_P(ChannelLinearAttention, B42LargeUpstreamGradient) { large_upstream_gradient(); }
TEST_P(ChannelLinearAttention, B46AnyChunkLength) { any_chunk_length(); }
TEST_P(ChannelLinearAttention, InfiniteDecayStartsAfresh) { infinite_decay_starts_afresh(); }

TEST_P(ChannelLinearAttention, B04DecayOfExactlyOneIsPlainLinearAttention) {
  for (const int64_t time : {7, 50, 1000}) {
    GlaInputs in = inputs({.time = time, .key_dim = 8, .value_dim = 8});
    in.g.fill_(0);
    expect_parity(f32(in), exact(in, DType::f32), 1e-5, 2e-5, std::to_string(time));
    for (int64_t i = 0; i < in.g.numel(); i += 2) in.g.data<double>()[i] = -0.7;
    expect_parity(f32(in), exact(in, DType::f32), 1e-5, 2e-5, std::to_string(time));
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

// models.md 4.2 with k = 1 − e^g, whose gradient goes to g.
TEST_P(ChannelLinearAttention, SharedKey) {
  for (const int64_t width : {5, 64, 128}) {
    GlaInputs in = inputs(
        {.batch = 2, .time = 100, .groups = 2, .heads = 2, .key_dim = width, .value_dim = width});
    in.k = {};
    expect_both(in, std::to_string(width));
  }
}

// A first token reads nothing but its own value, times q·k. Where the two are nearly orthogonal, a
// score from rounded products of decays is noise, which the norm of a model blows up to full size.
TEST_P(ChannelLinearAttention, B31FirstTokenOfNearlyOrthogonalQueryAndKey) {
  for (const int64_t time : {1, 8, 70})
    for (const int64_t width : {16, 64, 128}) {
      GlaInputs in =
          inputs({.time = time, .groups = 2, .heads = 2, .key_dim = width, .value_dim = 32});
      in.h0 = {};
      double *q = in.q.data<double>(), *k = in.k.data<double>();
      for (int64_t i = 0; i < 2 * width; i += 2) {
        k[i] = q[i + 1], k[i + 1] = -q[i];
        if (i % width == 0) k[i] *= 1.125;
      }
      const Tensor want = exact(in, low()).o, got = run(in, low(), device()).o;
      EXPECT_LE(relative_error(got.slice(1, 0, 1), want.slice(1, 0, 1)), low_outputs())
          << "T " << time << " K " << width;
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
