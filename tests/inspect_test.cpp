// `ebb inspect`: counts that must be exact, and gates as the library measures them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/calibrate.h"
#include "models/decays.h"
#include "tensor/file.h"
#include "tests/cli.h"
#include "tests/model_folder.h"

namespace ebb::testing {
namespace {

using nlohmann::json;

void expect_lines(const std::string& out, const std::vector<std::string>& parts) {
  for (const std::string& p : parts)
    EXPECT_NE(out.find(p), std::string::npos) << "want " << p << "\n" << out;
}

void expect_failure(const CliResult& r, const std::string& text, int code = 1) {
  EXPECT_EQ(r.code, code) << r.out << r.err;
  EXPECT_EQ(r.out, "");
  EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
  EXPECT_NE(r.err.find(text), std::string::npos) << "want " << text << "\n" << r.err;
}

// The published size of the paper's Gated DeltaNet, to the last parameter.
TEST(Inspect, PresetHasThePaperCount) {
  const CliResult r = run_ebb("inspect gdn-100m");
  ASSERT_EQ(r.code, 0) << r.err;
  expect_lines(r.out, {"parameters                                         103,789,528\n",
                       "layers 0-17, each 3,945,612 ", " 71,021,016\n", " 16,384,000  [32000,512]",
                       "mlp                                              2,359,296\n",
                       "each layer f32 [6,64,128] ", "  49,152 elements"});
}

TEST(Inspect, Mamba2HasThePaperCount) {
  const CliResult r = run_ebb("inspect mamba2-100m");
  ASSERT_EQ(r.code, 0) << r.err;
  expect_lines(r.out, {"parameters                                         105,013,216\n",
                       "layers 0-41, each 1,720,112 ", "in_proj.weight ", " 1,187,840  [2320,512]",
                       "each layer f32 [16,128,64] ", "  131,072 elements"});
}

TEST(Inspect, Rwkv7HasThePaperCount) {
  const CliResult r = run_ebb("inspect rwkv7-100m");
  ASSERT_EQ(r.code, 0) << r.err;
  expect_lines(r.out, {"parameters                                         101,432,832\n",
                       "layers 1-19, each 3,433,984 ", "layer 0 ", " 3,418,112\n",
                       "each layer f32 [8,64,64] ", "  32,768 elements"});
}

// What is decayed, and the decay biases, which may learn twice as fast.
TEST(Inspect, OptimizerGroups) {
  CliResult r = run_ebb("inspect rwkv7-100m");
  ASSERT_EQ(r.code, 0) << r.err;
  expect_lines(r.out, {"optimizer groups\n  weight decay ", "  122 tensors\n",
                       fmt::format("{:<46}{:>16}  attn.w_lora.lora.2.bias; with optim.lr_factors\n",
                                   "  no weight decay, learning rate x 2", "10,240")});
  r = run_ebb("inspect rwkv7-100m --json -");
  const json groups = json::parse(r.out)["optimizer_groups"];
  ASSERT_EQ(groups.size(), 3u);
  int64_t sum = 0;
  for (const json& g : groups) sum += g["elements"].get<int64_t>();
  EXPECT_EQ(sum, 101'432'832);
  EXPECT_EQ(groups[2]["lr_factor"], 2);
  EXPECT_EQ(groups[2]["weight_decay"], false);
  EXPECT_EQ(groups[2]["tensors"], 20);
  EXPECT_EQ(groups[2]["names"], json({"attn.w_lora.lora.2.bias"}));
  r = run_ebb("inspect gdn-100m --json -");
  EXPECT_EQ(json::parse(r.out)["optimizer_groups"].size(), 2u);
}

// The DART paper's cache: 131,072 elements beside 524,288.
TEST(Inspect, DartHasThePaperCountAndCache) {
  CliResult r = run_ebb("inspect dart-100m");
  ASSERT_EQ(r.code, 0) << r.err;
  expect_lines(r.out,
               {"parameters                                         109,163,488\n",
                "q_proj.weight                                     65,536  [128,512]",
                "g_proj.weight                                        512  [1,512]",
                "memories after 4,096 tokens, elements a head           131,072  16 of 256 "
                "tokens, N 128, P 64\n",
                "keys and values of token attention, a head             524,288  0.25 of them; "
                "N/(2S) = 0.25\n",
                "bytes of a sequence's memories, bf16               176,160,768\n"});
  r = run_ebb("inspect dart-100m --context 1000 --json -");
  ASSERT_EQ(r.code, 0) << r.err;
  const json m = json::parse(r.out)["memories"];
  EXPECT_EQ(m["elements_per_head"], 4 * 128 * 64);  // the ragged run too
  EXPECT_EQ(m["attention_elements_per_head"], 2 * 1000 * 64);
  EXPECT_DOUBLE_EQ(m["ratio"].get<double>(), 0.256);
  EXPECT_EQ(m["bytes_f32"], 4 * 42 * 16 * 4 * 128 * 64);
  expect_failure(run_ebb("inspect dart-100m --context 0"), "--context", 2);
  EXPECT_EQ(run_ebb("inspect gdn-100m").out.find("memories"), std::string::npos);
}

// A cache is counted for the text it holds, not for the rows that a fresh one begins with.
TEST(Inspect, TransformerCountsItsCache) {
  const auto state = [](const std::string& model) {
    const CliResult r = run_ebb("inspect " + model + " --json -");
    EXPECT_EQ(r.code, 0) << r.err;
    return json::parse(r.out)["state"];
  };
  const int64_t tokens = 21 * 2 * 8 * 64, positions = 21 * 8;  // elements, bytes
  for (const int64_t context : {1, 100, 4096}) {
    const json s = state("llama-100m --context " + std::to_string(context));
    EXPECT_EQ(s["tokens"], context);
    EXPECT_EQ(s["bytes_f32"], 4 * tokens * context + positions);
    EXPECT_EQ(s["bytes_bf16"], 2 * tokens * context + positions);
    EXPECT_EQ(s["layers"][20][1]["elements"], context * 8 * 64);
  }
  const json window =
      state(std::string(EBB_TEST_DATA) + "/models/transformer_window_qknorm --context 4096");
  EXPECT_EQ(window["tokens"], 32);
  EXPECT_EQ(window["layers"][0][0]["bytes"], 4 * 32 * 2 * 32);
  EXPECT_FALSE(state("retnet-100m").contains("tokens"));
}

TEST(Inspect, JsonAddsUp) {
  const CliResult r =
      run_ebb("inspect " + std::string(EBB_TEST_DATA) + "/models/gated_deltanet_gva --json -");
  ASSERT_EQ(r.code, 0) << r.err;
  const json j = json::parse(r.out);
  EXPECT_EQ(j["parameters"], 98184);  // as the public library counts it
  int64_t sum = 0;
  for (const json& p : j["outside_layers"]) sum += p["elements"].get<int64_t>();
  for (const json& g : j["layers"]) {
    int64_t layer = 0;
    for (const json& p : g["parameters"]) layer += p["elements"].get<int64_t>();
    EXPECT_EQ(layer, g["elements_per_layer"]);
    sum += layer * (g["last"].get<int64_t>() - g["first"].get<int64_t>() + 1);
  }
  EXPECT_EQ(sum, 98184);
  // Two value heads of [32,32], and 4 columns of 32 + 32 + 64 channels, in f32, twice.
  EXPECT_EQ(j["state"]["bytes_f32"], 2 * 4 * (2 * 32 * 32 + 128 * 4));
  EXPECT_EQ(j["state"]["bytes_bf16"], 2 * (4 * 2 * 32 * 32 + 2 * 128 * 4));
  EXPECT_FALSE(j.contains("gates"));
}

TEST(Inspect, GatesOnTextAndOnItsShards) {
  const ScratchFolder scratch;
  const std::string model = scratch.path() + "/m", text = scratch.path() + "/t.txt";
  save_small_model(model);
  write_file_atomically(text, some_text(4000));
  ASSERT_EQ(run_ebb("tokenize " + text + " --tokenizer bytes --out " + scratch.path() + "/t").code,
            0);
  const std::string size = " --sequences 2 --length 500 ";
  std::vector<json> gates;
  for (const std::string& source :
       {text + " --tokenizer bytes", scratch.path() + "/t", scratch.path() + "/t-00000.bin"}) {
    const CliResult r = run_ebb("inspect " + model + " --tokens " + source + size + "--json -");
    ASSERT_EQ(r.code, 0) << r.err;
    gates.push_back(json::parse(r.out)["gates"]);
  }
  EXPECT_EQ(gates[0], gates[1]);
  EXPECT_EQ(gates[0], gates[2]);

  const Tensor tokens = Tensor::from(Tokenizer::bytes().encode(some_text(1000)), {2, 500});
  const auto here = measure_gates(*load_model(model), tokens);
  ASSERT_EQ(gates[0].size(), 4u);
  ASSERT_EQ(here.size(), 4u);
  for (size_t i = 0; i < here.size(); ++i) {
    EXPECT_EQ(gates[0][i]["layer"], here[i].layer);
    EXPECT_EQ(gates[0][i]["head"], here[i].head);
    EXPECT_NEAR(gates[0][i]["timescale"].get<double>() / here[i].timescale, 1, 1e-6);
    EXPECT_NEAR(gates[0][i]["sensitivity"].get<double>() / here[i].sensitivity, 1, 1e-6);
  }
  const CliResult shown = run_ebb("inspect " + model + " --tokens " + scratch.path() + "/t" + size);
  expect_lines(shown.out, {"decay gates on the first 2 x 500 tokens of ", "timescale, tokens",
                           fmt::format("{:>10}", fmt::format("{:.5g}", here[1].timescale)),
                           fmt::format("{:>10}", fmt::format("{:.4f}", here[2].sensitivity))});
}

// The share of the state that is kept, of the first text, at most 2048 tokens.
TEST(Inspect, DecaysInUse) {
  const ScratchFolder scratch;
  const std::string model = scratch.path() + "/m", text = scratch.path() + "/t.txt";
  const std::string with = " --tokens " + text + " --tokenizer bytes --sequences 2 ";
  write_file_atomically(text, some_text(6000));
  save_small_model(model);
  for (const int64_t length : {500, 2500}) {
    const int64_t used = std::min<int64_t>(length, 2048);
    const CliResult r =
        run_ebb("inspect " + model + with + fmt::format("--length {} --json -", length));
    ASSERT_EQ(r.code, 0) << r.err;
    const json found = json::parse(r.out)["decays"];
    const Tensor tokens = Tensor::from(Tokenizer::bytes().encode(some_text(used)), {1, used});
    const DecayUse here = measure_decays(*load_model(model), tokens);
    EXPECT_EQ(found["tokens"], used);
    ASSERT_EQ(found["layers"].size(), here.layers.size());
    for (size_t l = 0; l < here.layers.size(); ++l)
      EXPECT_NEAR(found["layers"][l]["median"].get<double>(), here.layers[l].median, 1e-6);
    EXPECT_NEAR(found["all"]["lower_quartile"].get<double>(), here.all.lower_quartile, 1e-6);
    const CliResult shown = run_ebb("inspect " + model + with + fmt::format("--length {}", length));
    expect_lines(shown.out, {"share of the state kept from token to token, on the first ",
                             fmt::format("{:>10.6f}", here.layers[1].median), "\n  all "});
  }
  const CliResult none = run_ebb("inspect llama-100m" + with + "--length 20");
  ASSERT_EQ(none.code, 0) << none.err;
  expect_lines(none.out, {"no decays: nothing in a transformer fades"});
}

// Once for the model, beside the layers.
TEST(Inspect, StateOfPositions) {
  const ScratchFolder scratch;
  const std::string folder = scratch.path() + "/m";
  save_small_model(folder);
  const auto model = make_model(parse_model_config({{"model_type", "decay_study"},
                                                    {"rpe", "tpe"},
                                                    {"vocab_size", 300},
                                                    {"hidden_size", 32},
                                                    {"num_heads", 2},
                                                    {"num_hidden_layers", 2},
                                                    {"intermediate_size", 32}},
                                                   "/model", "test"));
  save_model(folder, *model);
  const CliResult r = run_ebb("inspect " + folder + " --json -");
  ASSERT_EQ(r.code, 0) << r.err;
  const json state = json::parse(r.out)["state"];
  ASSERT_EQ(state["positions"].size(), 1u);
  EXPECT_EQ(state["positions"][0]["tensor"], "f32 [2,1,16]");
  EXPECT_EQ(state["bytes_f32"], 4 * (2 * 16 + 2 * 2 * 16 * 16));
  EXPECT_NE(run_ebb("inspect " + folder).out.find("positions f32 [2,1,16]"), std::string::npos);
}

TEST(Inspect, WrongInput) {
  const ScratchFolder scratch;
  const std::string model = scratch.path() + "/m", text = scratch.path() + "/t.txt";
  save_small_model(model);
  write_file_atomically(text, some_text(100));
  expect_failure(run_ebb("inspect gdn-100"), "(did you mean gdn-100m?); presets: gdn-100m");
  expect_failure(run_ebb("inspect " + scratch.path()), "config.json");
  expect_failure(run_ebb("inspect"), "model is required", 2);
  expect_failure(run_ebb("inspect " + model + " --tokens " + text), "with --tokenizer", 2);
  expect_failure(run_ebb("inspect " + model + " --tokens " + text + " --tokenizer bytes"),
                 "gives 101 tokens, 8 x 4096 are asked for");
  expect_failure(run_ebb("inspect " + model + " --tokens " + scratch.path() + "/none"), "no shard");
  expect_failure(
      run_ebb("inspect " + model + " --tokens " + text + " --tokenizer bytes --sequences 0"),
      "want at least 1", 2);
  write_file_atomically(model + "/config.json", R"({"model_type": "gated_deltanet", "attn": {}})");
  expect_failure(run_ebb("inspect " + model), "hybrid attention");
}

#ifdef EBB_WITH_SENTENCEPIECE
TEST(Inspect, AVocabularyLargerThanTheModels) {
  const ScratchFolder scratch;
  const std::string model = scratch.path() + "/m", text = scratch.path() + "/t.txt";
  const std::string tokenizer = std::string(EBB_TEST_DATA) + "/tokenizers/three-men";
  save_small_model(model);
  write_file_atomically(text, some_text(100));
  const std::string want = "tokens of a vocabulary of 512, and the model's has 300";
  expect_failure(run_ebb("inspect " + model + " --tokens " + text + " --tokenizer " + tokenizer),
                 want);
  const std::string shard = scratch.path() + "/t";
  ASSERT_EQ(run_ebb("tokenize " + text + " --tokenizer " + tokenizer + " --out " + shard).code, 0);
  expect_failure(run_ebb("inspect " + model + " --tokens " + shard), want);
}
#endif

}  // namespace
}  // namespace ebb::testing
