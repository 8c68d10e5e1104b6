// Known faults of such software, on whole models: padding and packing, reused states, weight decay,
// large token ids. The operators have their own.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "autograd/tape.h"
#include "eval/runner.h"
#include "models/checkpoint.h"
#include "tensor/compare.h"
#include "tensor/safetensors.h"
#include "tests/small_model.h"
#include "tests/temporary_folder.h"
#include "train/step.h"

namespace ebb::testing {
namespace {

// Between runs of different sizes: products of other sizes add up in another order. What would leak
// is compared bit by bit, between runs of one size.
constexpr double kOtherSize = 1e-5;

std::vector<int64_t> some_ids(int64_t n, int64_t first = 3) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back((first + 37 * i + i * i) % 257);
  return ids;
}

Tensor row(const std::vector<int64_t>& ids) { return Tensor::from(ids, {1, int64_t(ids.size())}); }

Tensor logits_of(const LanguageModel& model, const std::vector<int64_t>& ids,
                 const SeqLayout& layout = {}) {
  const NoGrad off;
  return model.logits(model.hidden(row(ids), layout)).value().select(0, 0);
}

class KnownFaultsModel : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, KnownFaultsModel,
                         ::testing::Values("gated_deltanet", "mamba2", "dart", "rwkv7"),
                         [](const auto& info) { return std::string(info.param); });

// B14: a token sees nothing of the sequence before, in the convolution and in the state.
TEST_P(KnownFaultsModel, B14_PackedSequencesAreApart) {
  const auto model = small_model(1, GetParam());
  std::vector<int64_t> ids = some_ids(8);
  const SeqLayout packed = SeqLayout::packed({0, 3, 8}, {});
  const Tensor before = logits_of(*model, ids, packed);
  const Tensor alone = logits_of(*model, {ids.begin() + 3, ids.end()});
  EXPECT_LE(relative_error(before.slice(0, 3, 8), alone), kOtherSize);
  for (int64_t i = 0; i < 3; ++i) ids[size_t(i)] = (ids[size_t(i)] + 100) % 257;
  EXPECT_TRUE(bitwise_equal(logits_of(*model, ids, packed).slice(0, 3, 8).contiguous(),
                            before.slice(0, 3, 8).contiguous()));
}

// B14, backward: gradients of packed documents are the sums of those of each.
TEST_P(KnownFaultsModel, B14_GradientsOfPackedSequences) {
  const std::vector<int64_t> ids = some_ids(70), labels = some_ids(70, 9);
  const Tensor count = Tensor::full({}, 70, DType::i64);
  const auto one = small_model(1, GetParam()), parts = small_model(1, GetParam());
  const std::vector<int64_t> cuts = {0, 1, 34, 70};
  backward(one->loss(row(ids), row(labels), SeqLayout::packed(cuts, {}), count).loss);
  for (size_t i = 0; i + 1 < cuts.size(); ++i)
    backward(parts
                 ->loss(row({ids.begin() + cuts[i], ids.begin() + cuts[i + 1]}),
                        row({labels.begin() + cuts[i], labels.begin() + cuts[i + 1]}), {}, count,
                        {}, 70)  // RWKV-7's L2 wrap is a share of all positions
                 .loss);
  const auto a = one->named_parameters(), b = parts->named_parameters();
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_LE(relative_error(a[i].grad(), b[i].grad()), 5e-5) << a[i].name;
}

// B28: padding on the left is a sequence of its own and leaks nowhere, at batch size 1 too.
TEST_P(KnownFaultsModel, B28_LeftPaddingDoesNotLeak) {
  const auto model = small_model(1, GetParam());
  const std::vector<int64_t> ids = some_ids(7);
  std::vector<int64_t> padded(5, 0);
  padded.insert(padded.end(), ids.begin(), ids.end());
  const Tensor want = logits_of(*model, ids);
  const Tensor got = logits_of(*model, padded, SeqLayout::packed({0, 5, 12}, {}));
  EXPECT_LE(relative_error(got.slice(0, 5, 12), want), kOtherSize);
  std::fill_n(padded.begin(), 5, 200);
  const Tensor other = logits_of(*model, padded, SeqLayout::packed({0, 5, 12}, {}));
  EXPECT_TRUE(bitwise_equal(other.slice(0, 5, 12).contiguous(), got.slice(0, 5, 12).contiguous()));
  // Decoding never pads: unequal prompts side by side are what each is alone.
  DecodeState together, alone;
  const Tensor both = chunked_prefill(*model, {ids, {ids[0]}}, 4096, &together);
  const Tensor first = chunked_prefill(*model, {ids}, 4096, &alone);
  EXPECT_LE(relative_error(both.select(0, 0), first.select(0, 0)), kOtherSize);
}

// B26: a state used for another prompt holds nothing of the one before.
TEST_P(KnownFaultsModel, B26_SecondPromptInTheSameState) {
  const auto model = small_model(1, GetParam());
  DecodeState used, fresh;
  chunked_prefill(*model, {some_ids(40)}, 16, &used);
  model->step(Tensor::from(std::vector<int64_t>{5}, {1}), &used);
  for (const int64_t n : {1, 2, 3, 20}) {
    const std::vector<int64_t> prompt = some_ids(n, 50);
    Tensor a = chunked_prefill(*model, {prompt}, 16, &used);
    Tensor b = chunked_prefill(*model, {prompt}, 16, &fresh);
    EXPECT_TRUE(bitwise_equal(a, b)) << n;
    for (int64_t t = 0; t < 5; ++t) {
      const Tensor next = Tensor::from(greedy_choice(a), {1});
      a = model->step(next, &used);
      b = model->step(next, &fresh);
      EXPECT_TRUE(bitwise_equal(a, b)) << n << " " << t;
    }
    EXPECT_EQ(used.layers.size(), fresh.layers.size());
  }
}

// B22: prompts shorter than the convolution, then decoding, whatever the batch.
TEST_P(KnownFaultsModel, B22_ShortPromptsThenDecoding) {
  const auto model = small_model(1, GetParam());
  const std::vector<int64_t> ids = some_ids(8);
  const Tensor full = logits_of(*model, ids);
  for (const int64_t n : {1, 2, 3}) {
    DecodeState state;
    const std::vector<int64_t> prompt(ids.begin(), ids.begin() + n);
    chunked_prefill(*model, {prompt, prompt}, 1, &state);  // token by token
    for (int64_t t = n; t < 8; ++t) {
      const Tensor logits =
          model->step(Tensor::from(std::vector<int64_t>(2, ids[size_t(t)]), {2}), &state);
      for (int64_t r = 0; r < 2; ++r)
        EXPECT_LE(relative_error(logits.select(0, r), full.select(0, t)), 1e-5) << n << " " << t;
    }
  }
}

// B48: without gradients, one step at learning rate 1 and decay 0.1 scales matrices by 0.9 and
// leaves gates, norms and biases.
TEST_P(KnownFaultsModel, B48_WeightDecayLeavesGatesAndNorms) {
  const auto model = small_model(1, GetParam());
  StateDict before;
  for (const auto& [name, t] : model->state_dict()) before.emplace_back(name, t.clone());
  const auto parameters = model->named_parameters();
  for (const NamedParameter& p : parameters)
    p.parameter.set_grad(Tensor::zeros_like(p.parameter.master()));
  AdamW optimizer(decay_groups(parameters, 0.1), {.lr = 1});
  optimizer.step();
  const StateDict after = model->state_dict();
  const bool dart = model->config().is_dart();
  int kept = 0, scaled = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    const auto& [name, was] = before[i];
    const bool leave = name.ends_with("A_log") || name.ends_with("dt_bias") ||
                       name.ends_with("norm.weight") || name.ends_with("norm_f.weight") ||
                       name.ends_with(".bias") || name.ends_with(".D") ||
                       (dart && name.ends_with("g_proj.weight")) ||
                       name.find("lora") != std::string::npos ||  // RWKV-7, also its vectors:
                       name.find(".x_") != std::string::npos || name.ends_with(".k_k") ||
                       name.ends_with(".k_a") || name.ends_with(".r_k");
    const std::vector<double> a = was.to_vector<double>(), b = after[i].second.to_vector<double>();
    for (size_t j = 0; j < a.size(); ++j)
      ASSERT_NEAR(b[j], leave ? a[j] : 0.9 * a[j], leave ? 0 : 1e-6) << name;
    (leave ? kept : scaled) += 1;
  }
  // Per block A_log, dt_bias and three norms, or A_log, dt_bias, D, a bias, two norms and the gate
  // of DART; the last norm. RWKV-7: mixes, vectors, low-rank products, norms with biases.
  const bool mamba2 = model->config().is_mamba2(), rwkv7 = model->config().is_rwkv7();
  EXPECT_EQ(kept, rwkv7 ? 55 : 2 * (dart ? 7 : mamba2 ? 6 : 5) + 1);
  EXPECT_GE(scaled, mamba2 ? 8 : 10);
}

// B44: a gate's small steps survive saving and loading; files hold f32 whatever training ran in.
TEST_P(KnownFaultsModel, B44_CheckpointsHoldGatesInF32) {
  const testing::TemporaryFolder temporary;
  const std::string folder = temporary.path();
  const auto model = small_model(1, GetParam());
  for (const NamedParameter& p : model->named_parameters())
    if (p.name.ends_with("A_log")) p.value().fill_(2.7707);  // bf16 knows 2.765625 and 2.78125
  model->enable_bf16();
  save_model(folder, *model);
  const SafeTensors file(folder + "/model.safetensors");
  for (const std::string& n : file.names()) EXPECT_EQ(file.get(n).dtype(), DType::f32) << n;
  const StateDict a = model->state_dict(), b = load_model(folder)->state_dict();
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(bitwise_equal(a[i].second, b[i].second)) << a[i].first;
}

// B56: token 70,000 through shard, loader, embedding and loss; 4,464 is what 16 bits make of it.
TEST(KnownFaultsModelFiles, B56_LargeTokenIdsFromFileToLoss) {
  const testing::TemporaryFolder temporary;
  const std::string folder = temporary.path();
  ShardWriter writer(folder + "/t", 7, 131072);
  writer.add(std::vector<int64_t>{1, 70000, 2, 70000, 3});
  Loader loader({.shards = writer.finish(), .batch = 1, .length = 4, .shuffle = false}, 7);
  const Batch batch = loader.next();
  EXPECT_EQ(batch.tokens.to_vector<int64_t>(), (std::vector<int64_t>{1, 70000, 2, 70000}));
  EXPECT_EQ(batch.labels.to_vector<int64_t>(), (std::vector<int64_t>{70000, 2, 70000, 3}));
  ModelConfig config = small_model()->config();
  config.vocab_size = 131072;
  config.hidden_size = 16;
  config.num_hidden_layers = 1;
  const auto model = make_model(config);
  init_weights(*model, 1);
  backward(model->loss(batch.tokens, batch.labels).loss);
  for (const NamedParameter& p : model->named_parameters()) {
    if (p.name != "model.embeddings.weight") continue;
    const auto norm = [&](int64_t id) {
      double sum = 0;
      for (const double g : p.grad().select(0, id).to_vector<double>()) sum += g * g;
      return sum;
    };
    EXPECT_GT(norm(70000), 0);
    EXPECT_EQ(norm(4464), 0);
  }
}

}  // namespace
}  // namespace ebb::testing
