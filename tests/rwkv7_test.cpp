// RWKV-7 beside its golden folder (models_test.cpp): counts, native initialisation, decay scales,
// L2 wrap, what a config may say.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <filesystem>

#include "autograd/tape.h"
#include "models/calibrate.h"
#include "models/checkpoint.h"
#include "models/rwkv7.h"
#include "ops/cross_entropy.h"
#include "ops/linear_cross_entropy.h"
#include "ops/matmul.h"
#include "ops/reduce.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/random.h"
#include "tests/model_properties.h"
#include "tests/temporary_folder.h"

namespace ebb::testing {
namespace {

ModelConfig small_config() {
  ModelConfig c = preset("rwkv7-100m");
  c.vocab_size = 64;
  c.hidden_size = 48;
  c.num_hidden_layers = 3;
  c.head_dim = 16;
  c.num_heads = 3;
  c.decay_low_rank_dim = c.a_low_rank_dim = 8;
  c.gate_low_rank_dim = 12, c.v_low_rank_dim = 4;
  return c;
}

// Weights away from zero: the native rule leaves every residual branch at zero.
std::unique_ptr<LanguageModel> random_model(const ModelConfig& c, uint64_t seed) {
  auto model = make_model(c);
  init_weights(*model, seed);
  for (const NamedParameter& p : model->named_parameters())
    if (p.shape.size() == 2) init_normal(p, seed, 0.2);
  return model;
}

std::vector<double> values(const LanguageModel& model, const std::string& name) {
  for (const auto& [n, t] : model.state_dict())
    if (n == name) return t.to_vector<double>();
  ADD_FAILURE() << "no " << name;
  return {};
}

TEST(Rwkv7, PresetHasThePaperCount) {
  const auto model = make_model(preset("rwkv7-100m"));
  EXPECT_EQ(model->parameter_count(), 101'432'832);
  int64_t first = 0, other = 0;
  for (const NamedParameter& p : model->named_parameters()) {
    if (p.name.starts_with("model.layers.0.")) first += p.shape.numel();
    if (p.name.starts_with("model.layers.7.")) other += p.shape.numel();
  }
  EXPECT_EQ(first, 3'418'112);
  EXPECT_EQ(other, 3'433'984);
  model->use_decay_scales();  // frozen: no parameters, but part of what is saved
  EXPECT_EQ(model->parameter_count(), 101'432'832);
  EXPECT_EQ(values(*model, "model.layers.19.attn.A_log"), std::vector<double>(8, -0.5));
}

// Only the big matrices decay; vectors and gates stay f32.
TEST(Rwkv7, WhatDecaysAndWhatStaysF32) {
  const auto model = make_model(small_config());
  model->enable_bf16();
  for (const NamedParameter& p : model->named_parameters()) {
    const bool matrix = p.name.ends_with("proj.weight") || p.name.ends_with("key.weight") ||
                        p.name.ends_with("value.weight") || p.name.ends_with("head.weight") ||
                        p.name.ends_with("embeddings.weight");
    EXPECT_EQ(p.decay == WeightDecay::on, matrix) << p.name;
    const bool low_rank = p.name.find("lora") != std::string::npos && p.name.ends_with("weight");
    EXPECT_EQ(p.parameter.shadow().defined(), matrix || low_rank) << p.name;
  }
}

// Of the decay biases the reference training's rate is doubled, of nothing else.
TEST(Rwkv7, RateOfTheDecayBias) {
  const auto model = make_model(small_config());
  int doubled = 0;
  for (const NamedParameter& p : model->named_parameters()) {
    const bool bias = p.name.ends_with("attn.w_lora.lora.2.bias");
    EXPECT_EQ(p.lr_factor, bias ? 2 : 1) << p.name;
    doubled += bias;
  }
  EXPECT_EQ(doubled, small_config().num_hidden_layers);
}

// Mean sigmoid of a head's decay bias, as published for 20 layers of 8 heads.
TEST(Rwkv7, NativeDecayBiases) {
  const std::pair<int64_t, std::vector<double>> published[] = {
      {0, {0.0135, 0.0274, 0.0534, 0.0982, 0.1677, 0.2648, 0.3872, 0.5240}},
      {9, {0.0084, 0.0113, 0.0183, 0.0338, 0.0684, 0.1412, 0.2742, 0.4745}},
      {19, {0.0081, 0.0102, 0.0155, 0.0277, 0.0565, 0.1218, 0.2522, 0.4633}}};
  for (const auto& [layer, want] : published) {
    const std::vector<float> bias = native_rwkv7_decay_bias(layer, 20, 512, 64);
    for (size_t h = 0; h < 8; ++h) {
      double mean = 0;
      for (size_t k = 0; k < 64; ++k) mean += 1 / (1 + std::exp(-double(bias[64 * h + k]))) / 64;
      EXPECT_NEAR(mean, want[h], 6e-5) << layer << ' ' << h;
    }
  }
}

TEST(Rwkv7, NativeWeights) {
  const auto model = make_model(small_config());
  init_weights(*model, 7);
  for (const NamedParameter& p : model->named_parameters()) {
    const auto is = [&](const char* end) { return p.name.ends_with(end); };
    const Tensor x = p.value().to(DType::f64);
    if (is("o_proj.weight") || is("ffn.value.weight") || is("lora.0.weight")) {
      for (double v : x.to_vector<double>()) ASSERT_EQ(v, 0) << p.name;
    } else if (is("embeddings.weight")) {
      for (double v : x.to_vector<double>()) ASSERT_LE(std::abs(v), 1e-4) << p.name;
    } else if (p.shape.size() == 2 && !is("r_k")) {  // orthogonal
      const bool tall = p.shape[0] >= p.shape[1];
      const Tensor q = tall ? x : x.transpose(0, 1);
      const double gain = is("k_proj.weight") || is("lora.2.weight") ? 0.1
                          : is("lm_head.weight")                     ? 0.5 * std::sqrt(64. / 48)
                                                                     : 1;
      const Tensor gram = matmul(q.transpose(0, 1), q).value();
      for (int64_t i = 0; i < gram.size(0); ++i)
        for (int64_t j = 0; j < gram.size(0); ++j)
          ASSERT_NEAR(gram.select(0, i).select(0, j).item(), i == j ? gain * gain : 0, 1e-6)
              << p.name;
    }
  }
  // Mixes by channel and layer: 1 in channel 0, and less with the channel.
  EXPECT_EQ(values(*model, "model.layers.1.attn.x_r")[0], 1);
  EXPECT_NEAR(values(*model, "model.layers.1.attn.x_w")[12], 1 - std::pow(0.25, 0.9 * 2 / 3), 1e-6);
  EXPECT_NEAR(values(*model, "model.layers.2.ffn.x_k")[24], 1 - std::pow(0.5, 1.0 / 81), 1e-6);
  EXPECT_NEAR(values(*model, "model.layers.1.attn.g_norm.weight")[5], std::pow(2 / 3., 0.7), 1e-6);
  EXPECT_NEAR(values(*model, "model.layers.1.attn.k_k")[47], 0.66, 1e-6);
}

TEST(Rwkv7, PrefillAndStepEqualTheFullForward) {
  for (const bool scaled : {false, true}) {
    const auto model = random_model(small_config(), 21);
    if (scaled) calibrate_dami(*model, {}, {});
    expect_prefill_and_step(*model);
  }
}

TEST(Rwkv7, PackedDocumentsDoNotSeeEachOther) {
  expect_documents_apart(*random_model(small_config(), 22));
}

// Scales of e^{-1/2} are the native model.
TEST(Rwkv7, RandomScalesAreTheNativeModel) {
  const NoGrad off;
  const auto native = random_model(small_config(), 5);
  ModelConfig c = small_config();
  c.frozen_decay_scale = true;
  const auto scaled = random_model(c, 5);
  apply_random_gates(*scaled, 5);
  const Tensor tokens = random_tokens(1, 60);
  EXPECT_LE(relative_error(scaled->hidden(tokens).value(), native->hidden(tokens).value()), 1e-6);
}

TEST(Rwkv7, DamiReachesItsTargetsAndTouchesNothingElse) {
  ModelConfig c = small_config();
  c.frozen_decay_scale = true;
  const auto model = make_model(c);
  init_weights(*model, 11);
  StateDict before;
  for (const auto& [name, t] : model->state_dict()) before.emplace_back(name, t.clone());
  const auto tau = timescale_ladder({}, 3), profile = sensitivity_profile({}, 3);
  const Tensor tokens = random_tokens(2, 64);
  for (const Tensor& sample : {Tensor(), tokens}) {  // the native low-rank product is zero
    const std::vector<HeadReport> report = calibrate_dami(*model, {}, sample);
    ASSERT_EQ(report.size(), 9u);
    for (const HeadReport& r : report) {
      EXPECT_EQ(r.target_sensitivity, profile[size_t(r.layer)]);
      EXPECT_EQ(r.target_timescale, tau[size_t(r.head)]);
      EXPECT_NEAR(r.sensitivity, r.target_sensitivity, 1e-5);
      EXPECT_NEAR(r.timescale / r.target_timescale, 1, 1e-4);
      EXPECT_NEAR(r.A_log, -std::log(r.target_timescale) - std::log(r.target_sensitivity), 1e-5);
    }
  }
  const StateDict after = model->state_dict();
  for (size_t i = 0; i < before.size(); ++i) {
    const bool gate =
        before[i].first.ends_with("A_log") || before[i].first.ends_with("w_lora.lora.2.bias");
    EXPECT_EQ(bitwise_equal(before[i].second, after[i].second), !gate) << before[i].first;
  }
  // The channels of a head keep their pattern around the mean.
  const auto was = native_rwkv7_decay_bias(1, 3, 48, 16);
  const auto is = values(*model, "model.layers.1.attn.w_lora.lora.2.bias");
  for (size_t k = 17; k < 32; ++k)
    EXPECT_NEAR(is[k] - is[16], double(was[k]) - double(was[16]), 1e-5);
}

TEST(Rwkv7, PostSpansTheLadderWithNativeBiases) {
  const auto model = make_model(small_config());
  init_weights(*model, 11);
  const auto bias = values(*model, "model.layers.2.attn.w_lora.lora.2.bias");
  apply_post(*model, 1024);
  EXPECT_TRUE(model->config().frozen_decay_scale);
  EXPECT_EQ(values(*model, "model.layers.2.attn.w_lora.lora.2.bias"), bias);
  for (const HeadReport& r : measure_gates(*model, random_tokens(1, 32)))
    EXPECT_NEAR(r.timescale / std::pow(1024, 1 - double(r.head) / 2), 1, 1e-4);
}

TEST(Rwkv7, ScalesAreSavedAndLoaded) {
  const NoGrad off;
  const testing::TemporaryFolder temporary;
  const std::string folder = temporary.path();
  const auto model = random_model(small_config(), 3);
  calibrate_dami(*model, {}, {});
  save_model(folder, *model);
  const auto again = load_model(folder);
  EXPECT_TRUE(again->config().frozen_decay_scale);
  EXPECT_EQ(values(*again, "model.layers.0.attn.A_log"),
            values(*model, "model.layers.0.attn.A_log"));
  const Tensor tokens = random_tokens(1, 40);
  EXPECT_TRUE(bitwise_equal(again->hidden(tokens).value(), model->hidden(tokens).value()));
}

// L2 wrap: the loss as it is; each row's first maximum, labelled or not, gains f·logit/rows in the
// gradient.
TEST(Rwkv7, L2WrapPullsTheLargestLogit) {
  const Tensor x = Tensor::empty({5, 8}, DType::f64), w = Tensor::empty({11, 8}, DType::f64);
  fill_normal(x, {1, 2}, 0, 1);
  fill_normal(w, {1, 3}, 0, 1);
  const Tensor labels = Tensor::from(std::vector<int64_t>{3, -100, 0, 10, 7}, {5});
  Tensor dx[2], dw[2], loss[2];
  for (const int on : {0, 1}) {
    const Var vx = Var::leaf(x), vw = Var::leaf(w);
    const CrossEntropy r =
        linear_cross_entropy(vx, vw, labels, {.chunk_rows = 2, .l2_wrap = on ? 0.3 : 0.0});
    backward(r.loss);
    dx[on] = vx.grad(), dw[on] = vw.grad(), loss[on] = r.loss.value();
  }
  EXPECT_EQ(loss[0].item(), loss[1].item());
  const Tensor z = matmul(x, w.transpose(0, 1)).value(), at = argmax(z, -1);
  for (int64_t n = 0; n < 5; ++n) {
    const int64_t j = at.data<int64_t>()[n];
    const double g = 0.3 / 5 * z.data<double>()[n * 11 + j];
    for (int64_t d = 0; d < 8; ++d) {
      EXPECT_NEAR(dx[1].data<double>()[n * 8 + d] - dx[0].data<double>()[n * 8 + d],
                  g * w.data<double>()[j * 8 + d], 1e-12);
      dw[0].data<double>()[j * 8 + d] += g * x.data<double>()[n * 8 + d];
    }
  }
  EXPECT_LE(relative_error(dw[1], dw[0]), 1e-12);

  // In two calls that together have those rows, the same.
  const Var vw = Var::leaf(w);
  for (const auto& [begin, end] : {std::pair{0, 2}, std::pair{2, 5}})
    backward(linear_cross_entropy(
                 Var(x.slice(0, begin, end)), vw, labels.slice(0, begin, end),
                 {.count = Tensor::full({}, 4, DType::i64), .l2_wrap = 0.3, .l2_wrap_rows = 5})
                 .loss);
  EXPECT_LE(relative_error(vw.grad(), dw[1]), 1e-12);
}

// As the public library's layer takes them: 2.5·√512 = 56.6, 5·√512 = 113.1, 1.7·√512 = 38.5.
TEST(Rwkv7, NullsFollowFromOtherSizes) {
  const auto parsed = [](nlohmann::json change) {
    nlohmann::json object = preset("rwkv7-100m").to_json();
    object.update(change);
    return parse_foreign_config(object, "config.json");
  };
  const nlohmann::json ranks = {{"decay_low_rank_dim", nullptr},
                                {"gate_low_rank_dim", nullptr},
                                {"a_low_rank_dim", nullptr},
                                {"v_low_rank_dim", nullptr}};
  const auto expect = [](const ModelConfig& c, std::array<int64_t, 4> want) {
    EXPECT_EQ(
        (std::array{c.decay_low_rank_dim, c.gate_low_rank_dim, c.a_low_rank_dim, c.v_low_rank_dim}),
        want);
  };
  expect(parsed(ranks), {64, 128, 64, 32});
  nlohmann::json wide = ranks;
  wide.update({{"head_dim", 128}, {"num_heads", nullptr}});
  expect(parsed(wide), {128, 128, 128, 64});  // ranks but the gate's grow with the heads
  nlohmann::json narrow = ranks;
  narrow.update({{"hidden_size", 64}, {"num_heads", 1}, {"v_low_rank_dim", 16}});
  expect(parsed(narrow), {32, 32, 32, 16});
  EXPECT_EQ(parsed({{"head_dim", nullptr}}).head_dim, 64);
  EXPECT_EQ(parsed({{"num_heads", nullptr}}).num_heads, 8);
}

TEST(Rwkv7, ConfigsThatMeanSomethingElseAreRefused) {
  const auto refused = [](nlohmann::json change, const char* part) {
    nlohmann::json object = preset("rwkv7-100m").to_json();
    object.update(change);
    try {
      parse_foreign_config(object, "config.json");
      ADD_FAILURE() << "no error; wanted " << part;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  refused({{"num_heads", 7}}, "7 heads of 64 are not hidden_size = 512");
  refused({{"hidden_act", "swish"}}, "want sqrelu");
  refused({{"value_dim", std::vector<int>(20, 1024)}}, "want hidden_size 512 in every layer");
  refused({{"a_low_rank_dim", 0}}, "/a_low_rank_dim");
  refused({{"attn", {{"layers", {1}}}}}, "hybrid attention layers are not supported");
}

}  // namespace
}  // namespace ebb::testing
