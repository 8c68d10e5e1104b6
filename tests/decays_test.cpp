// Decays in use: what the recurrences are given, and their quartiles.
#include "models/decays.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "ops/elementwise.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/random.h"
#include "tests/decay_study_grid.h"

namespace ebb {
namespace {

using nlohmann::json;

// A small model of each kind: its first layer, and what makes it different.
std::unique_ptr<LanguageModel> small(json fields) {
  fields["vocab_size"] = 64;
  fields["num_hidden_layers"] = 2;
  fields["initializer_range"] = 0.3;
  const std::string type = fields["model_type"];
  fields["hidden_size"] = 32;
  if (type == "mamba2" || type == "dart")
    fields["head_dim"] = 16, fields["state_size"] = 8;
  else
    fields["num_heads"] = 2;
  if (type == "gated_deltanet" || type == "kda" || type == "gdn2" || type == "rwkv7")
    fields["head_dim"] = type == "rwkv7" ? 16 : 8;
  if (type == "hgrn2") fields["expand_ratio"] = 16;
  if (type == "lightnet") fields["expand_ratio"] = 8;
  if (type == "decay_study") fields["weight_init"] = "fla";
  auto model = make_model(parse_model_config(fields, "/model", "test"));
  init_weights(*model, 5);
  if (type == "rwkv7")  // whose native rule leaves what decides the decay at zero
    for (const NamedParameter& p : model->named_parameters())
      if (p.shape.size() == 2) init_normal(p, 5, 0.3);
  return model;
}

std::vector<json> gated_models() {
  std::vector<json> all;
  for (const char* type : {"gated_deltanet", "kda", "gdn2", "mamba2", "dart", "rwkv7", "gla",
                           "hgrn2", "lightnet", "retnet"})
    all.push_back({{"model_type", type}});
  all.push_back({{"model_type", "gated_deltanet"}, {"num_v_heads", 4}});
  all.push_back({{"model_type", "gdn2"}, {"num_v_heads", 4}});
  all.push_back({{"model_type", "kda"}, {"safe_gate", true}, {"lower_bound", -5}});
  all.push_back({{"model_type", "mamba2"}, {"dt_limit", {0.01, 0.5}}});
  all.push_back({{"model_type", "rwkv7"}, {"frozen_decay_scale", true}});
  for (const json& fields : testing::decay_study_grid()) all.push_back(fields);
  return all;
}

class DecaysOf : public ::testing::TestWithParam<json> {};

// Two states that differ by D differ by e^g D after the next token, where nothing is erased: the
// delta rules' keys are 0 here.
TEST_P(DecaysOf, AreWhatTheStateKeeps) {
  const NoGrad off;
  const auto model = small(GetParam());
  const std::string type = GetParam()["model_type"];
  const bool erases = type == "gated_deltanet" || type == "kda" || type == "gdn2" ||
                      type == "rwkv7" || GetParam().value("token_mixer", "") == "dplr";
  for (const NamedParameter& p : model->named_parameters())
    if (erases && p.name.ends_with("k_proj.weight")) p.value().fill_(0);
  constexpr int64_t kBefore = 5;
  constexpr double kApart = 1e3;
  const Tensor h = Tensor::empty({2, kBefore + 1, 32});
  fill_normal(h, {1, 2}, 0, 1);
  Mixer& mixer = model->block(0).mixer();
  Var shared;
  MixerState near;
  mixer.forward_sharing(h.slice(1, 0, kBefore), &shared, {}, nullptr, &near);
  MixerState far;
  for (const Tensor& t : near.tensors) far.tensors.push_back(t.clone());
  far.tensors[0].copy_(add(Var(far.tensors[0]), kApart).value());
  shared = Var();
  mixer.step_sharing(h.select(1, kBefore), &shared, near);
  shared = Var();
  mixer.step_sharing(h.select(1, kBefore), &shared, far);
  const Tensor kept =
      mul(sub(Var(far.tensors[0]), Var(near.tensors[0])), 1 / kApart).value();  // [N,H,K,V]
  Tensor g = mixer.log_decays(h).select(1, kBefore);                            // [N,H] or [N,H,K]
  const int64_t K = kept.size(2);
  if (g.dim() == 2) g = g.unsqueeze(2).expand({g.size(0), g.size(1), K});
  ASSERT_EQ(K % g.size(2), 0) << g.shape().str() << kept.shape().str();
  ASSERT_EQ(g.size(1), kept.size(1));
  double most = 0;
  for (int64_t n = 0; n < 2; ++n)
    for (int64_t head = 0; head < kept.size(1); ++head)
      for (int64_t k = 0; k < K; ++k) {  // rope: each channel twice
        const double want =
            std::exp(g.select(0, n).select(0, head).to_vector<double>()[size_t(k % g.size(2))]);
        for (const double x : kept.select(0, n).select(0, head).select(0, k).to_vector<double>())
          most = std::max(most, std::abs(x - want));
      }
  EXPECT_LE(most, 1e-5);
}

// The layer is looked at with what reaches it in the model.
TEST_P(DecaysOf, AreThoseOfEveryLayer) {
  const NoGrad off;
  const auto model = small(GetParam());
  const Tensor tokens = Tensor::empty({1, 40}, DType::i64);
  for (int64_t i = 0; i < 40; ++i) tokens.data<int64_t>()[i] = (i * i + 3 * i) % 64;
  int64_t done = 0;
  const DecayUse use = measure_decays(*model, tokens, [&](int64_t l) { EXPECT_EQ(l, done++); });
  EXPECT_EQ(use.tokens, 40);
  ASSERT_EQ(use.layers.size(), 2u);
  EXPECT_EQ(done, 2);
  model->hidden(tokens, {}, nullptr, nullptr, [&](int64_t l, const Var& x) {
    if (l == 1) return;
    const Block& next = model->block(l + 1);
    std::vector<float> g = next.mixer().log_decays(next.normed_input(x)).to_vector<float>();
    const DecaySpread want = decay_spread(g), &got = use.layers[size_t(l + 1)];
    EXPECT_EQ(got.values, want.values);
    for (const auto& [a, b] : {std::pair{got.median, want.median},
                               {got.lower_quartile, want.lower_quartile},
                               {got.upper_quartile, want.upper_quartile},
                               {got.mean, want.mean},
                               {got.deviation, want.deviation},
                               {got.least, want.least},
                               {got.most, want.most}})
      EXPECT_NEAR(a, b, 1e-5);
    EXPECT_LE(got.least, got.lower_quartile);
    EXPECT_LE(got.lower_quartile, got.median);
    EXPECT_LE(got.median, got.upper_quartile);
    EXPECT_LE(got.upper_quartile, got.most);
    EXPECT_LE(got.most, 1);
  });
  EXPECT_EQ(use.all.values, use.layers[0].values + use.layers[1].values);
  EXPECT_NEAR(use.all.mean * double(use.all.values),
              use.layers[0].mean * double(use.layers[0].values) +
                  use.layers[1].mean * double(use.layers[1].values),
              1e-6 * double(use.all.values));
}

std::string case_name(const ::testing::TestParamInfo<json>& info) {
  return testing::section_name(info.param);
}
INSTANTIATE_TEST_SUITE_P(All, DecaysOf, ::testing::ValuesIn(gated_models()), case_name);

TEST(Decays, QuartilesMeanAndEnds) {
  std::vector<float> g;
  for (const double x : {0.4, 0.1, 0.3, 0.2}) g.push_back(float(std::log(x)));
  const DecaySpread s = decay_spread(g);
  EXPECT_EQ(s.values, 4);
  EXPECT_NEAR(s.lower_quartile, 0.175, 1e-7);
  EXPECT_NEAR(s.median, 0.25, 1e-7);
  EXPECT_NEAR(s.upper_quartile, 0.325, 1e-7);
  EXPECT_NEAR(s.mean, 0.25, 1e-7);
  EXPECT_NEAR(s.deviation, std::sqrt(0.0125), 1e-7);
  EXPECT_NEAR(s.least, 0.1, 1e-7);
  EXPECT_NEAR(s.most, 0.4, 1e-7);
  std::vector<float> cleared = {-INFINITY, 0, -INFINITY};
  EXPECT_EQ(decay_spread(cleared).median, 0);
  EXPECT_EQ(decay_spread(cleared).most, 1);
  std::vector<float> one = {-1}, none, broken = {-1, NAN, -2};
  EXPECT_EQ(decay_spread(one).upper_quartile, std::exp(-1.0));
  EXPECT_EQ(decay_spread(none).values, 0);
  EXPECT_TRUE(std::isnan(decay_spread(broken).median));
  EXPECT_EQ(to_json({.tokens = 3, .layers = {decay_spread(broken)}})["layers"][0]["median"].dump(),
            "null");
}

TEST(Decays, ClosedForms) {
  const Tensor tokens = Tensor::zeros({1, 3}, DType::i64);
  const DecayUse retnet = measure_decays(*small({{"model_type", "retnet"}}), tokens);
  EXPECT_NEAR(retnet.all.least, 1 - 1.0 / 32, 1e-7);
  EXPECT_NEAR(retnet.all.most, 1 - 1.0 / 64, 1e-7);
  EXPECT_NEAR(retnet.all.median, 1 - 1.5 / 64, 1e-7);
  // Simple Decay: p where the logits are 0.
  const auto simple =
      small({{"model_type", "decay_study"}, {"decay", {{"type", "simple"}, {"threshold", 0.8}}}});
  for (const NamedParameter& p : simple->named_parameters())
    if (p.name.find("f_proj") != std::string::npos) p.value().fill_(0);
  const DecayUse use = measure_decays(*simple, tokens);
  EXPECT_NEAR(use.all.least, 0.8, 1e-6);
  EXPECT_NEAR(use.all.most, 0.8, 1e-6);
  EXPECT_TRUE(measure_decays(*small({{"model_type", "transformer"}}), tokens).layers.empty());
}

}  // namespace
}  // namespace ebb
