// Golden models on the GPU: f32 by the goldens' limits, bf16 by the limits for whole models in
// bf16 (rounding weights alone costs half of them); decoding; bitwise reruns.
#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "eval/runner.h"
#include "models/checkpoint.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/memory.h"
#include "tensor/safetensors.h"
#include "train/step.h"

namespace ebb {
namespace {

const std::string kModels = std::string(EBB_TEST_DATA) + "/models/";

class GoldenModelCuda : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  std::string folder() const { return kModels + GetParam(); }
  const Device gpu_ = Device::cuda();
};
// Options of configs that those folders do not have (model_options_test.cpp).
class ModelOptionsCuda : public GoldenModelCuda {};

void check_model(const std::string& folder, Device gpu, bool bf16) {
  const auto model = load_model(folder);
  model->to(gpu);
  if (bf16) model->enable_bf16();
  const SafeTensors io(folder + "/io.safetensors");
  const Tensor ids = io.get("input_ids").to(gpu), targets = io.get("targets").to(gpu);
  EXPECT_LE(relative_error(model->logits(model->hidden(ids)).value().cpu(), io.get("logits")),
            bf16                                  ? 3e-2
            : model->config().model_type == "kda" ? 2e-5
                                                  : 1e-5);
  const auto r = model->loss(ids, targets);
  EXPECT_NEAR(r.loss.value().item() / io.get("loss").item(), 1, bf16 ? 3e-2 : 1e-6);
  backward(r.loss);
  for (const NamedParameter& p : model->named_parameters()) {
    const bool gate = p.name.ends_with("A_log") || p.name.ends_with("dt_bias");
    EXPECT_LE(relative_error(p.grad().cpu(), io.get("grad." + p.name)), bf16   ? 0.12
                                                                        : gate ? 1e-4
                                                                               : 5e-5)
        << p.name;
  }
}

TEST_P(GoldenModelCuda, F32) { check_model(folder(), gpu_, false); }
TEST_P(GoldenModelCuda, Bf16) { check_model(folder(), gpu_, true); }

TEST_P(ModelOptionsCuda, F32) { check_model(folder(), gpu_, false); }

void check_greedy(const std::string& folder, Device gpu) {
  const auto model = load_model(folder);
  model->to(gpu);
  const SafeTensors io(folder + "/io.safetensors");
  DecodeState state;
  Tensor logits =
      chunked_prefill(*model, {io.get("greedy.prompt").to_vector<int64_t>()}, 3, &state);
  for (const int64_t want : io.get("greedy.tokens").to_vector<int64_t>()) {
    const std::vector<int64_t> next = greedy_choice(logits);
    EXPECT_EQ(next[0], want);
    logits = model->step(Tensor::from(next, {1}, gpu), &state);
  }
}

TEST_P(GoldenModelCuda, GreedyContinuation) { check_greedy(folder(), gpu_); }
TEST_P(ModelOptionsCuda, GreedyContinuation) { check_greedy(folder(), gpu_); }

void check_rerun(const std::string& folder, Device gpu) {
  const SafeTensors io(folder + "/io.safetensors");
  const std::vector<Batch> batch = {{io.get("input_ids"), io.get("targets"), {}}};
  std::vector<StateDict> runs;
  for (int run = 0; run < 2; ++run) {
    const auto model = load_model(folder);
    model->to(gpu);
    model->enable_bf16();
    AdamW optimizer(decay_groups(model->named_parameters(), 0.1), {.clip = 1});
    for (int i = 0; i < 3; ++i) train_step(*model, optimizer, batch, 1e-3);
    StateDict s;
    for (const auto& [n, t] : model->state_dict()) s.emplace_back(n, t.cpu().clone());
    runs.push_back(std::move(s));
  }
  for (size_t i = 0; i < runs[0].size(); ++i)
    EXPECT_TRUE(bitwise_equal(runs[0][i].second, runs[1][i].second)) << runs[0][i].first;
}

TEST_P(GoldenModelCuda, TrainingStepsRerunBitwise) { check_rerun(folder(), gpu_); }
TEST_P(ModelOptionsCuda, TrainingStepsRerunBitwise) { check_rerun(folder(), gpu_); }

// What the pool saw at most is weights, gradients, moments, tape and one operator's workspace.
class TrainingMemoryCuda : public ::testing::TestWithParam<std::string> {};
TEST_P(TrainingMemoryCuda, PeakIsTheSumOfItsParts) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  const Device gpu = Device::cuda();
  const int64_t before = memory_stats(gpu).current;
  const auto model = make_model({.model_type = GetParam(),
                                 .vocab_size = 4096,
                                 .hidden_size = 512,
                                 .num_hidden_layers = 4,
                                 .num_heads = 4,
                                 .head_dim = 64});
  init_weights(*model, 1);
  model->to(gpu);
  model->enable_bf16();
  AdamW optimizer(decay_groups(model->named_parameters(), 0.1), {.clip = 1});
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 8 * 2048; ++i) ids.push_back((i * i + 7 * i) % 4096);
  const Tensor tokens = Tensor::from(ids, {8, 2048});
  const std::vector<Batch> batch = {{tokens, tokens, {}}};
  reset_peak_memory(gpu);
  int64_t saved = 0;
  train_step(*model, optimizer, batch, 1e-3, &saved);
  train_step(*model, optimizer, batch, 1e-3);
  const TrainingMemory m = training_memory(*model, optimizer, saved);
  EXPECT_EQ(m.optimizer, 2 * m.gradients);
  EXPECT_GT(m.weights, m.gradients);  // the bf16 shadows
  const double peak = double(memory_stats(gpu).peak - before);
  EXPECT_NEAR(peak / double(m.sum()), 1, 0.25)
      << peak << ": " << m.weights << " " << m.gradients << " " << m.optimizer << " " << m.saved
      << " " << m.workspace;
}

INSTANTIATE_TEST_SUITE_P(Delta, TrainingMemoryCuda,
                         ::testing::Values("gated_deltanet", "kda", "gdn2"));
INSTANTIATE_TEST_SUITE_P(Golden, GoldenModelCuda,
                         ::testing::Values("gated_deltanet", "gated_deltanet_gva", "kda", "mamba2",
                                           "rwkv7"));
INSTANTIATE_TEST_SUITE_P(
    All, ModelOptionsCuda,
    ::testing::Values("../options/gdn_no_gate_no_conv", "../options/kda_no_conv",
                      "../options/mamba2_groups_bias", "../options/mamba2_norm_first",
                      "../options/mamba2_no_norm", "../options/gla_shared_keys_conv",
                      "../options/gla_bare_norm", "../options/retnet_shared_keys",
                      "../options/hgrn2_conv", "../options/lightnet_conv",
                      "../options/rwkv7_l2warp_tied"));

}  // namespace
}  // namespace ebb
