// State-memory attention on the CPU beyond the rows of the table: with the scan that makes its
// memories, memory that must not be read, threads, what is kept for backward, cost.
#include "ops/state_memory_attention.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <array>
#include <cmath>
#include <functional>

#include "autograd/gradcheck.h"
#include "autograd/tape.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/ssd.h"
#include "ops/state_memory_cache.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/random.h"
#include "tests/op_table.h"

namespace ebb::testing {
namespace {

struct Inputs {
  Tensor q, e, c, memories, gate, base;
};

Inputs inputs(int64_t batch, int64_t time, int64_t heads, int64_t n, int64_t p, int64_t runs) {
  Draw draw(7);
  return {draw.normal({batch, time, 1, n}), draw.normal({batch, time, 1, p}),
          draw.normal({batch, time, 1, n}), draw.normal({runs, heads, n, p}),
          draw.normal({batch, time, 1}),    draw.normal({batch, time, heads, p})};
}

// o, r, lse and the gradients of q, e, c, contributions, gate.
std::vector<Tensor> run(const Inputs& in, int64_t chunk, DType dtype, StateMemoryOptions options) {
  std::vector<Var> leaves;
  for (const Tensor* t : {&in.q, &in.e, &in.c, &in.memories, &in.gate})
    leaves.push_back(Var::leaf(t->to(dtype)));
  options.gate = leaves[4];
  options.base = in.base.to(dtype);
  const StateMemoryAttention r =
      state_memory_attention(leaves[0], leaves[1], leaves[2], leaves[3], chunk, options);
  backward(sum(mul(r.o, Var(random_normal(r.o.shape(), {3, 5}, dtype)))));
  std::vector<Tensor> out{r.o.value(), r.r, r.lse};
  for (const Var& v : leaves) out.push_back(v.grad());
  return out;
}

TEST(StateMemoryAttention, ThreadsDoNotChangeABit) {
  const Inputs in = inputs(1, 200, 4, 32, 24, 17);
  const int before = omp_get_max_threads();
  std::vector<std::vector<Tensor>> results;
  for (const int threads : {1, 2, 7}) {
    omp_set_num_threads(threads);
    results.push_back(run(in, 12, DType::f32, {}));
  }
  omp_set_num_threads(before);
  for (size_t i = 0; i < results[0].size(); ++i)
    for (const size_t other : {1, 2})
      EXPECT_TRUE(bitwise_equal(results[0][i], results[other][i])) << i;
}

bool finite(const Tensor& t) {
  for (const double x : t.to(DType::f64).to_vector<double>())
    if (!std::isfinite(x)) return false;
  return true;
}

// Sequences of 30, 0, 8 and 22 tokens in runs of 8: memories 0-3, 4 and 5-7, of which 3, 4 and 7
// are the last of their sequences.
TEST(StateMemoryAttention, LastRunsAreNotRead) {
  Inputs in = inputs(1, 60, 2, 8, 5, 8);
  const SeqLayout layout = SeqLayout::packed({0, 30, 30, 38, 60});
  const std::vector<Tensor> want = run(in, 8, DType::f64, {.layout = layout});
  for (const int64_t m : {3, 4, 7}) in.memories.select(0, m).fill_(std::nan(""));
  const std::vector<Tensor> got = run(in, 8, DType::f64, {.layout = layout});
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(bitwise_equal(got[i], want[i])) << i;
  const Tensor dmemories = got[6];
  for (int64_t m = 0; m < 8; ++m) {
    double size = 0;
    for (const double x : dmemories.select(0, m).contiguous().to_vector<double>())
      size += std::abs(x);
    EXPECT_EQ(size == 0, m == 3 || m == 4 || m == 7) << m;
  }
  // One that is read: NaN for its readers, not for other sequences.
  in.memories.select(0, 0).fill_(std::nan(""));
  const Tensor o = run(in, 8, DType::f64, {.layout = layout})[0];
  EXPECT_TRUE(finite(o.slice(1, 0, 8).contiguous()));
  EXPECT_TRUE(finite(o.slice(1, 30, 60).contiguous()));
  for (const double x : o.slice(1, 8, 30).contiguous().to_vector<double>())
    EXPECT_TRUE(std::isnan(x));
}

TEST(StateMemoryAttention, PackedSequencesAreThoseAlone) {
  const Inputs in = inputs(1, 60, 2, 8, 5, 8);
  const Tensor packed =
      run(in, 8, DType::f64, {.layout = SeqLayout::packed({0, 30, 30, 38, 60})})[0];
  const std::vector<std::array<int64_t, 4>> parts = {{0, 30, 0, 4}, {30, 38, 4, 5}, {38, 60, 5, 8}};
  for (const auto& [begin, end, first, last] : parts) {
    const auto cut = [&](const Tensor& t) { return t.slice(1, begin, end).contiguous(); };
    const Inputs one{cut(in.q),    cut(in.e),
                     cut(in.c),    in.memories.slice(0, first, last).contiguous(),
                     cut(in.gate), cut(in.base)};
    EXPECT_TRUE(bitwise_equal(run(one, 8, DType::f64, {})[0], cut(packed))) << begin;
  }
}

TEST(StateMemoryAttention, AtZeroGateTheBaseIsLeft) {
  Inputs in = inputs(2, 50, 2, 16, 8, 14);
  in.gate.fill_(0);
  const std::vector<Tensor> r = run(in, 8, DType::f32, {});
  EXPECT_TRUE(bitwise_equal(r[0], in.base.to(DType::f32)));
  double dgate = 0;
  for (const float x : r[7].to_vector<float>()) dgate += std::abs(x);
  EXPECT_GT(dgate, 1);  // and it learns from the first step
}

TEST(StateMemoryAttention, OneMemoryTakesAllTheWeight) {
  const Inputs in = inputs(1, 16, 2, 4, 3, 2);
  const std::vector<Tensor> r = run(in, 8, DType::f64, {});
  for (int64_t t = 8; t < 16; ++t)
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t j = 0; j < 3; ++j) {
        double want = 0;
        for (int64_t n = 0; n < 4; ++n)
          want += in.c.data<double>()[t * 4 + n] * in.memories.data<double>()[(h * 4 + n) * 3 + j];
        EXPECT_NEAR(r[1].data<double>()[(t * 2 + h) * 3 + j], want, 1e-12);
      }
  // So neither q nor e matters, beyond rounding.
  for (const size_t i : {3, 4})
    for (const double x : r[i].to_vector<double>()) EXPECT_NEAR(x, 0, 1e-10);
}

// Gradients of everything that makes the memories, through the scan.
TEST(StateMemoryAttention, GradientsThroughTheScan) {
  Draw draw(3);
  const GradFn f = [](std::span<const Var> in) {
    const SsdOutput y =
        ssd(in[0], in[1], in[2], in[3], in[4], {}, {.D = in[5], .log_A = true, .memory_chunk = 6});
    return std::vector{state_memory_attention(in[6], in[7], in[4], y.contributions, 6,
                                              {.gate = in[8], .base = y.y})
                           .o};
  };
  const GradcheckResult r = gradcheck(
      f, {draw.normal({2, 20, 2, 5}), draw.normal({2, 20, 2}), draw.normal({2}),
          draw.normal({2, 20, 1, 4}), draw.normal({2, 20, 1, 4}), draw.normal({2}),
          draw.normal({2, 20, 1, 4}), draw.normal({2, 20, 1, 5}), draw.normal({2, 20, 1})});
  EXPECT_TRUE(r.ok) << r.message;
}

// R and the log-sum-exp are all that is kept beside the inputs, and nothing larger is made.
TEST(StateMemoryAttention, KeepsNothingOfTokensTimesRuns) {
  const Inputs in = inputs(1, 2000, 2, 4, 4, 1000);
  std::vector<Var> leaves;
  std::vector<Tensor> values;
  for (const Tensor* t : {&in.q, &in.e, &in.c, &in.memories, &in.gate}) {
    values.push_back(t->to(DType::f32));
    leaves.push_back(Var::leaf(values.back()));
  }
  const Tensor base = in.base.to(DType::f32);
  const StateMemoryAttention r = state_memory_attention(leaves[0], leaves[1], leaves[2], leaves[3],
                                                        2, {.gate = leaves[4], .base = base});
  EXPECT_EQ(saved_bytes(r.o, values), r.r.nbytes() + r.lse.nbytes());
}

TEST(StateMemoryAttention, CostOfTheReferenceShape) {
  const StateMemorySize s{.batch = 8, .time = 4096, .heads = 16};
  EXPECT_NEAR(state_memory_attention_cost(Pass::forward, s, DType::bf16).flops, 0.129e12, 1e9);
  StateMemorySize short_runs = s;
  short_runs.memory_chunk = 64;
  EXPECT_NEAR(state_memory_attention_cost(Pass::forward, short_runs, DType::bf16).flops, 0.541e12,
              2e9);
  // Tokens of the ragged run see all whole ones.
  const StateMemorySize ragged{
      .batch = 1, .time = 10, .state_dim = 1, .value_dim = 1, .memory_chunk = 4};
  EXPECT_EQ(state_memory_attention_cost(Pass::forward, ragged, DType::f32).flops, 4 * (4 + 2 * 2));
}

// What a model with one scan and attention over its memories computes, all tokens at once.
struct Sequence {
  static constexpr int64_t kHeads = 2, kN = 6, kP = 5, kChunk = 4;
  Tensor x, dt, A, B, C, D, q, e, gate;  // [B,T,...]
  static Sequence draw(int64_t batch, int64_t time) {
    Draw d(9);
    return {d.normal({batch, time, kHeads, kP}),
            d.normal({batch, time, kHeads}),
            d.normal({kHeads}),
            d.normal({batch, time, 1, kN}),
            d.normal({batch, time, 1, kN}),
            d.normal({kHeads}),
            d.normal({batch, time, 1, kN}),
            d.normal({batch, time, kHeads, kP}),
            d.normal({batch, time, 1})};
  }
  Sequence cut(int64_t begin, int64_t end) const {
    const auto c = [&](const Tensor& t) { return t.slice(1, begin, end).contiguous(); };
    return {c(x), c(dt), A, c(B), c(C), D, c(q), c(e), c(gate)};
  }
};

struct Decoder {
  Tensor state;  // [B,H,N,P]
  StateMemoryCache cache;
};

Tensor prefill(const Sequence& s, const SeqLayout& layout, Decoder* after) {
  const NoGrad off;
  const SsdOutput y = ssd(s.x, s.dt, s.A, s.B, s.C, {},
                          {.D = s.D,
                           .log_A = true,
                           .want_final_state = true,
                           .layout = layout,
                           .memory_chunk = Sequence::kChunk});
  *after = {y.ht.value().clone(), state_memory_cache(y.contributions.value(), layout, s.x.size(0),
                                                     s.x.size(1), Sequence::kChunk)};
  return state_memory_attention(s.q, s.e, s.C, y.contributions, Sequence::kChunk,
                                {.gate = s.gate, .base = y.y, .layout = layout})
      .o.value();
}

// Token t of every row.
Tensor decode(const Sequence& s, int64_t t, Decoder& d) {
  const auto at = [&](const Tensor& x) { return x.select(1, t).contiguous(); };
  const SsdOptions scan{.D = s.D, .log_A = true};
  const Tensor y = ssd_step(at(s.x), at(s.dt), s.A, at(s.B), at(s.C), d.state, scan);
  const Tensor o = state_memory_attention_step(at(s.q), at(s.e), at(s.C), d.cache, Sequence::kChunk,
                                               {.gate = at(s.gate), .base = y});
  ssd_step(at(s.x), at(s.dt), s.A, at(s.B), at(s.C), d.cache.open, scan);
  state_memory_advance(d.cache, Sequence::kChunk);
  return o;
}

TEST(StateMemoryCache, StepsAreThePrefill) {
  const Sequence s = Sequence::draw(2, 27);
  Decoder whole;
  const Tensor want = prefill(s, {}, &whole);
  for (const int64_t begin : {0, 3, 4, 11, 24}) {
    Decoder d{Tensor::zeros({2, 2, 6, 5}, DType::f64),
              empty_state_memory_cache(2, 2, 6, 5, DType::f64)};
    if (begin > 0) prefill(s.cut(0, begin), {}, &d);
    for (int64_t t = begin; t < 27; ++t)
      EXPECT_LE(relative_error(decode(s, t, d), want.select(1, t).contiguous()), 1e-12)
          << begin << " " << t;
    EXPECT_LE(relative_error(d.cache.open, whole.cache.open), 1e-12) << begin;
    EXPECT_LE(relative_error(d.cache.memories.slice(1, 0, 6).contiguous(),
                             whole.cache.memories.slice(1, 0, 6).contiguous()),
              1e-12)
        << begin;
  }
}

// Sequences of 9, 0, 4 and 14 tokens, then further tokens for each: rows at places of their own.
TEST(StateMemoryCache, RowsAreAtPlacesOfTheirOwn) {
  const Sequence packed = Sequence::draw(1, 27), more = Sequence::draw(4, 10);
  const std::vector<int64_t> cu = {0, 9, 9, 13, 27};
  Decoder d;
  prefill(packed, SeqLayout::packed(cu), &d);
  for (int64_t n = 0; n < 4; ++n)
    EXPECT_EQ(d.cache.position.data<int64_t>()[n], cu[size_t(n) + 1] - cu[size_t(n)]);
  std::vector<Tensor> got;
  for (int64_t t = 0; t < 10; ++t) got.push_back(decode(more, t, d));
  for (int64_t n = 0; n < 4; ++n) {  // each alone
    Decoder one{Tensor::zeros({1, 2, 6, 5}, DType::f64),
                empty_state_memory_cache(1, 2, 6, 5, DType::f64)};
    const Sequence head = packed.cut(cu[size_t(n)], cu[size_t(n) + 1]);
    for (int64_t t = 0; t < head.x.size(1); ++t) decode(head, t, one);
    Sequence tail = more;
    for (Tensor* t : {&tail.x, &tail.dt, &tail.B, &tail.C, &tail.q, &tail.e, &tail.gate})
      *t = t->slice(0, n, n + 1).contiguous();
    for (int64_t t = 0; t < 10; ++t)
      EXPECT_LE(
          relative_error(decode(tail, t, one), got[size_t(t)].slice(0, n, n + 1).contiguous()),
          1e-12)
          << n << " " << t;
  }
}

TEST(StateMemoryCache, SizesOfThePaper) {
  const StateMemoryCacheSize s = state_memory_cache_size(4096, 256, 128, 64);
  EXPECT_EQ(s.memories, 131'072);
  EXPECT_EQ(s.attention, 524'288);
  EXPECT_DOUBLE_EQ(s.ratio(), 128 / (2 * 256.0));
  EXPECT_EQ(state_memory_cache_size(257, 256, 128, 64).memories, 2 * 128 * 64);
  EXPECT_EQ(state_memory_cache_size(0, 256, 128, 64).memories, 0);
}

TEST(StateMemoryCache, Mistakes) {
  const auto error = [](const std::function<void()>& f) -> std::string {
    try {
      f();
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  StateMemoryCache cache = empty_state_memory_cache(2, 4, 6, 5, DType::f32);
  const Tensor q = Tensor::zeros({2, 1, 6}), e = Tensor::zeros({2, 1, 5});
  const auto step = [&](const Tensor& q, const Tensor& e, StateMemoryStep o) {
    return error([&] { state_memory_attention_step(q, e, q, cache, 3, o); });
  };
  EXPECT_EQ(step(q, e, {}), "");
  EXPECT_NE(step(e, e, {}).find("q is [2,1,5], want [2,*,6] with a divisor of 4 heads"),
            std::string::npos);
  EXPECT_NE(step(q, Tensor::zeros({2, 3, 5}), {}).find("e is [2,3,5]"), std::string::npos);
  EXPECT_NE(step(q, e, {.gate = Tensor::zeros({1, 1})}).find("gate is [1,1], want [2,*]"),
            std::string::npos);
  EXPECT_NE(step(q, e, {.base = e}).find("base is [2,1,5], want [2,4,5]"), std::string::npos);
  EXPECT_NE(step(q, e, {.eps = 0}).find("eps is 0"), std::string::npos);
  cache.position.data<int64_t>()[1] = 3;
  EXPECT_NE(step(q, e, {}).find("row 1 is at position 3, the cache has room for 0 runs of 3"),
            std::string::npos);
  EXPECT_NE(error([] {
              state_memory_cache(Tensor::zeros({2, 4, 6, 5}), {}, 1, 7, 3);
            }).find("contributions is [2,4,6,5], want [3,H,N,P]"),
            std::string::npos);
}

}  // namespace
}  // namespace ebb::testing
