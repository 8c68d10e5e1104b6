// Gated linear attention with a decay per head and SSD against closed forms and against faults
// other implementations had; the same tests on every device (instantiated in
// gated_linear_attention_test.cpp and, for the GPU, gated_linear_attention_cuda_test.cpp). The ids
// B.. name reports in the trackers of such projects, given at each test.
#pragma once
#include "ops/ssd.h"
#include "tests/linear_attention_shared_cases.h"

namespace ebb::testing {

class LinearAttention : public LinearAttentionCases {
 protected:
  LinearAttention() : LinearAttentionCases(false) {}
};

TEST_P(LinearAttention, B02StrongDecayStaysFinite) { strong_decay_stays_finite(); }
TEST_P(LinearAttention, B08ManySequences) { many_sequences(); }
TEST_P(LinearAttention, B18NothingIsReadBehindTheLastToken) {
  nothing_is_read_behind_the_last_token();
}
TEST_P(LinearAttention, B30EveryShapeOfTile) { every_shape_of_tile(); }
TEST_P(LinearAttention, B40ValueColumnsAreIndependentAndSummed) {
  value_columns_are_independent_and_summed();
}
TEST_P(LinearAttention, B42LargeUpstreamGradient) { large_upstream_gradient(); }
TEST_P(LinearAttention, B46AnyChunkLength) { any_chunk_length(); }
TEST_P(LinearAttention, InfiniteDecayStartsAfresh) { infinite_decay_starts_afresh(); }

// FLA#104, #389: terms with exponent 0 were dropped.
TEST_P(LinearAttention, B04DecayOfExactlyOneIsPlainLinearAttention) {
  for (const int64_t time : {7, 50, 1000}) {
    GlaInputs in = gla_inputs({.time = time, .key_dim = 8, .value_dim = 8});
    in.g.fill_(0);
    expect_parity(f32(in), exact(in, DType::f32), 1e-5, 2e-5, std::to_string(time));
    for (int64_t t = 1; t < time; t += 2) in.g.data<double>()[t] = -0.7;
    expect_parity(f32(in), exact(in, DType::f32), 1e-5, 2e-5, std::to_string(time));
  }
}

// Heads of a wider projection, as a model's convolution gives them, are read where they lie.
TEST_P(LinearAttention, SlicesOfAProjection) {
  const int64_t sizes[][3] = {{128, 64, 0}, {16, 24, 0}, {16, 24, 1}};  // K, V, columns before
  for (const auto& [k, v, before] : sizes)
    for (const DType dtype : {DType::f32, low()}) {
      const GlaInputs in = gla_inputs(
          {.batch = 2, .time = 130, .groups = 1, .heads = 3, .key_dim = k, .value_dim = v});
      GlaInputs sliced = in;
      const int64_t width = before + 2 * k + 3 * v + 8;
      const Tensor wide =
          Tensor::full({2, 130, width}, std::numeric_limits<double>::quiet_NaN(), dtype, device());
      int64_t at = before;
      for (Tensor* t : {&sliced.v, &sliced.k, &sliced.q}) {
        const int64_t columns = t->size(2) * t->size(3);
        const Tensor slice = wide.slice(2, at, at + columns);
        slice.copy_(t->reshape({2, 130, columns}).to(dtype, device()));
        *t = slice.view(t->shape());
        at += columns;
      }
      // Other kernels where the slices are not aligned.
      const double limit = before && dtype == DType::bf16 ? 1.5e-2 : 1e-6;
      const auto a = fields(run(in, dtype, device())), b = fields(run(sliced, dtype, device()));
      for (size_t i = 0; i < a.size(); ++i)
        if (a[i].defined()) {
          EXPECT_LE(relative_error(b[i], a[i]), limit) << kGlaNames[i];
        }
    }
}

// Runs shorter than a chunk, as long, longer, and longer than the sequences; packed ones, too.
TEST_P(LinearAttention, ContributionsOfAnyRunLength) {
  const GlaShape shape{.batch = 2, .time = 150, .groups = 1, .heads = 2, .value_dim = 24};
  for (const int64_t memory : {1, 7, 16, 64, 70, 100, 128, 149, 150, 400})
    expect_both(gla_inputs(shape, 8, {}, memory), "S " + std::to_string(memory));
  for (const int64_t memory : {16, 80})
    expect_both(gla_inputs(shape, 9, {0, 0, 1, 90, 90, 250, 300}, memory),
                "packed, S " + std::to_string(memory));
}

// exp(a−b) written as exp(a)·exp(−b) fails once the decay inside a tile passes e^88.
TEST_P(LinearAttention, DecayBeyondTheRangeOfFloats) {
  for (const double g : {-1.4, -3.0, -6.0, -60.0, -2000.0}) {
    GlaInputs in = gla_inputs({.time = 130}, 3, {}, 90);
    for (int64_t t = 0; t < 130; ++t) in.g.data<double>()[t] = t % 7 == 3 ? -1e-4 : g;
    expect_both(in, std::to_string(g));
  }
}

// mamba#500, #641: step() and forward() disagreed. FLA#351: with an asymmetric state.
TEST_P(LinearAttention, B26PrefillThenStepsEqualsTheWholeSequence) {
  for (const int64_t width : {5, 64, 200}) {
    const GlaInputs in = gla_inputs({.batch = 2,
                                     .time = 70,
                                     .groups = 2,
                                     .heads = 4,
                                     .key_dim = width,
                                     .value_dim = width == 64 ? 128 : width});
    for (const DType dtype : {DType::f32, low()}) {
      const DType gate = accumulate_type(dtype);
      const Tensor q = in.q.to(dtype, device()), k = in.k.to(dtype, device());
      const Tensor v = in.v.to(dtype, device()), g = in.g.to(gate, device());
      const Tensor w = in.weight.to(gate, device()), skip = in.skip.to(gate, device());
      const GlaResult want = exact(in, dtype);
      for (const int64_t split : {0, 1, 64, 69}) {
        const auto first = [&](const Tensor& t) { return t.slice(1, 0, split); };
        const LinearAttentionOutput head = gated_linear_attention(
            first(q), first(k), first(v), first(g), in.h0.to(gate, device()),
            {.scale = in.scale, .want_final_state = true, .weight = first(w), .skip = skip});
        const Tensor state = head.ht.value().clone(), o = Tensor::zeros_like(v);
        first(o).copy_(head.o.value());
        for (int64_t t = split; t < 70; ++t)
          o.select(1, t).copy_(gated_linear_attention_step(
              q.select(1, t), k.select(1, t), v.select(1, t), g.select(1, t), state,
              {.scale = in.scale, .weight = w.select(1, t), .skip = skip}));
        const double limit = dtype == DType::bf16 ? 8e-3 : 1e-5;
        EXPECT_LE(relative_error(o, want.o), limit) << "split " << split;
        EXPECT_LE(relative_error(state, want.ht), limit) << "split " << split;
      }
    }
  }
}

// ---- SSD ----

struct SsdInputs {
  Tensor x, dt, A, B, C, h0, D, dt_bias, dy, dht;
};
inline SsdInputs ssd_inputs(const GlaShape& s, double dt_mean, uint64_t seed = 7) {
  Draw draw(seed);
  const Shape v{s.batch, s.time, s.heads, s.value_dim};
  const Shape keys{s.batch, s.time, s.groups, s.key_dim};
  const Shape state{s.batch, s.heads, s.key_dim, s.value_dim};
  return {draw.normal(v),
          draw.normal(v.first(3), 1, dt_mean),
          draw.uniform({s.heads}, -16, -1),
          draw.normal(keys),
          draw.normal(keys, 1 / std::sqrt(double(s.key_dim))),
          draw.normal(state),
          draw.normal({s.heads}),
          draw.normal({s.heads}),
          draw.normal(v),
          draw.normal(state)};
}
// y, ht and the gradients of x, dt, A, B, C, h0, D, dt_bias.
inline std::vector<Tensor> run_ssd(const SsdInputs& in, DType dtype, Device device,
                                   const SsdOptions& base = {}) {
  const DType wide = accumulate_type(dtype);
  const auto leaf = [&](const Tensor& t, DType to) { return Var::leaf(t.to(to, device)); };
  const std::vector<Var> v = {leaf(in.x, dtype), leaf(in.dt, dtype),    leaf(in.A, wide),
                              leaf(in.B, dtype), leaf(in.C, dtype),     leaf(in.h0, wide),
                              leaf(in.D, wide),  leaf(in.dt_bias, wide)};
  SsdOptions options = base;
  options.D = v[6], options.dt_bias = v[7], options.want_final_state = true;
  const SsdOutput r = ssd(v[0], v[1], v[2], v[3], v[4], v[5], options);
  const std::vector<Var> roots = {r.y, r.ht};
  const std::vector<Tensor> dy = {in.dy.to(dtype, device), in.dht.to(wide, device)};
  backward(roots, dy);
  std::vector<Tensor> out = {r.y.value(), r.ht.value()};
  for (const Var& x : v) out.push_back(x.grad());
  for (Tensor& t : out) t = t.to(DType::f64, {});
  return out;
}

// mamba#368: padded rows went through bias and softplus and were no longer zero. Large Δ and |A|,
// a ragged last chunk.
TEST_P(LinearAttention, B20LargeStepsInARaggedChunk) {
  const GlaShape shape{.batch = 2, .time = 67, .heads = 4, .key_dim = 16, .value_dim = 32};
  for (const double mean : {-6.0, 0.0, 5.0, 40.0}) {
    SsdInputs in = ssd_inputs(shape, mean);
    in.dt_bias.fill_(5);
    for (const DType dtype : {DType::f32, low()}) {
      SsdInputs rounded = in;
      for (Tensor* t : {&rounded.x, &rounded.dt, &rounded.B, &rounded.C, &rounded.dy})
        *t = t->to(dtype).to(DType::f64);
      for (Tensor* t : {&rounded.A, &rounded.h0, &rounded.D, &rounded.dt_bias, &rounded.dht})
        *t = t->to(accumulate_type(dtype)).to(DType::f64);
      const auto want = run_ssd(rounded, DType::f64, {});
      const auto got = run_ssd(in, dtype, device());
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_LE(relative_error(got[i], want[i]), dtype == DType::bf16 ? 1.5e-2 : 5e-5)
            << "tensor " << i << ", dt " << mean;
        for (double x : got[i].to_vector<double>()) ASSERT_TRUE(std::isfinite(x));
      }
    }
  }
}

// A head may be one that forgets everything at once, or nothing.
TEST_P(LinearAttention, LimitsOfTheStep) {
  SsdInputs in = ssd_inputs({.time = 30, .heads = 2, .key_dim = 8, .value_dim = 8}, 0);
  const auto open = run_ssd(in, DType::f32, device());
  const auto wide = run_ssd(in, DType::f32, device(), {.dt_min = 0, .dt_max = 1e9});
  for (size_t i = 0; i < open.size(); ++i) EXPECT_TRUE(bitwise_equal(open[i], wide[i])) << i;
  // Everything clamped: Δ is 0.1 whatever dt says, and no gradient reaches dt or its bias.
  const auto clamped = run_ssd(in, DType::f32, device(), {.dt_min = 0.1, .dt_max = 0.1});
  in.dt.fill_(3);
  const auto other = run_ssd(in, DType::f32, device(), {.dt_min = 0.1, .dt_max = 0.1});
  EXPECT_TRUE(bitwise_equal(clamped[0], other[0]));
  for (const size_t i : {3, 9}) EXPECT_EQ(euclidean_norm(clamped[i]), 0) << i;
}

// FLA#63: bias and softplus twice in the step.
TEST_P(LinearAttention, B24SsdStepsEqualTheWholeSequence) {
  const SsdInputs in = ssd_inputs(
      {.batch = 3, .time = 20, .groups = 2, .heads = 4, .key_dim = 64, .value_dim = 32}, -1);
  for (const DType dtype : {DType::f32, low()})
    for (const bool log_A : {false, true}) {
      const DType wide = accumulate_type(dtype);
      const Tensor x = in.x.to(dtype, device()), dt = in.dt.to(dtype, device());
      const Tensor B = in.B.to(dtype, device()), C = in.C.to(dtype, device());
      Tensor A = in.A.to(wide, device());
      if (log_A) A = Tensor::full({4}, 0.5, wide, device());
      const SsdOptions options{.D = in.D.to(wide, device()),
                               .dt_bias = in.dt_bias.to(wide, device()),
                               .log_A = log_A,
                               .want_final_state = true};
      const SsdOutput want = ssd(x, dt, A, B, C, in.h0.to(wide, device()), options);
      const Tensor state = in.h0.to(wide, device()).clone(), y = Tensor::zeros_like(x);
      for (int64_t t = 0; t < 20; ++t)
        y.select(1, t).copy_(ssd_step(x.select(1, t), dt.select(1, t), A, B.select(1, t),
                                      C.select(1, t), state, options));
      const double limit = dtype == DType::bf16 ? 8e-3 : 1e-5;
      EXPECT_LE(relative_error(y, want.y.value()), limit);
      EXPECT_LE(relative_error(state, want.ht.value()), limit);
    }
}

}  // namespace ebb::testing
