// Linear-attention models, the Transformer and the decay study: with random weights, against
// themselves and against closed forms.
#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "models/calibrate.h"
#include "models/language_model.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tests/decay_study_grid.h"
#include "tests/model_properties.h"

namespace ebb::testing {
namespace {

using nlohmann::json;

// A small model: the fields given, read as a recipe's model section.
ModelConfig small(json fields) {
  fields["vocab_size"] = 64;
  fields["hidden_size"] = 48;
  fields["num_hidden_layers"] = 3;
  fields["num_heads"] = 3;
  fields["intermediate_size"] = 32;
  if (fields["model_type"] == "decay_study") fields["weight_init"] = "fla";
  if (fields["model_type"] == "hgrn2") fields["expand_ratio"] = 16;
  if (fields["model_type"] == "lightnet") fields["expand_ratio"] = 8;
  fields["initializer_range"] = 0.2;
  return parse_model_config(fields, "/model", "test");
}

std::vector<json> all_models() {
  std::vector<json> all;
  for (const char* type : {"gla", "hgrn2", "lightnet", "retnet", "transformer"})
    all.push_back({{"model_type", type}});
  all.push_back({{"model_type", "transformer"},
                 {"num_kv_heads", 1},
                 {"window_size", 20},
                 {"qk_norm", true},
                 {"qkv_bias", true}});
  all.push_back({{"model_type", "hgrn2"}, {"use_lower_bound", false}});
  all.push_back({{"model_type", "gla"}, {"num_kv_heads", 1}, {"use_short_conv", true}});
  for (const json& fields : decay_study_grid()) all.push_back(fields);
  return all;
}

class AttentionModel : public ::testing::TestWithParam<json> {
 protected:
  std::unique_ptr<LanguageModel> model(uint64_t seed) const {
    auto m = make_model(small(GetParam()));
    init_weights(*m, seed);
    return m;
  }
};

TEST_P(AttentionModel, PrefillAndStepEqualTheFullForward) { expect_prefill_and_step(*model(21)); }

TEST_P(AttentionModel, PackedDocumentsDoNotSeeEachOther) { expect_documents_apart(*model(22)); }

TEST_P(AttentionModel, EveryParameterLearnsAndTheConfigComesBack) {
  const auto m = model(23);
  const Tensor tokens = random_tokens(2, 40, 64);
  backward(m->loss(tokens, random_tokens(2, 40, 64)).loss);
  for (const NamedParameter& p : m->named_parameters()) {
    ASSERT_TRUE(p.grad().defined()) << p.name;
    EXPECT_GT(euclidean_norm(p.grad()), 0) << p.name;
    EXPECT_TRUE(all_finite(p.grad())) << p.name;
  }
  json j = m->config().to_json();
  j.erase("architectures");
  const ModelConfig back = parse_model_config(j, "", "test");
  EXPECT_EQ(make_model(back)->parameter_count(), m->parameter_count());
  EXPECT_EQ(back.to_json(), m->config().to_json());
}

std::string case_name(const ::testing::TestParamInfo<json>& info) {
  return section_name(info.param);
}
INSTANTIATE_TEST_SUITE_P(All, AttentionModel, ::testing::ValuesIn(all_models()), case_name);

// models.md 11.5.
TEST(DecayStudy, ParameterCounts) {
  const auto count = [](const std::string& preset_name, const char* granularity) {
    ModelConfig c = preset(preset_name);
    c.decay.by_channel = std::string(granularity) == "vector";
    return make_model(c)->parameter_count();
  };
  const int64_t d = 768, P = 128, H = 6, w = 2048, L = 12;
  const int64_t shared = 4 * d * d + 2 * d * P + d + 3 * d * w + 2 * d, outside = d + 2 * 50432 * d;
  EXPECT_EQ(count("dlt-160m", "vector"), L * (shared + 2 * d * P + d) + outside);
  EXPECT_EQ(count("dlt-160m", "scalar"), L * (shared + d * H + H) + outside);
  ModelConfig tpe = preset("dlt-160m");
  tpe.rpe = "tpe";
  EXPECT_EQ(make_model(tpe)->parameter_count(),
            count("dlt-160m", "vector") + 2 * d + H + d + d * d);
  EXPECT_NEAR(double(count("dlt-160m", "vector")), 167.1e6, 0.1e6);
  EXPECT_NEAR(double(count("dlt-410m", "vector")), 424.2e6, 0.1e6);
}

// At u = 0 Simple Decay keeps exactly p.
TEST(DecayStudy, InitialValues) {
  ModelConfig c =
      small({{"model_type", "decay_study"}, {"decay", {{"type", "simple"}, {"threshold", 0.8}}}});
  c.weight_init = "zero_branches";
  auto m = make_model(c);
  init_weights(*m, 1);
  int zero = 0;
  for (const NamedParameter& p : m->named_parameters()) {
    for (double x :
         p.name.ends_with("delta") ? p.value().to_vector<double>() : std::vector<double>())
      EXPECT_NEAR(1 / (1 + std::exp(-x)), 0.8, 1e-6);
    if (p.name.ends_with("o_proj.weight") || p.name.ends_with("down_proj.weight")) {
      EXPECT_EQ(euclidean_norm(p.value()), 0) << p.name;
      ++zero;
    } else if (p.shape.size() == 2) {
      for (double x : p.value().to_vector<double>()) ASSERT_LE(std::abs(x), 3 * 0.2 + 1e-6);
      if (p.shape.numel() < 3000) continue;  // too few numbers for a spread within 5 %
      EXPECT_NEAR(euclidean_norm(p.value()) / std::sqrt(double(p.shape.numel())), 0.2 * 0.9866,
                  0.01)
          << p.name;
    }
  }
  EXPECT_EQ(zero, 6);
  c.rpe = "tpe";
  m = make_model(c);
  init_weights(*m, 1);
  int positions = 0;
  for (const NamedParameter& p : m->named_parameters()) {
    if (!p.name.starts_with("model.tpe.")) continue;
    ++positions;
    if (p.name.ends_with("o_proj.weight")) {
      EXPECT_NEAR(euclidean_norm(p.value()) / 48, 0.2, 0.01);
      continue;
    }
    for (double x : p.value().to_vector<double>())
      EXPECT_EQ(x, p.name.ends_with("decay") ? 0 : 1) << p.name;
  }
  EXPECT_EQ(positions, 5);
  m = make_model(small({{"model_type", "decay_study"}, {"decay", {{"type", "tnl_l"}}}}));
  init_weights(*m, 1);
  for (const NamedParameter& p : m->named_parameters()) {
    if (!p.name.ends_with("attn.decay")) continue;
    const auto g = p.value().to_vector<double>();
    const double depth = std::stod(p.name.substr(p.name.find("layers.") + 7)) / 2;
    EXPECT_NEAR(g[0], -(1 - depth + 1e-5) / 2, 1e-7);
    EXPECT_NEAR(g[2], -(1 - depth + 1e-5) / 256, 1e-7);
  }
}

TEST(AttentionConfig, MistakesAreNamed) {
  const auto message = [](json j) -> std::string {
    try {
      small(std::move(j));
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  for (const auto& [fields, want] : std::vector<std::pair<json, std::string>>{
           {{{"model_type", "transformer"}, {"num_kv_heads", 2}},
            "/model/num_kv_heads: 2 does not divide num_heads 3"},
           {{{"model_type", "gla"}, {"num_kv_heads", 2}},
            "/model/num_kv_heads: 2 does not divide num_heads 3"},
           {{{"model_type", "gla"}, {"clamp_min", 1}}, "/model/clamp_min: must not be positive"},
           {{{"model_type", "retnet"}, {"use_short_conv", true}},
            "/model/use_short_conv: true is not supported"},
           {{{"model_type", "gla"}, {"expand_k", 0.3}}, "/model/expand_k"},
           {{{"model_type", "retnet"}, {"window_size", 3}}, "/model/window_size"},
           {{{"model_type", "decay_study"}, {"decay", {{"type", "sinple"}}}}, "/model/decay/type"},
           {{{"model_type", "decay_study"},
             {"decay", {{"type", "tnl"}, {"granularity", "vector"}}}},
            "/model/decay/granularity"},
           {{{"model_type", "decay_study"},
             {"decay", {{"type", "gla"}, {"share", true}, {"granularity", "scalar"}}}},
            "/model/decay/share"},
           {{{"model_type", "decay_study"}, {"decay", {{"threshold", 1}}}},
            "/model/decay/threshold"},
           {{{"model_type", "decay_study"}, {"rpe", "tp"}}, "/model/rpe"},
           {{{"model_type", "decay_study"}, {"decay", {{"share", true}}}, {"rpe", "rope"}},
            "/model/rpe: a shared key goes with rpe none or tpe"},
           {{{"model_type", "decay_study"}, {"rpe", "rope"}, {"rope_form", "rotate"}},
            "/model/rope_form: a rotation would mix channels"}}) {
    const std::string m = message(fields);
    EXPECT_NE(m.find(want), std::string::npos) << "want " << want << " in: " << m;
  }
}

// As in the public library: heads and channels say each other, HGRN2's heads follow its channels.
TEST(AttentionConfig, RatioAndHeads) {
  const auto read = [](const char* type, json heads, json ratio) {
    return parse_foreign_config(
        {{"model_type", type}, {"hidden_size", 48}, {"num_heads", heads}, {"expand_ratio", ratio}},
        "config.json");
  };
  for (const char* type : {"hgrn2", "lightnet"}) {
    EXPECT_EQ(read(type, nullptr, 16).num_heads, 3);
    EXPECT_EQ(read(type, 3, nullptr).expand_ratio, 16);
  }
  EXPECT_EQ(read("lightnet", 3, 8).expand_ratio, 8);
  EXPECT_THROW(read("hgrn2", 3, 8), Error);
}

// There is nothing to calibrate, and that is said.
TEST(AttentionModels, HaveNoDecayGates) {
  const auto m = make_model(small({{"model_type", "gla"}}));
  init_weights(*m, 3);
  EXPECT_FALSE(has_decay_gates(*m));
  EXPECT_TRUE(measure_gates(*m, random_tokens(1, 10, 64)).empty());
  EXPECT_THROW(apply_post(*m, 4096), Error);
}

}  // namespace
}  // namespace ebb::testing
