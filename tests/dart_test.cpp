// DART: beside Mamba-2, beside its definition token by token, gradients, decoding from any place,
// variants, initialisation, what a config may say.
#include "models/dart.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "autograd/tape.h"
#include "eval/runner.h"
#include "models/calibrate.h"
#include "models/checkpoint.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/random.h"
#include "tests/reference/dart.h"
#include "tests/temporary_folder.h"

namespace ebb::testing {
namespace {

ModelConfig small_config(int64_t chunk = 8) {
  ModelConfig c = preset("dart-100m");
  c.vocab_size = 50;
  c.hidden_size = 24;
  c.num_hidden_layers = 2;
  c.head_dim = 16;
  c.num_heads = 3;
  c.state_size = 12;
  c.sma_chunk = chunk;
  c.initializer_range = 0.2;
  return c;
}

// Random weights with open gates, in f64 if asked for.
std::unique_ptr<LanguageModel> open_model(const ModelConfig& c, DType dtype = DType::f32) {
  auto model = make_model(c);
  init_weights(*model, 21);
  for (const NamedParameter& p : model->named_parameters()) {
    if (p.name.ends_with("g_proj.weight")) init_normal(p, 5, 0.5);
    if (dtype == DType::f64) p.parameter.set_master(p.parameter.master().to(DType::f64));
  }
  return model;
}

std::vector<int64_t> some_ids(int64_t n, int64_t first = 0) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < n; ++i)
    ids.push_back(int64_t(random_word({3, uint64_t(first)}, uint64_t(i)) % 50));
  return ids;
}

Tensor row(const std::vector<int64_t>& ids) { return Tensor::from(ids, {1, int64_t(ids.size())}); }

Tensor logits_of(const LanguageModel& model, const std::vector<int64_t>& ids) {
  const NoGrad off;
  return model.logits(model.hidden(row(ids))).value().select(0, 0);  // [T,V]
}

std::vector<ModelConfig> variants() {
  std::vector<ModelConfig> all(6, small_config());
  all[1].sma_shared_read = false;
  all[2].sma_normalize = false;
  all[3].use_sma = false;
  all[4].sma_chunk = 5;
  all[4].sma_shared_read = false;
  all[4].tie_word_embeddings = true;
  all[5].sma_chunk = 1;
  all[5].sma_eps_row = 1e-3;
  return all;
}

TEST(Dart, PresetsHaveThePaperCounts) {
  const std::map<std::string, int64_t> want = {{"dart-100m", 109'163'488},
                                               {"dart-130m", 132'547'008},
                                               {"dart-370m", 377'832'960},
                                               {"dart-780m", 794'390'784}};
  for (const auto& [name, count] : want) {
    const ModelConfig c = preset(name);
    ModelConfig plain = c;
    plain.model_type = "mamba2";
    const int64_t d = c.hidden_size, added = c.num_hidden_layers * d * (128 + 64 + 1);
    if (name != "dart-780m") {  // 3 GB
      EXPECT_EQ(make_model(c)->parameter_count(), count) << name;
      EXPECT_EQ(make_model(plain)->parameter_count(), count - added) << name;
    }
    EXPECT_LT(double(added) / double(count - added), name == "dart-100m" ? 0.04 : 0.03) << name;
  }
}

TEST(Dart, IsItsDefinitionTokenByToken) {
  for (const ModelConfig& c : variants()) {
    const auto model = open_model(c, DType::f64);
    const std::vector<int64_t> ids = some_ids(29);
    const Tensor want =
        Tensor::from(reference::DartReference(*model).logits(ids), {29, c.vocab_size});
    EXPECT_LE(relative_error(logits_of(*model, ids), want), 1e-11) << c.to_json().dump();
  }
}

// The same bits, forward and backward, for memories of `chunk` tokens.
void expect_mamba2_at_zero_gate(int64_t chunk) {
  SCOPED_TRACE(chunk);
  ModelConfig c = small_config(chunk);
  const auto dart = make_model(c);
  init_weights(*dart, 21);
  c.model_type = "mamba2";
  const auto plain = make_model(c);
  init_weights(*plain, 21);
  const auto shared = plain->state_dict();
  std::map<std::string, Tensor> mine;
  for (const auto& [name, t] : dart->state_dict()) mine[name] = t;
  for (const auto& [name, t] : shared) EXPECT_TRUE(bitwise_equal(t, mine.at(name))) << name;

  const Tensor ids = Tensor::from(some_ids(2 * 150), {2, 150}),
               labels = Tensor::from(some_ids(2 * 150, 1), {2, 150});
  const auto run = [&](const LanguageModel& m) {
    const Var loss = m.loss(ids, labels).loss;
    backward(loss);
    return std::pair{logits_of(m, some_ids(150)), loss.value()};
  };
  const auto a = run(*plain), b = run(*dart);
  EXPECT_TRUE(bitwise_equal(a.first, b.first));
  EXPECT_TRUE(bitwise_equal(a.second, b.second));
  std::map<std::string, Tensor> gradients;
  for (const NamedParameter& p : dart->named_parameters()) gradients[p.name] = p.grad();
  for (const NamedParameter& p : plain->named_parameters())
    EXPECT_TRUE(bitwise_equal(p.grad(), gradients.at(p.name))) << p.name;
  for (const char* name : {"q_proj", "e_proj", "g_proj"}) {
    double size = 0;
    for (const double x : gradients.at(std::string("backbone.layers.0.mixer.") + name + ".weight")
                              .contiguous()
                              .to_vector<double>())
      size += std::abs(x);
    // Queries learn as soon as the gate is open, and that it does from the first step.
    EXPECT_EQ(size > 1e-6, name[0] == 'g') << name << " " << size;
  }
}

// Whole chunks of the scan (64 tokens), parts of one, more than one.
TEST(Dart, AtZeroGateItIsMamba2) {
  for (const int64_t chunk : {64, 16, 5, 100}) expect_mamba2_at_zero_gate(chunk);
}

// Central differences of the loss along a random direction of each tensor.
TEST(Dart, GradientsOfTheWholeModel) {
  const Tensor ids = Tensor::from(some_ids(2 * 27), {2, 27}),
               labels = Tensor::from(some_ids(2 * 27, 1), {2, 27});
  for (const ModelConfig& c : variants()) {
    const auto model = open_model(c, DType::f64);
    const auto loss = [&] { return model->loss(ids, labels).loss; };
    backward(loss());
    const NoGrad off;
    for (const NamedParameter& p : model->named_parameters()) {
      if (!c.use_sma && !p.grad().defined()) continue;  // q, e, g then lead nowhere
      const Tensor value = p.value(), start = value.clone();
      const Tensor u = random_normal(p.shape, {17, name_hash(p.name)}, DType::f64);
      double slope = 0;
      const Tensor gradient = p.grad().contiguous();
      for (int64_t i = 0; i < u.numel(); ++i)
        slope += gradient.data<double>()[i] * u.data<double>()[i];
      const double h = 1e-5;
      const auto at = [&](double by) {
        Tensor moved = start.clone();
        for (int64_t i = 0; i < u.numel(); ++i) moved.data<double>()[i] += by * u.data<double>()[i];
        value.copy_(moved);
        return loss().value().item();
      };
      const double difference = (at(h) - at(-h)) / (2 * h);
      value.copy_(start);
      EXPECT_NEAR(slope, difference, 1e-6 * std::max(1e-2, std::abs(difference)))
          << p.name << " " << c.to_json().dump();
    }
  }
}

TEST(Dart, RecomputedBlocksGiveTheSameGradients) {
  const Tensor ids = row(some_ids(40)), labels = row(some_ids(40, 1));
  const auto a = open_model(small_config()), b = open_model(small_config());
  b->set_recompute(true);
  backward(a->loss(ids, labels).loss);
  backward(b->loss(ids, labels).loss);
  const auto x = a->named_parameters(), y = b->named_parameters();
  for (size_t i = 0; i < x.size(); ++i)
    EXPECT_TRUE(bitwise_equal(x[i].grad(), y[i].grad())) << x[i].name;
}

// Prompts of every length around the borders of runs of 8 tokens, then steps over the next ones.
TEST(Dart, PrefillAndStepEqualTheFullForward) {
  const NoGrad off;
  for (const ModelConfig& c : variants()) {
    const auto model = open_model(c, DType::f64);
    const std::vector<int64_t> ids = some_ids(44);
    const Tensor full = logits_of(*model, ids);
    for (const int64_t split : {1, 2, 3, 7, 8, 9, 15, 16, 17, 30}) {
      DecodeState state;
      Tensor logits = model->prefill(row({ids.begin(), ids.begin() + split}), {}, &state);
      for (int64_t t = split; t < std::min<int64_t>(split + 12, 44); ++t) {
        ASSERT_LE(relative_error(logits.select(0, 0), full.select(0, t - 1)), 1e-11)
            << "split " << split << " token " << t << " " << c.to_json().dump();
        logits = model->step(Tensor::from(std::vector<int64_t>{ids[size_t(t)]}, {1}), &state);
      }
    }
    DecodeState fresh;  // from nothing at all
    for (int64_t t = 0; t < 20; ++t) {
      const Tensor logits =
          model->step(Tensor::from(std::vector<int64_t>{ids[size_t(t)]}, {1}), &fresh);
      ASSERT_LE(relative_error(logits.select(0, 0), full.select(0, t)), 1e-11) << t;
    }
  }
}

// A prefill that goes on from a state, wherever in a run that stands, and steps in between.
TEST(Dart, PrefillGoesOnFromAnyPlace) {
  const NoGrad off;
  for (const ModelConfig& c : variants()) {
    const auto model = open_model(c, DType::f64);
    const std::vector<int64_t> ids = some_ids(60);
    const Tensor full = logits_of(*model, ids);
    for (const std::vector<int64_t>& windows :
         std::vector<std::vector<int64_t>>{{8, 8, 8, 20},
                                           {1, 1, 1, 1},
                                           {3, 5, 1, 7, 8, 9},
                                           {5, 2, 1, 30, 2},
                                           {16, 4, 17, 3},
                                           {7, 1, 1, 7, 16, 20}}) {
      DecodeState state;
      int64_t t = 0;
      for (const int64_t n : windows) {
        const Tensor logits =
            model->prefill(row({ids.begin() + t, ids.begin() + t + n}), {}, &state);
        t += n;
        ASSERT_LE(relative_error(logits.select(0, 0), full.select(0, t - 1)), 1e-11)
            << t << " " << c.to_json().dump();
        const Tensor next = Tensor::from(std::vector<int64_t>{ids[size_t(t)]}, {1});
        ASSERT_LE(relative_error(model->step(next, &state).select(0, 0), full.select(0, t)), 1e-11)
            << t << " " << c.to_json().dump();
        ++t;
      }
    }
  }
}

// Ragged prompts side by side, in windows of every size, then rows taken out and repeated.
TEST(Dart, RaggedPromptsInWindows) {
  const NoGrad off;
  const auto model = open_model(small_config(), DType::f64);
  const std::vector<int64_t> lengths = {1, 8, 9, 23, 2, 16, 40};
  std::vector<std::vector<int64_t>> prompts;
  std::vector<Tensor> full;
  for (size_t i = 0; i < lengths.size(); ++i) {
    std::vector<int64_t> ids = some_ids(lengths[i] + 12, int64_t(i));
    full.push_back(logits_of(*model, ids));
    prompts.emplace_back(ids.begin(), ids.begin() + lengths[i]);
  }
  for (const int64_t share : {1, 3, 8, 11, 16, 100}) {
    DecodeState state;
    Tensor logits = chunked_prefill(*model, prompts, share * int64_t(prompts.size()), &state);
    for (size_t i = 0; i < prompts.size(); ++i)
      ASSERT_LE(relative_error(logits.select(0, int64_t(i)), full[i].select(0, lengths[i] - 1)),
                1e-11)
          << share << " " << i;
    std::vector<int64_t> rows = {6, 3, 3, 0, 2};
    state = state.select(rows);
    for (int64_t k = 0; k < 12; ++k) {
      std::vector<int64_t> next;
      for (const int64_t r : rows)
        next.push_back(some_ids(lengths[size_t(r)] + 12, r)[size_t(lengths[size_t(r)] + k)]);
      logits = model->step(Tensor::from(next, {5}), &state);
      for (size_t i = 0; i < rows.size(); ++i)
        ASSERT_LE(relative_error(logits.select(0, int64_t(i)),
                                 full[size_t(rows[i])].select(0, lengths[size_t(rows[i])] + k)),
                  1e-11)
            << share << " " << k << " " << i;
    }
  }
}

TEST(Dart, PackedDocumentsDoNotSeeEachOther) {
  const NoGrad off;
  const auto model = open_model(small_config());
  const std::vector<int64_t> ids = some_ids(100);
  const Tensor packed =
      model->logits(model->hidden(row(ids), SeqLayout::packed({0, 30, 31, 100}))).value();
  for (const auto& [begin, end] : {std::pair{0, 30}, std::pair{30, 31}, std::pair{31, 100}})
    EXPECT_LE(relative_error(packed.select(0, 0).slice(0, begin, end),
                             logits_of(*model, {ids.begin() + begin, ids.begin() + end})),
              1e-5)
        << begin;
}

// Going on from a state records nothing.
TEST(Dart, GradientsThroughAStateAreRefused) {
  const auto model = open_model(small_config());
  DecodeState state, after;
  model->prefill(row(some_ids(9)), {}, &state);
  try {
    model->hidden(row(some_ids(3)), {}, &state, &after);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("without gradients"), std::string::npos) << e.what();
  }
}

// The same weights with another config: what evaluation of a trained model changes.
TEST(Dart, FoldersWithChanges) {
  const TemporaryFolder scratch;
  const auto model = open_model(small_config());
  save_model(scratch.path(), *model);
  const std::vector<int64_t> ids = some_ids(30);
  const Tensor here = logits_of(*model, ids);
  EXPECT_TRUE(bitwise_equal(logits_of(*load_model(scratch.path()), ids), here));
  const auto off = load_model(scratch.path(), {{"use_sma", false}});
  const auto finer = load_model(scratch.path(), {{"sma_chunk", 4}});
  EXPECT_EQ(finer->config().sma_chunk, 4);
  // Until the first run is complete nothing is different, up to the scan's rounding.
  EXPECT_LE(relative_error(logits_of(*off, ids).slice(0, 0, 8), here.slice(0, 0, 8)), 1e-5);
  EXPECT_LE(relative_error(logits_of(*finer, ids).slice(0, 0, 4), here.slice(0, 0, 4)), 1e-5);
  EXPECT_GT(relative_error(logits_of(*off, ids).slice(0, 8, 30), here.slice(0, 8, 30)), 1e-3);
  EXPECT_GT(relative_error(logits_of(*finer, ids).slice(0, 4, 30), here.slice(0, 4, 30)), 1e-3);
  // Without read-out it is the Mamba-2 of these weights.
  ModelConfig plain = small_config();
  plain.model_type = "mamba2";
  const auto mamba2 = make_model(plain);
  std::map<std::string, Tensor> all;
  for (const auto& [name, t] : model->state_dict()) all[name] = t;
  for (const auto& [name, t] : mamba2->state_dict()) t.copy_(all.at(name));
  EXPECT_TRUE(bitwise_equal(logits_of(*off, ids), logits_of(*mamba2, ids)));
  const auto error = [&](const nlohmann::json& changes) -> std::string {
    try {
      load_model(scratch.path(), changes);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_NE(error({{"sma_chunks", 4}}).find("sma_chunks: unknown; did you mean sma_chunk?"),
            std::string::npos)
      << error({{"sma_chunks", 4}});
  EXPECT_NE(error({{"sma_chunk", 0}}).find("sma_chunk: must lie in"), std::string::npos);
  EXPECT_NE(error({{"sma_shared_read", false}}).find("in_proj.weight is"), std::string::npos)
      << error({{"sma_shared_read", false}});
}

TEST(Dart, InitialWeights) {
  for (const bool fla : {true, false}) {
    ModelConfig c = small_config();
    c.hidden_size = 64;
    c.num_heads = 8;
    c.weight_init = fla ? "fla" : "mamba_ssm";
    const auto model = make_model(c);
    init_weights(*model, 3);
    for (const auto& [name, t] : model->state_dict()) {
      double square = 0, largest = 0;
      for (const double x : t.contiguous().to_vector<double>())
        square += x * x / double(t.numel()), largest = std::max(largest, std::abs(x));
      if (name.ends_with("g_proj.weight")) {
        EXPECT_EQ(largest, 0) << name;
      } else if (name.ends_with("q_proj.weight") || name.ends_with("e_proj.weight")) {
        EXPECT_NEAR(std::sqrt(square), fla ? 0.2 : 1 / std::sqrt(3.0 * 64), fla ? 0.02 : 0.006)
            << name;
        if (!fla) {
          EXPECT_LE(largest, 1.0 / 8) << name;
        }
      }
    }
  }
  EXPECT_EQ(preset("dart-130m").weight_init, "mamba_ssm");
}

// DAMI and PoST touch the decay gates only, as Mamba-2's.
TEST(Dart, DecayInitialisersAreMamba2s) {
  ModelConfig c = small_config();
  c.num_hidden_layers = 3;
  const auto a = make_model(c), dami = make_model(c), post = make_model(c);
  c.model_type = "mamba2";
  const auto plain = make_model(c);
  for (const auto& m : {a.get(), dami.get(), post.get(), plain.get()}) init_weights(*m, 5);
  calibrate_dami(*dami, {.seed = 5}, {});
  calibrate_dami(*plain, {.seed = 5}, {});
  apply_post(*post, 4096);
  const StateDict x = a->state_dict(), y = dami->state_dict(), z = post->state_dict();
  std::map<std::string, Tensor> gates;
  for (const auto& [name, t] : plain->state_dict()) gates[name] = t;
  for (size_t i = 0; i < x.size(); ++i) {
    const bool A = x[i].first.ends_with("A_log"), dt = x[i].first.ends_with("dt_bias");
    EXPECT_EQ(bitwise_equal(x[i].second, y[i].second), !(A || dt)) << x[i].first;
    EXPECT_EQ(bitwise_equal(x[i].second, z[i].second), !A) << x[i].first;
    if (A || dt) {
      EXPECT_TRUE(bitwise_equal(y[i].second, gates.at(x[i].first)));
    }
  }
  // The pre-activations are the last columns of in_proj, with a second read vector too.
  ModelConfig own = small_config();
  own.sma_shared_read = false;
  const auto model = open_model(own);
  const auto& mixer = model->block(0).mixer();
  const Tensor h = random_normal({5, 24}, {1, 2});
  for (const auto& [name, t] : model->state_dict())
    if (name == "backbone.layers.0.mixer.in_proj.weight") {
      EXPECT_EQ(t.size(0), 2 * 48 + 3 * 12 + 3);
      const NoGrad off;
      const Tensor z = mixer.gate_preactivations(h);
      for (int64_t i = 0; i < 5; ++i)
        for (int64_t k = 0; k < 3; ++k) {
          double want = 0;
          for (int64_t j = 0; j < 24; ++j)
            want += double(h.data<float>()[i * 24 + j]) *
                    double(t.data<float>()[(2 * 48 + 3 * 12 + k) * 24 + j]);
          EXPECT_NEAR(z.data<float>()[i * 3 + k], want, 1e-5);
        }
    }
}

std::string config_error(const nlohmann::json& changes) {
  nlohmann::json j = preset("dart-100m").to_json();
  j.update(changes);
  try {
    parse_foreign_config(j, "config.json");
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Dart, ConfigsThatMakeNoSenseAreRefused) {
  EXPECT_EQ(config_error(nlohmann::json::object()), "");
  const std::pair<nlohmann::json, const char*> wrong[] = {
      {{{"sma_chunk", 0}}, "sma_chunk: must lie in 1 ... 2^30 - 1, got 0"},
      {{{"sma_chunk", -16}}, "sma_chunk: must lie in"},
      {{{"sma_chunk", 2147483648}}, "sma_chunk: must lie in"},
      {{{"sma_chunk", 16.5}}, "sma_chunk: want a whole number"},
      {{{"sma_eps_row", 0}}, "sma_eps_row: must be positive"},
      {{{"sma_eps", -1}}, "sma_eps: must be positive"},
      {{{"use_sma", "off"}}, "use_sma: want true or false"},
      {{{"sma_shared_read", 1}}, "sma_shared_read: want true or false"},
      {{{"state_size", 512}}, "state_size: must be at most 256"},
      {{{"head_dim", 48}}, "num_heads: 16 heads of 48"},
      {{{"n_groups", 2}}, "n_groups: 2 is not supported"},
      {{{"use_bias", true}}, "use_bias: true is not supported"},
      {{{"rmsnorm", false}}, "rmsnorm: false is not supported"},
      {{{"norm_before_gate", true}}, "norm_before_gate: true is not supported"}};
  for (const auto& [change, text] : wrong)
    EXPECT_NE(config_error(change).find(text), std::string::npos)
        << change << ": " << config_error(change);
  nlohmann::json strict = preset("dart-130m").to_json();
  strict.erase("architectures");
  EXPECT_EQ(parse_model_config(strict, "/model", "r").to_json(), preset("dart-130m").to_json());
  strict["sma_chnk"] = 16;
  try {
    parse_model_config(strict, "/model", "r");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("/model/sma_chnk: unknown; did you mean sma_chunk?"),
              std::string::npos)
        << e.what();
  }
  // Weights of another state size: named, all of them.
  const TemporaryFolder scratch;
  save_model(scratch.path(), *open_model(small_config()));
  try {
    load_model(scratch.path(), {{"state_size", 16}});
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("q_proj.weight is [12,24], want [16,24]"),
              std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace ebb::testing
