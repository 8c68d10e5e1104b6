// Whole models against the golden folders of the public library, and against themselves.
#include <gtest/gtest.h>

#include <filesystem>

#include "autograd/tape.h"
#include "eval/runner.h"
#include "models/calibrate.h"
#include "models/checkpoint.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/file.h"
#include "tensor/random.h"
#include "tensor/safetensors.h"
#include "tests/model_properties.h"
#include "tests/temporary_folder.h"

namespace ebb::testing {
namespace {

const std::string kModels = std::string(EBB_TEST_DATA) + "/models/";

class GoldenModel : public ::testing::TestWithParam<const char*> {
 protected:
  std::string folder() const { return kModels + GetParam(); }
  double limit() const { return std::string(GetParam()) == "kda" ? 2e-5 : 1e-5; }
};

TEST_P(GoldenModel, LogitsLossAndEveryGradient) {
  const auto model = load_model(folder());
  const SafeTensors io(folder() + "/io.safetensors");
  const Tensor ids = io.get("input_ids");
  std::vector<Tensor> stream;
  const Var h = model->hidden(ids, {}, nullptr, nullptr,
                              [&](int64_t, const Var& x) { stream.push_back(x.value()); });
  EXPECT_LE(relative_error(stream[0], io.get("hidden.embed")), limit());
  for (int64_t l = 0; l < model->layers(); ++l)
    EXPECT_LE(relative_error(stream[size_t(l) + 1], io.get(fmt::format("hidden.block{}", l))),
              limit())
        << "block " << l;
  EXPECT_LE(relative_error(h.value(), io.get("hidden.final_norm")), limit());
  EXPECT_LE(relative_error(model->logits(h).value(), io.get("logits")), limit());
  const auto r = model->loss(ids, io.get("targets"));
  EXPECT_NEAR(r.loss.value().item() / io.get("loss").item(), 1, 1e-6);
  backward(r.loss);
  for (const NamedParameter& p : model->named_parameters()) {
    ASSERT_TRUE(p.grad().defined()) << p.name;
    const bool gate = p.name.ends_with("A_log") || p.name.ends_with("dt_bias");
    EXPECT_LE(relative_error(p.grad(), io.get("grad." + p.name)), gate ? 1e-4 : 5e-5) << p.name;
  }
}

TEST_P(GoldenModel, GreedyContinuation) {
  const auto model = load_model(folder());
  const SafeTensors io(folder() + "/io.safetensors");
  const auto prompt = io.get("greedy.prompt").to_vector<int64_t>();
  DecodeState state;
  Tensor logits = chunked_prefill(*model, {prompt}, 3, &state);  // chunks of three tokens
  const auto want = io.get("greedy.tokens").to_vector<int64_t>();
  for (size_t t = 0; t < want.size(); ++t) {
    EXPECT_LE(relative_error(logits.select(0, 0), io.get("greedy.logits").select(0, int64_t(t))),
              limit());
    const std::vector<int64_t> next = greedy_choice(logits);
    EXPECT_EQ(next[0], want[t]) << t;
    logits = model->step(Tensor::from(next, {1}), &state);
  }
}

TEST_P(GoldenModel, IsWrittenBackEqual) {
  const testing::TemporaryFolder temporary;
  const std::string copy = temporary.path();
  save_model(copy, *load_model(folder()));
  const SafeTensors a(folder() + "/model.safetensors"), b(copy + "/model.safetensors");
  ASSERT_EQ(a.names().size(), b.names().size());
  for (const std::string& n : a.names()) EXPECT_TRUE(bitwise_equal(a.get(n), b.get(n))) << n;
  const auto before = nlohmann::json::parse(read_file(folder() + "/config.json")),
             after = nlohmann::json::parse(read_file(copy + "/config.json"));
  for (const auto& [key, value] : before.items()) EXPECT_EQ(after.at(key), value) << key;
}

// Known faults B22, B26: prompts of 1 to 3 tokens, any split, a batch of unequal prompts.
TEST_P(GoldenModel, PrefillAndStepEqualTheFullForward) {
  const NoGrad off;
  const auto model = load_model(folder());
  const std::vector<int64_t> ids =
      SafeTensors(folder() + "/io.safetensors").get("input_ids").select(0, 0).to_vector<int64_t>();
  const int64_t T = 70;
  const Tensor all = Tensor::from(std::vector<int64_t>(ids.begin(), ids.begin() + T), {1, T});
  const Tensor full = model->logits(model->hidden(all)).value().select(0, 0);
  for (const int64_t split : {1, 2, 3, 5, 63, 64, 65}) {
    DecodeState state;
    Tensor logits = model->prefill(all.slice(1, 0, split), {}, &state);
    for (int64_t t = split;; ++t) {
      EXPECT_LE(relative_error(logits.select(0, 0), full.select(0, t - 1)), 1e-5)
          << "split " << split << " token " << t;
      if (t >= std::min<int64_t>(split + 5, T)) break;
      logits = model->step(all.slice(1, t, t + 1).reshape({1}), &state);
    }
  }
  const std::vector<std::vector<int64_t>> prompts = {{ids.begin(), ids.begin() + 2},
                                                     {ids.begin(), ids.begin() + 40},
                                                     {ids.begin(), ids.begin() + 1}};
  DecodeState state;
  const Tensor logits = chunked_prefill(*model, prompts, 21, &state);
  for (size_t i = 0; i < prompts.size(); ++i)
    EXPECT_LE(relative_error(logits.select(0, int64_t(i)),
                             full.select(0, int64_t(prompts[i].size()) - 1)),
              1e-5)
        << i;
}

TEST_P(GoldenModel, RecomputationChangesNoGradient) {
  const SafeTensors io(folder() + "/io.safetensors");
  std::vector<StateDict> gradients;
  for (const bool on : {false, true}) {
    const auto model = load_model(folder());
    model->set_recompute(on);
    backward(model->loss(io.get("input_ids"), io.get("targets")).loss);
    StateDict g;
    for (const NamedParameter& p : model->named_parameters()) g.emplace_back(p.name, p.grad());
    gradients.push_back(std::move(g));
  }
  for (size_t i = 0; i < gradients[0].size(); ++i)
    EXPECT_TRUE(bitwise_equal(gradients[0][i].second, gradients[1][i].second))
        << gradients[0][i].first;
}

INSTANTIATE_TEST_SUITE_P(Golden, GoldenModel,
                         ::testing::Values("gated_deltanet", "gated_deltanet_gva", "kda", "mamba2",
                                           "gla", "hgrn2", "lightnet", "retnet", "transformer",
                                           "transformer_window_qknorm", "rwkv7"));

// Known faults B44, B48: gates, norms and biases stay f32 in bf16 training and do not decay; all
// that is left is matrices, embeddings and convolution kernels.
TEST_P(GoldenModel, GatesAndNormsStayF32AndDoNotDecay) {
  const auto model = load_model(folder());
  const ModelConfig& config = model->config();
  const bool mamba2 = config.is_mamba2(), transformer = config.model_type == "transformer";
  const bool rwkv7 = config.is_rwkv7();
  const bool delta = config.model_type == "gated_deltanet" || config.model_type == "kda";
  model->enable_bf16();
  int gates = 0, norms = 0, matrices = 0;
  for (const NamedParameter& p : model->named_parameters()) {
    const auto is = [&](const char* part) { return p.name.find(part) != std::string::npos; };
    const bool norm = is("norm");
    const bool gate = is("A_log") || is("dt_bias") || p.name.ends_with(".D") || is("lower_bounds");
    // RWKV-7: mixes and vectors, and low-rank products, matrices that do not decay.
    const bool vector = rwkv7 && (is(".x_") || p.name.ends_with(".k_k") ||
                                  p.name.ends_with(".k_a") || p.name.ends_with(".r_k"));
    if (rwkv7 && is("lora") && !is("bias")) {
      EXPECT_EQ(p.decay, WeightDecay::off) << p.name;
    } else if (gate || norm || vector || is("bias")) {
      EXPECT_FALSE(p.parameter.shadow().defined()) << p.name;
      EXPECT_EQ(p.decay, WeightDecay::off) << p.name;
    } else {
      EXPECT_EQ(p.decay, WeightDecay::on) << p.name;
      EXPECT_GE(p.shape.size(), 2) << p.name;
    }
    EXPECT_EQ(p.parameter.master().dtype(), DType::f32) << p.name;
    gates += gate, norms += norm, matrices += p.decay == WeightDecay::on;
  }
  const int layers = int(model->layers());
  EXPECT_EQ(gates, mamba2 ? 3 * layers : delta ? 2 * layers : int(config.model_type == "hgrn2"));
  // Before mixer and MLP, the mixer's own, the last.
  // RWKV-7's have biases, and it has one more before its first block.
  const int per_layer = mamba2 ? 2 : transformer ? (config.qk_norm ? 4 : 2) : 3;
  EXPECT_EQ(norms, rwkv7 ? 6 * layers + 4 : per_layer * layers + 1);
  EXPECT_GE(matrices, rwkv7 ? 6 * layers + 2 : (mamba2 ? 3 : delta ? 10 : 7) * layers);
}

// Known fault B28: padding on the left, cut off as a sequence of its own, whatever the batch size.
TEST_P(GoldenModel, LeftPaddingDoesNotLeak) {
  const NoGrad off;
  const auto model = load_model(folder());
  const Tensor ids = SafeTensors(folder() + "/io.safetensors").get("input_ids").slice(0, 0, 1);
  const Tensor tokens = ids.slice(1, 0, 7);
  const Tensor want = model->logits(model->hidden(tokens)).value();
  for (const int64_t batch : {1, 2}) {
    const Tensor padded = Tensor::zeros({batch, 12}, DType::i64);
    std::vector<int64_t> cu{0};
    for (int64_t b = 0; b < batch; ++b) {
      padded.slice(0, b, b + 1).slice(1, 5, 12).copy_(tokens);
      padded.slice(0, b, b + 1).slice(1, 0, 5).copy_(ids.slice(1, 20, 25));
      cu.push_back(12 * b + 5);
      cu.push_back(12 * b + 12);
    }
    const Tensor got = model->logits(model->hidden(padded, SeqLayout::packed(cu))).value();
    for (int64_t b = 0; b < batch; ++b)
      EXPECT_LE(relative_error(got.slice(0, b, b + 1).slice(1, 5, 12), want), 1e-5) << batch;
  }
}

TEST(Model, PresetHasThePaperCount) {
  EXPECT_EQ(make_model(preset("gdn-100m"))->parameter_count(), 103'789'528);
  EXPECT_EQ(make_model(preset("kda-100m"))->parameter_count(), 101'690'476);
  EXPECT_EQ(make_model(preset("gdn2-100m"))->parameter_count(), 112'252'012);
  EXPECT_EQ(make_model(preset("llama-100m"))->parameter_count(), 104'355'328);
}

TEST(Model, LoadingListsEveryMisfit) {
  ModelConfig c = preset("gdn-100m");
  c.vocab_size = 16;
  c.hidden_size = 16;
  c.num_hidden_layers = 1;
  c.num_heads = 1;
  c.head_dim = 8;
  const auto model = make_model(c);
  StateDict state = model->state_dict();
  state[0].second = Tensor::zeros({3, 3});
  state.emplace_back("extra", Tensor::zeros({1}));
  state.erase(state.begin() + 1);
  try {
    model->load_state_dict(state);
    FAIL() << "no error";
  } catch (const Error& e) {
    const std::string m = e.what();
    for (const char* want : {"missing", "unexpected extra", "want [16,16]"})
      EXPECT_NE(m.find(want), std::string::npos) << m;
  }
}

ModelConfig small_config(const std::string& model_type = "gated_deltanet") {
  ModelConfig c;
  c.model_type = model_type;
  c.vocab_size = 64;
  c.hidden_size = 48;
  c.num_hidden_layers = 4;
  c.num_heads = 3;
  c.head_dim = 16;
  return c;
}

// Every kind of mixer, with random weights.
class DeltaModel : public ::testing::TestWithParam<const char*> {};

TEST_P(DeltaModel, PrefillAndStepEqualTheFullForward) {
  for (const bool grouped : {false, true}) {
    ModelConfig c = small_config(GetParam());
    c.num_v_heads = grouped ? 6 : 3;
    c.allow_neg_eigval = grouped;
    const auto model = make_model(c);
    init_weights(*model, 21);
    expect_prefill_and_step(*model);
  }
}

TEST_P(DeltaModel, PackedDocumentsDoNotSeeEachOther) {
  const auto model = make_model(small_config(GetParam()));
  init_weights(*model, 22);
  expect_documents_apart(*model);
}

TEST_P(DeltaModel, DamiReachesItsTargetsAndTouchesNothingElse) {
  const auto model = make_model(small_config(GetParam()));
  init_weights(*model, 11);
  StateDict before;
  for (const auto& [name, t] : model->state_dict()) before.emplace_back(name, t.clone());
  const Tensor tokens = random_tokens(2, 256, 64);
  for (const HeadReport& r : calibrate_dami(*model, {}, tokens)) {
    EXPECT_NEAR(r.sensitivity, r.target_sensitivity, 1e-5);
    EXPECT_NEAR(r.timescale / r.target_timescale, 1, 1e-4);
  }
  // Sequential: measured on the finished model, every layer still meets its targets.
  const auto tau = timescale_ladder({}, 3), profile = sensitivity_profile({}, 4);
  for (const HeadReport& r : measure_gates(*model, tokens)) {
    EXPECT_NEAR(r.sensitivity, profile[size_t(r.layer)], 1e-5);
    EXPECT_NEAR(r.timescale / tau[size_t(r.head)], 1, 1e-4);
  }
  const StateDict after = model->state_dict();
  for (size_t i = 0; i < before.size(); ++i) {
    const bool gate = before[i].first.ends_with("A_log") || before[i].first.ends_with("dt_bias");
    EXPECT_EQ(bitwise_equal(before[i].second, after[i].second), !gate) << before[i].first;
  }
}

INSTANTIATE_TEST_SUITE_P(Delta, DeltaModel, ::testing::Values("gated_deltanet", "kda", "gdn2"));

// DAMI keeps the channels' own biases: their mean is the head's, their spread 0.03.
TEST(Calibrate, DamiSpreadsTheBiasesOfChannels) {
  const auto model = make_model(small_config("kda"));
  init_weights(*model, 11);
  const auto report = calibrate_dami(*model, {}, random_tokens(1, 128, 64));
  for (const HeadReport& r : report) {
    const auto gate = model->block(r.layer).mixer().decay_gate_parameters();
    ASSERT_EQ(gate->channels, 16);
    const auto bias = gate->dt_bias.master().to_vector<double>();
    double mean = 0, square = 0;
    for (int64_t c = 0; c < 16; ++c) mean += bias[size_t(r.head * 16 + c)] / 16;
    for (int64_t c = 0; c < 16; ++c) square += std::pow(bias[size_t(r.head * 16 + c)] - mean, 2);
    EXPECT_NEAR(mean, r.dt_bias, 1e-6);
    EXPECT_GT(std::sqrt(square / 16), 0.01);
    EXPECT_LT(std::sqrt(square / 16), 0.06);
  }
}

// Native rules: A_log of KDA and GDN2 is log U(1,16), of Gated DeltaNet log U(0,16).
TEST(Calibrate, NativeGatesByModel) {
  for (const char* type : {"kda", "gdn2"}) {
    ModelConfig c = small_config(type);
    c.num_heads = 64;
    c.head_dim = 8;
    const auto model = make_model(c);
    init_weights(*model, 5);
    for (int64_t l = 0; l < model->layers(); ++l)
      for (double a :
           model->block(l).mixer().decay_gate_parameters()->A_log.master().to_vector<double>()) {
        EXPECT_GE(a, 0);
        EXPECT_LE(a, std::log(16.0));
      }
  }
}

TEST(Calibrate, SchemesShareEverythingButTheGates) {
  const auto a = make_model(small_config()), b = make_model(small_config());
  init_weights(*a, 5);
  init_weights(*b, 5);
  apply_post(*b, 4096);
  const StateDict x = a->state_dict(), y = b->state_dict();
  for (size_t i = 0; i < x.size(); ++i)
    EXPECT_EQ(bitwise_equal(x[i].second, y[i].second), !x[i].first.ends_with("A_log"))
        << x[i].first;
  EXPECT_NEAR(b->block(2).mixer().decay_gate_parameters()->A_log.master().select(0, 2).item(),
              std::log(4096.0), 1e-5);
}

}  // namespace
}  // namespace ebb::testing
