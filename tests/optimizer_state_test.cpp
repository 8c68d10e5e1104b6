// The state of AdamW: left and taken up again, with the names of the tensors it belongs to; and the
// sums over many tensors behind its gradient norm.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "tensor/check.h"
#include "tests/optimizer_inputs.h"
#include "tests/reference/optimizer.h"
#include "tests/tape_ops.h"

namespace ebb::testing {
namespace {

// Training with a state that is left and taken up again.
class Resume : public ::testing::Test {
 protected:
  struct Run {
    std::vector<NamedParameter> parameters;
    std::unique_ptr<AdamW> optimizer;
    Run() {
      parameters = {named("w", draw({30, 20}, 1)), named("norm", draw({20}, 2), WeightDecay::off)};
      parameters[0].parameter.enable_shadow();
      optimizer = std::make_unique<AdamW>(decay_groups(parameters, 0.1),
                                          AdamWConfig{.lr = 1e-2, .clip = 0.5});
    }
    void steps(int from, int to) {
      for (int s = from; s < to; ++s) {
        // Gradients depend on what operators read, the bf16 shadow, so its history matters too.
        const Tensor w = parameters[0].parameter.var().value().to(DType::f32);
        parameters[0].parameter.set_grad(product(w, draw(w.shape(), 1000 + uint64_t(s))));
        parameters[1].parameter.set_grad(draw({20}, 2000 + uint64_t(s)));
        if (s == 3) parameters[1].parameter.grad().data<float>()[0] = NAN;  // one skipped step
        optimizer->set_lr(1e-2 * (1 - s / 20.0));
        optimizer->step();
      }
    }
  };
};

TEST_F(Resume, TenStepsThenFiveAreFifteen) {
  Run whole, first, second;
  whole.steps(0, 15);
  first.steps(0, 10);
  for (size_t i = 0; i < 2; ++i) {
    second.parameters[i].parameter.master().copy_(first.parameters[i].parameter.master());
    second.parameters[i].parameter.refresh_shadow();
  }
  StateDict saved;
  for (const auto& [name, t] : first.optimizer->state_dict()) saved.emplace_back(name, t.clone());
  std::reverse(saved.begin(), saved.end());  // order is not part of it
  second.optimizer->load_state_dict(saved);
  second.steps(10, 15);
  expect_same(copies(second.parameters, *second.optimizer),
              copies(whole.parameters, *whole.optimizer));
  EXPECT_EQ(second.optimizer->read().step, 14);
  EXPECT_EQ(second.optimizer->read().skipped, 1);
}

TEST_F(Resume, StrictLoadingListsEverything) {
  Run run;
  run.steps(0, 1);
  StateDict state;
  for (const auto& [name, t] : run.optimizer->state_dict()) state.emplace_back(name, t.clone());
  const std::vector<Tensor> before = copies(run.parameters, *run.optimizer);
  for (auto& [name, t] : state) {
    t = t.clone();
    if (is_float(t.dtype())) t.fill_(5);
    if (name == "w.exp_avg") t = Tensor::zeros({30, 21});
    if (name == "w.exp_avg_sq") t = t.to(DType::bf16);
    if (name == "norm.exp_avg") name = "norm.exp_average";
  }
  const std::string message = error_of([&] { run.optimizer->load_state_dict(state); });
  for (const char* part : {"w.exp_avg is [30,21], want [30,20]", "w.exp_avg_sq is bf16, want f32",
                           "missing norm.exp_avg [20]", "unexpected norm.exp_average [20]"})
    EXPECT_TRUE(contains(message, part));
  expect_same(copies(run.parameters, *run.optimizer), before);
}

TEST(AdamW, FusedAndTiedTensorsAreOneEntryWithTheirNames) {
  const Parameter fused(draw({6, 2}, 1)), table(draw({5, 2}, 2));
  const std::vector<NamedParameter> all{
      {"q_proj.weight", fused, 0, 2, {2, 2}, WeightDecay::on},
      {"k_proj.weight", fused, 2, 3, {3, 2}, WeightDecay::on},  // row 5 is padding
      {"embeddings.weight", table, 0, 5, {5, 2}, WeightDecay::on},
      {"lm_head.weight", table, 0, 5, {5, 2}, WeightDecay::on}};
  AdamW optimizer(decay_groups(all, 0.1), {.lr = 0.1});
  fused.set_grad(Tensor::full({6, 2}, 1));
  table.set_grad(Tensor::full({5, 2}, 1));
  const Tensor before = table.master().clone();
  optimizer.step();
  EXPECT_NEAR(optimizer.read().grad_norm, std::sqrt(12 + 10), 1e-12);  // each once
  EXPECT_NEAR(table.master().to_vector<double>()[0], before.to_vector<double>()[0] * 0.99 - 0.1,
              1e-6);
  std::vector<std::string> names;
  for (const auto& [name, t] : optimizer.state_dict())
    names.push_back(fmt::format("{} {}", name, t.shape()));
  EXPECT_EQ(names, (std::vector<std::string>{
                       "q_proj.weight.exp_avg [2,2]", "q_proj.weight.exp_avg_sq [2,2]",
                       "k_proj.weight.exp_avg [3,2]", "k_proj.weight.exp_avg_sq [3,2]",
                       "embeddings.weight.exp_avg [5,2]", "embeddings.weight.exp_avg_sq [5,2]",
                       "step []", "skipped []"}));
  EXPECT_TRUE(
      contains(error_of([&] {
                 AdamW({{.parameters = {all[0]}, .weight_decay = 0.1}, {.parameters = {all[1]}}});
               }),
               "AdamW: q_proj.weight and k_proj.weight are one tensor in memory"));
}

TEST(GradientNorm, OneAndThreeThousandTensors) {
  for (const int count : {1, 3000}) {
    std::vector<Tensor> tensors;
    for (int i = 0; i < count; ++i)
      tensors.push_back(draw({i == count / 2 ? 1 : 1 + (i * 37) % 500}, uint64_t(i)));
    const TensorList list(tensors);
    const Tensor a = Tensor::empty({}, DType::f64), b = Tensor::empty({}, DType::f64);
    sum_of_squares(list, a);
    const double want = std::sqrt(reference::sum_of_squares(tensors));
    EXPECT_NEAR(std::sqrt(a.item()) / want, 1, 1e-12);
    sum_of_squares(list, b);
    EXPECT_TRUE(bitwise_equal(a, b));
  }
}

TEST(GradientNorm, AHundredMillionSmallBf16Values) {
  const TensorList list({Tensor::full({100000000}, 1e-3, DType::bf16)});
  const Tensor squares = Tensor::empty({}, DType::f64);
  sum_of_squares(list, squares);
  EXPECT_NEAR(std::sqrt(squares.item()), 10.0, 0.01);
}

TEST(GradientNorm, DoesNotDependOnTheThreads) {
  const TensorList list({draw({100000}, 1), draw({3}, 2), draw({77777}, 3)});
  const int threads = omp_get_max_threads();
  Tensor sums[2];
  for (const int n : {1, 4}) {
    omp_set_num_threads(n);
    Tensor& s = sums[n > 1];
    s = Tensor::empty({}, DType::f64);
    sum_of_squares(list, s);
  }
  omp_set_num_threads(threads);
  EXPECT_TRUE(bitwise_equal(sums[0], sums[1]));
}

TEST(GradientNorm, AnyNonFiniteValueShows) {
  for (const float bad : {NAN, INFINITY, -INFINITY})
    for (const int64_t at : {0, 8191, 8192, 19999}) {
      const Tensor x = Tensor::zeros({20000});
      x.data<float>()[at] = bad;
      const Tensor squares = Tensor::empty({}, DType::f64);
      sum_of_squares(TensorList({x}), squares);
      EXPECT_FALSE(std::isfinite(squares.item())) << bad << " at " << at;
    }
}

TEST(TensorList, FollowsTensorsThatMove) {
  TensorList list({Tensor::full({3}, 1)});
  const Tensor squares = Tensor::empty({}, DType::f64);
  const auto total = [&] {
    sum_of_squares(list, squares);
    return squares.item();
  };
  EXPECT_EQ(total(), 3);
  list.set({Tensor::full({3}, 2)});  // same size, elsewhere
  EXPECT_EQ(total(), 12);
  list.set({Tensor::full({3}, 2), Tensor::full({8193}, 1)});
  EXPECT_EQ(total(), 12 + 8193);
  list.set({});
  EXPECT_EQ(total(), 0);
}

}  // namespace
}  // namespace ebb::testing
