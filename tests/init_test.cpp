// `ebb init`: the gates it writes, and that everything else of a folder stays as it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <sstream>

#include "models/calibrate.h"
#include "tensor/compare.h"
#include "tensor/file.h"
#include "tests/cli.h"
#include "tests/model_folder.h"

namespace ebb::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Init : public ::testing::Test {
 protected:
  Init() {
    save_small_model(model());
    write_file_atomically(text(), some_text(3000));
  }
  std::string at(const std::string& name) const { return scratch_.path() + "/" + name; }
  std::string model() const { return at("model"); }
  std::string text() const { return at("text.txt"); }
  std::string out() const { return at("out"); }
  CliResult init(const std::string& options) const {
    return run_ebb("init --model " + model() + " --out " + out() + " " + options);
  }
  std::string on_text() const {
    return " --tokens " + text() + " --tokenizer bytes --sequences 2 --length 600 ";
  }
  Tensor tokens() const {
    return Tensor::from(Tokenizer::bytes().encode(some_text(1200)), {2, 600});
  }
  // Bitwise equal but for the named kinds of parameters, which must all differ.
  void expect_changed_only(const std::vector<std::string>& kinds) const {
    const auto before = load_model(model()), after = load_model(out());
    const StateDict x = before->state_dict(), y = after->state_dict();
    ASSERT_EQ(x.size(), y.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const bool gate = std::any_of(kinds.begin(), kinds.end(),
                                    [&](const std::string& k) { return x[i].first.ends_with(k); });
      EXPECT_EQ(bitwise_equal(x[i].second, y[i].second), !gate) << x[i].first;
    }
  }
  void expect_failure(const CliResult& r, const std::string& text, int code = 1) const {
    EXPECT_EQ(r.code, code) << r.out << r.err;
    EXPECT_EQ(r.out, "");
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    EXPECT_NE(r.err.find(text), std::string::npos) << "want " << text << "\n" << r.err;
  }
  const ScratchFolder scratch_;
};

TEST_F(Init, DamiReachesItsTargets) {
  const CliResult r = init("--scheme dami" + on_text());
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.err, "");
  expect_changed_only({"A_log", "dt_bias"});

  const auto reloaded = load_model(out());
  const auto tau = timescale_ladder({}, 2), profile = sensitivity_profile({}, 2);
  for (const HeadReport& g : measure_gates(*reloaded, tokens())) {
    EXPECT_NEAR(g.sensitivity, profile[size_t(g.layer)], 1e-5);
    EXPECT_NEAR(g.timescale / tau[size_t(g.head)], 1, 1e-4);
  }
  // The printed table: layer, head, timescale, target, sensitivity, target.
  std::map<std::pair<int64_t, int64_t>, std::vector<double>> table;
  std::istringstream lines(r.out);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream cells(line);
    int64_t layer = 0, head = 0;
    std::vector<double> v(4);
    if (cells >> layer >> head >> v[0] >> v[1] >> v[2] >> v[3]) table[{layer, head}] = v;
  }
  ASSERT_EQ(table.size(), 4u) << r.out;
  for (const auto& [where, v] : table) {
    EXPECT_NEAR(v[1], tau[size_t(where.second)], 1e-2);
    EXPECT_NEAR(v[0] / v[1], 1, 1e-4);
    EXPECT_NEAR(v[3], profile[size_t(where.first)], 1e-4);
    EXPECT_NEAR(v[2], v[3], 1e-4);
  }
  EXPECT_NE(r.out.find("largest deviation from the targets"), std::string::npos);
}

TEST_F(Init, DamiIsWhatTheLibraryDoes) {
  ASSERT_EQ(init("--scheme dami --set dami.tau_max=512 --set dami.shape=high_low_high --set "
                 "dami.low=0.3" +
                 on_text())
                .code,
            0);
  const auto want = load_model(model()), got = load_model(out());
  calibrate_dami(*want, {.tau_max = 512, .shape = SensitivityShape::high_low_high, .low = 0.3},
                 tokens());
  const StateDict x = want->state_dict(), y = got->state_dict();
  for (size_t i = 0; i < x.size(); ++i)
    EXPECT_TRUE(bitwise_equal(x[i].second, y[i].second)) << x[i].first;
}

TEST_F(Init, ForeignFoldersKeepWhatTheyHold) {
  json config = json::parse(read_file(model() + "/config.json"));
  config["my_field"] = {{"deep", {1, 2.5, nullptr}}};
  config["architectures"] = {"SomeClass"};
  write_file_atomically(model() + "/config.json", config.dump());
  write_file_atomically(model() + "/generation_config.json", "{\"a\": 1}");
  write_file_atomically(model() + "/pytorch_model.bin", "old weights");
  ASSERT_EQ(init("--scheme dami" + on_text()).code, 0);
  EXPECT_EQ(json::parse(read_file(out() + "/config.json")), config);
  EXPECT_EQ(read_file(out() + "/generation_config.json"), "{\"a\": 1}");
  EXPECT_EQ(Tokenizer::load(out()).kind(), "bytes");
  EXPECT_FALSE(fs::exists(out() + "/pytorch_model.bin"));
  const json record = json::parse(read_file(out() + "/init.json"));
  EXPECT_EQ(record["init"]["scheme"], "dami");
  EXPECT_EQ(record["init"]["dami"]["tau_max"], 4096);
  EXPECT_EQ(record["gates"].size(), 4u);
  EXPECT_EQ(fs::status(out()).permissions(), fs::status(model()).permissions());
}

TEST_F(Init, PostSetsTheSpectrumOnly) {
  const CliResult r = init("--scheme post --set post_length=2048");
  ASSERT_EQ(r.code, 0) << r.err;
  expect_changed_only({"A_log"});
  const auto made = load_model(out());
  for (int64_t l = 0; l < 2; ++l) {
    const auto A_log =
        made->block(l).mixer().decay_gate_parameters()->A_log.master().to_vector<double>();
    EXPECT_EQ(A_log[0], 0);
    EXPECT_NEAR(A_log[1], std::log(2048.0), 1e-6);
  }
  EXPECT_NE(r.out.find("           -          -"), std::string::npos) << r.out;  // not measured
}

TEST_F(Init, RandomDrawsBySeed) {
  ASSERT_EQ(init("--scheme random --seed 9").code, 0);
  expect_changed_only({"A_log", "dt_bias"});
  const auto want = small_model(9), got = load_model(out());
  for (int64_t l = 0; l < 2; ++l) {
    const auto a = want->block(l).mixer().decay_gate_parameters(),
               b = got->block(l).mixer().decay_gate_parameters();
    EXPECT_TRUE(bitwise_equal(a->A_log.master(), b->A_log.master()));
    EXPECT_TRUE(bitwise_equal(a->dt_bias.master(), b->dt_bias.master()));
  }
  // With tokens the drawn gates are measured.
  const CliResult r = init("--scheme random --seed 9 --overwrite" + on_text());
  ASSERT_EQ(r.code, 0) << r.err;
  const json gates = json::parse(read_file(out() + "/init.json"))["gates"];
  const auto here = measure_gates(*load_model(out()), tokens());
  for (size_t i = 0; i < here.size(); ++i)
    EXPECT_NEAR(gates[i]["timescale"].get<double>() / here[i].timescale, 1, 1e-9);
}

TEST_F(Init, ReplacesOnlyWhenTold) {
  ASSERT_EQ(init("--scheme random --seed 1").code, 0);
  write_file_atomically(out() + "/mine.txt", "x");
  expect_failure(init("--scheme random --seed 2"), "exists already; --overwrite replaces it");
  EXPECT_TRUE(fs::exists(out() + "/mine.txt"));
  ASSERT_EQ(init("--scheme random --seed 2 --overwrite").code, 0);
  EXPECT_FALSE(fs::exists(out() + "/mine.txt"));
  // The folder it reads from.
  const CliResult r =
      run_ebb("init --model " + model() + " --out " + model() + "/ --scheme post --overwrite");
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(Tokenizer::load(model()).kind(), "bytes");
  EXPECT_EQ(load_model(model())
                ->block(0)
                .mixer()
                .decay_gate_parameters()
                ->A_log.master()
                .select(0, 0)
                .item(),
            0);
}

TEST_F(Init, WrongUseLeavesNothing) {
  expect_failure(init("--scheme dami"), "name it with --tokens", 2);
  expect_failure(init("--scheme dammi"), "--scheme", 2);
  expect_failure(init("--scheme dami --tokens " + text()), "with --tokenizer", 2);
  expect_failure(init("--scheme post --set dami.tau_maxx=3"), "did you mean tau_max?", 2);
  expect_failure(init("--scheme post --set dami.ladder=round"), "not one of geometric, linear", 2);
  expect_failure(init("--scheme post --set post_length"), "want path=value", 2);
  expect_failure(init("--scheme dami --set dami.shift=0.8" + on_text()), "lies outside (0,1)");
  expect_failure(init("--scheme dami --set dami.tau_min=0" + on_text()),
                 "/init/dami/tau_min: must lie in", 2);
  expect_failure(init("--scheme dami --tokens " + text() + " --tokenizer bytes"),
                 "gives 3001 tokens, 8 x 4096 are asked for");
  expect_failure(run_ebb("init --model nothing --scheme random --out " + out()),
                 "neither a model folder nor a preset");
  expect_failure(run_ebb("init --model " + model() + " --scheme random --out " + text()),
                 "exists already");
  for (const auto& f : fs::directory_iterator(scratch_.path()))
    EXPECT_TRUE(f.path() == model() || f.path() == text()) << f.path();
}

}  // namespace
}  // namespace ebb::testing
