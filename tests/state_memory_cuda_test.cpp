// State-memory attention on the GPU beyond the rows of the table: the shapes of models, more blocks
// than tokens of a tile, decoding against the CPU.
#include <cmath>

#include "autograd/tape.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/state_memory_attention.h"
#include "ops/state_memory_cache.h"
#include "tensor/compare.h"
#include "tensor/memory.h"
#include "tests/cuda_fixture.h"
#include "tests/op_table.h"

namespace ebb::testing {
namespace {

class StateMemoryCuda : public CudaTest {};

struct Problem {
  Tensor q, e, c, memories, gate, base, dy;
  int64_t chunk;
};

Problem problem(int64_t batch, int64_t time, int64_t heads, int64_t n, int64_t p, int64_t chunk,
                uint64_t seed) {
  Draw draw(seed);
  const int64_t runs = batch * ((time + chunk - 1) / chunk);
  return {draw.normal({batch, time, 1, n}),     draw.normal({batch, time, 1, p}),
          draw.normal({batch, time, 1, n}),     draw.normal({runs, heads, n, p}, 0.01),
          draw.normal({batch, time, 1}),        draw.normal({batch, time, heads, p}),
          draw.normal({batch, time, heads, p}), chunk};
}

// o, lse and the gradients of q, e, c, contributions, gate: of inputs rounded to `dtype`, computed
// in `compute`.
std::vector<Tensor> run(const Problem& in, DType dtype, DType compute, Device device) {
  const auto put = [&](const Tensor& t) { return t.to(dtype).to(compute, device); };
  std::vector<Var> leaves;
  for (const Tensor* t : {&in.q, &in.e, &in.c, &in.memories, &in.gate})
    leaves.push_back(Var::leaf(put(*t)));
  // A scale that leaves several memories some weight.
  const StateMemoryAttention r =
      state_memory_attention(leaves[0], leaves[1], leaves[2], leaves[3], in.chunk,
                             {.gate = leaves[4],
                              .base = put(in.base),
                              .scale = 1 / std::sqrt(double(in.q.size(3) * in.e.size(3)))});
  backward(sum(mul(r.o, Var(put(in.dy)))));
  std::vector<Tensor> out{r.o.value(), r.lse};
  for (const Var& v : leaves) out.push_back(v.grad());
  for (Tensor& t : out) t = t.cpu();
  return out;
}

void expect_parity(const Problem& in, DType dtype, double outputs, double gradients, Device gpu) {
  const std::vector<Tensor> got = run(in, dtype, dtype, gpu);
  const std::vector<Tensor> want = run(in, dtype, DType::f64, Device::cpu());
  const std::vector<Tensor> again = run(in, dtype, dtype, gpu);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_LE(relative_error(got[i], want[i]), i < 2 ? outputs : gradients) << i;
    EXPECT_TRUE(bitwise_equal(got[i], again[i])) << i;
  }
}

TEST_F(StateMemoryCuda, ShapesOfModels) {
  for (const int64_t chunk : {64, 100, 256}) {
    const Problem in = problem(2, 600, 4, 128, 64, chunk, uint64_t(chunk));
    expect_parity(in, DType::f32, 2e-5, 2e-5, gpu_);
    expect_parity(in, DType::bf16, 8e-3, 1.5e-2, gpu_);
  }
}

TEST_F(StateMemoryCuda, ShapesOfAssociativeRecall) {
  for (const int64_t n : {16, 64}) {
    const Problem in = problem(4, 256, 2, n, 64, 16, 5);
    expect_parity(in, DType::f32, 2e-5, 2e-5, gpu_);
    expect_parity(in, DType::bf16, 8e-3, 1.5e-2, gpu_);
  }
}

// Enough tokens that a block goes through several heads and adds what they give.
TEST_F(StateMemoryCuda, HeadsOfOneBlock) {
  for (const int64_t n : {64, 128})
    expect_parity(problem(8, 4100, 4, n, 64, 256, 8), DType::bf16, 8e-3, 1.5e-2, gpu_);
}

// Two sequences of 130 tokens in runs of 32, of which the fifth is nobody's memory.
TEST_F(StateMemoryCuda, LastRunsAreNotRead) {
  Problem in = problem(2, 130, 2, 64, 64, 32, 11);
  const std::vector<Tensor> want = run(in, DType::bf16, DType::bf16, gpu_);
  for (const int64_t m : {4, 9}) in.memories.select(0, m).fill_(std::nan(""));
  const std::vector<Tensor> got = run(in, DType::bf16, DType::bf16, gpu_);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(bitwise_equal(got[i], want[i])) << i;
  for (const int64_t m : {4, 9})
    for (const double x : got[5].select(0, m).to(DType::f64).contiguous().to_vector<double>())
      EXPECT_EQ(x, 0);
}

// What the backward keeps of pairs of a token and a memory has a bounded place: sequences whose
// pairs do not fit go through it in strips, which add to the gradients of the memories.
TEST_F(StateMemoryCuda, MorePairsThanFitAtOnce) {
  expect_parity(problem(1, 4600, 2, 8, 8, 1, 9), DType::bf16, 8e-3, 1.5e-2, gpu_);
}

// The peak of a forward and backward pass beside what it is given and gives.
int64_t peak_of_pass(int64_t time, Device gpu) {
  const Problem in = problem(1, time, 1, 16, 8, 16, 10);
  const auto put = [&](const Tensor& t) { return t.to(DType::bf16, gpu); };
  std::vector<Var> leaves;
  for (const Tensor* t : {&in.q, &in.e, &in.c, &in.memories}) leaves.push_back(Var::leaf(put(*t)));
  const Var dy(put(in.dy));
  reset_peak_memory(gpu);
  const int64_t before = int64_t(memory_stats(gpu).current);
  const StateMemoryAttention r =
      state_memory_attention(leaves[0], leaves[1], leaves[2], leaves[3], in.chunk, {.scale = 0.1});
  backward(sum(mul(r.o, dy)));
  return int64_t(memory_stats(gpu).peak) - before;
}
TEST_F(StateMemoryCuda, MemoryGrowsWithTokensNotWithPairs) {
  const int64_t some = peak_of_pass(32768, gpu_), twice = peak_of_pass(65536, gpu_);
  EXPECT_LT(some, int64_t(256) << 20);         // pairs: 67 million of 8 bytes
  EXPECT_LT(twice - some, int64_t(64) << 20);  // 201 million more
}

// Contributions in f32 beside bf16, by the tensor-core kernels and, where P is odd or wide, the
// others.
TEST_F(StateMemoryCuda, WideContributions) {
  for (const int64_t p : {64, 33, 128}) {
    const Problem in = problem(2, 300, 2, 32, p, 32, 6);
    const auto results = [&](DType narrow, DType wide, Device device) {
      const auto put = [&](const Tensor& t) { return t.to(DType::bf16).to(narrow, device); };
      std::vector<Var> leaves;
      for (const Tensor* t : {&in.q, &in.e, &in.c}) leaves.push_back(Var::leaf(put(*t)));
      leaves.push_back(Var::leaf(in.memories.to(DType::f32).to(wide, device)));
      const StateMemoryAttention r = state_memory_attention(leaves[0], leaves[1], leaves[2],
                                                            leaves[3], in.chunk, {.scale = 0.05});
      backward(sum(mul(r.o, Var(put(in.dy)))));
      std::vector<Tensor> out{r.o.value().cpu(), r.lse.cpu()};
      for (const Var& v : leaves) out.push_back(v.grad().cpu());
      return out;
    };
    const std::vector<Tensor> got = results(DType::bf16, DType::f32, gpu_);
    const std::vector<Tensor> want = results(DType::f64, DType::f64, Device::cpu());
    EXPECT_EQ(got.back().dtype(), DType::f32);
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_LE(relative_error(got[i], want[i]), i < 2 ? 8e-3 : 1.5e-2) << p << " " << i;
  }
}

// Decoding: rows at places of their own, on both devices.
TEST_F(StateMemoryCuda, StepsAreThoseOfTheCpu) {
  for (const auto& [n, p] : {std::pair<int64_t, int64_t>{128, 64}, {16, 100}, {256, 256}, {1, 3}}) {
    Draw draw(11);
    const Tensor memories = draw.normal({3, 5, 4, n, p}).to(DType::f32);
    const Tensor position = Tensor::from(std::vector<int64_t>{0, 9, 57}, {3});
    const Tensor open = draw.normal({3, 4, n, p}).to(DType::f32);
    const Tensor q = draw.normal({3, 1, n}).to(DType::f32),
                 e = draw.normal({3, 2, p}).to(DType::f32);
    const Tensor c = draw.normal({3, 4, n}).to(DType::f32),
                 gate = draw.normal({3, 1}).to(DType::f32);
    const Tensor base = draw.normal({3, 4, p}).to(DType::f32);
    const auto step = [&](Device device) {
      StateMemoryCache cache{memories.to(device).clone(), open.to(device).clone(),
                             position.clone()};
      std::vector<Tensor> out;
      for (int64_t t = 0; t < 4; ++t) {
        out.push_back(
            state_memory_attention_step(q.to(device), e.to(device), c.to(device), cache, 10,
                                        {.gate = gate.to(device), .base = base.to(device)})
                .cpu());
        state_memory_advance(cache, 10);
      }
      out.push_back(cache.memories.cpu());
      out.push_back(cache.open.cpu());
      return out;
    };
    const std::vector<Tensor> got = step(gpu_), want = step(Device::cpu());
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_LE(relative_error(got[i], want[i]), 2e-5) << n << " " << p << " " << i;
  }
}

}  // namespace
}  // namespace ebb::testing
