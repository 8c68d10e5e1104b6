// What the tape keeps alive, when it lets go, and graphs deep enough to overflow a stack.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/tape_ops.h"

namespace ebb::testing {
namespace {

using Values = std::vector<double>;

// A cheap operator for long chains.
Var link(const Var& x) {
  return record("link", {x}, {}, {x.value()},
                [](BackwardContext& ctx) { ctx.grad(0, ctx.dy(0)); })[0];
}
// Saves a fresh tensor of `items` doubles; its backward calls `look`.
Var heavy(const Var& x, int64_t items, std::function<void()> look = {}) {
  return record("heavy", {x}, {Tensor::zeros({items}, DType::f64)}, {x.value().clone()},
                [look](BackwardContext& ctx) {
                  ctx.saved(0);
                  if (look) look();
                  ctx.grad(0, ctx.dy(0));
                })[0];
}
int64_t in_use() { return memory_stats(Device::cpu()).current; }

TEST(SavedBytes, CountsStoragesOnce) {
  const Var x = leaf(Values(10, 1)), y = leaf(Values(20, 1));
  const Var h = mul(x, x);  // x twice
  EXPECT_EQ(saved_bytes(h), 80);
  const Var both = add(mul(h, x), scale(h, 2));  // h and x, shared
  EXPECT_EQ(saved_bytes(both), 160);
  EXPECT_EQ(saved_bytes(both, std::vector{x.value()}), 80);
  EXPECT_EQ(saved_bytes(both, std::vector{x.value().slice(0, 0, 1), Tensor()}), 80);
  const Var z = mul(y, y);
  EXPECT_EQ(saved_bytes(std::vector{both, z, both}), 160 + 160);
  EXPECT_EQ(saved_bytes(x), 0);
  EXPECT_EQ(saved_bytes(Var()), 0);
  // A view keeps its whole storage.
  EXPECT_EQ(saved_bytes(record("view", {x}, {y.value().slice(0, 0, 1)}, {x.value()},
                               [](BackwardContext&) {})[0]),
            160);
  backward(sum(both));
  EXPECT_EQ(saved_bytes(both), 0);
}

TEST(TapeMemory, SavedTensorsAreReleasedAsTheWalkProceeds) {
  constexpr int64_t kItems = 1 << 14;
  const Var x = leaf({1});
  std::vector<int64_t> seen;
  const int64_t before = in_use();
  Var y = x;
  for (int i = 0; i < 8; ++i) y = heavy(y, kItems, [&] { seen.push_back(in_use() - before); });
  const int64_t full = in_use() - before;
  EXPECT_GE(full, 8 * kItems * 8);
  reset_peak_memory(Device::cpu());
  backward(y);
  ASSERT_EQ(seen.size(), 8u);
  for (int i = 0; i < 8; ++i) EXPECT_LT(seen[size_t(i)], (8 - i) * kItems * 8 + 4096) << i;
  EXPECT_LT(memory_stats(Device::cpu()).peak - before, full + 4096);
  EXPECT_LT(in_use() - before, 4096);  // although y still stands
}

TEST(TapeMemory, RetainKeepsThem) {
  const Var x = leaf({1});
  const Var y = heavy(x, 1000);
  backward(y, {}, {.retain = true});
  EXPECT_EQ(saved_bytes(y), 8000);
  backward(y);
  EXPECT_EQ(saved_bytes(y), 0);
}

TEST(TapeMemory, BranchesWithoutGradientAreReleasedToo) {
  const Var x = leaf({1});
  const int64_t before = in_use();
  const Var stop =
      record("stop", {heavy(x, 100000)}, {}, {x.value().clone()}, [](BackwardContext&) {})[0];
  EXPECT_GT(in_use() - before, 800000);
  backward(stop);
  EXPECT_LT(in_use() - before, 4096);
}

TEST(TapeMemory, ForwardOnlyGraphsGoWithTheirVars) {
  const Var x = leaf({1});
  const int64_t before = in_use();
  { const Var y = heavy(heavy(x, 10000), 10000); }
  EXPECT_EQ(in_use(), before);
}

TEST(TapeMemory, GradientsPassThroughWithoutCopies) {
  const Var x = Var::leaf(Tensor::zeros({1 << 14}, DType::f64));
  Var y = x;
  for (int i = 0; i < 6; ++i) y = link(y);
  const Tensor upstream = Tensor::full(x.shape(), 1, DType::f64);
  const int64_t before = memory_stats(Device::cpu()).allocations;
  backward(y, upstream);
  EXPECT_EQ(memory_stats(Device::cpu()).allocations - before, 1);  // the leaf's gradient
}

TEST(TapeMemory, AGradientPreparedInForwardIsHandedOverWithoutACopy) {
  const Var x = leaf({1, 2});
  const auto prepared = [&] {
    return record("prepared", {x}, {Tensor::full({2}, 5, DType::f64)}, {x.value().clone()},
                  [](BackwardContext& ctx) { ctx.grad(0, ctx.saved(0)); })[0];
  };
  const Tensor upstream = Tensor::full({2}, 1, DType::f64);
  const Var y = prepared();
  const int64_t before = memory_stats(Device::cpu()).allocations;
  backward(y, upstream);
  EXPECT_EQ(memory_stats(Device::cpu()).allocations, before);
  EXPECT_EQ(grad_of(x), (Values{5, 5}));
  // Retained, it still belongs to the graph and must not be added to.
  x.zero_grad();
  const Var z = prepared();
  for (int i = 0; i < 3; ++i) backward(z, upstream, {.retain = true});
  EXPECT_EQ(grad_of(x), (Values{15, 15}));
}

TEST(TapeMemory, LeafGradientsDoNotPinLargerBuffers) {
  const Var x = leaf({1, 2});
  const Var y = record("slice", {x}, {}, {x.value().clone()}, [](BackwardContext& ctx) {
    ctx.grad(0, Tensor::zeros({1000}, DType::f64).slice(0, 10, 12));
  })[0];
  backward(sum(y));
  EXPECT_EQ(x.grad().storage()->bytes, 16u);
}

TEST(DeepGraphs, BackwardThroughAMillionNodes) {
  for (const int depth : {100000, 1000000}) {
    const Var x = leaf({1});
    Var y = x;
    for (int i = 0; i < depth; ++i) y = link(y);
    backward(y);
    EXPECT_EQ(grad_of(x), (Values{1}));
  }
}

TEST(DeepGraphs, FreedWithoutBackward) {
  const Var x = leaf({1});
  {
    Var y = x;
    for (int i = 0; i < 1000000; ++i) y = link(y);
  }
  EXPECT_EQ(x.slot().use_count(), 1);
}

TEST(DeepGraphs, FreedInAnyOrder) {
  constexpr int kDepth = 100000;
  for (const char* order : {"forward", "backward", "interleaved", "head first"}) {
    const Var x = leaf({1});
    std::vector<Var> all{x};
    for (int i = 0; i < kDepth; ++i)
      all.push_back(i % 3 ? link(all.back()) : add(all.back(), all[all.size() / 2]));
    const std::string how = order;
    if (how == "forward") {
      for (Var& v : all) v = Var();
    } else if (how == "backward") {
      while (!all.empty()) all.pop_back();
    } else if (how == "interleaved") {
      for (size_t step = 7, i = 0, n = 0; n < all.size(); ++n, i = (i + step * 10007) % all.size())
        all[i] = Var();
      all.clear();
    } else {
      std::swap(all.front(), all.back());
      all.front() = Var();
      all.clear();
    }
    EXPECT_EQ(x.slot().use_count(), 1) << how;
  }
}

TEST(DeepGraphs, FreedAfterAnExceptionHalfway) {
  const Var x = leaf({1});
  {
    Var y = x;
    for (int i = 0; i < 200000; ++i) {
      y = link(y);
      if (i == 100000)
        y = record("broken", {y}, {}, {y.value()}, [](BackwardContext&) { fail("broken"); })[0];
    }
    EXPECT_EQ(error_of([&] { backward(y); }), "broken");
  }
  EXPECT_EQ(x.slot().use_count(), 1);
}

TEST(DeepGraphs, WideFanOut) {
  const Var x = leaf({1}), h = scale(x, 1);
  std::vector<Var> roots;
  for (int i = 0; i < 100000; ++i) roots.push_back(link(h));
  backward(roots, std::vector<Tensor>(roots.size()));
  EXPECT_EQ(grad_of(x), (Values{100000}));
}

}  // namespace
}  // namespace ebb::testing
