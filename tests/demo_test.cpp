// The demo in miniature, through the real binary: documents, shards, three starts, retrieval,
// report. What tools/demo.sh promises is checked here: the same data and the same weights but for
// the decay gates, a run that goes on, a page with the three runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tensor/compare.h"
#include "tensor/file.h"
#include "tensor/safetensors.h"
#include "tests/cli.h"

namespace ebb::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kText[] = EBB_TEST_DATA "/../../examples/data/three_men_in_a_boat.txt";
const std::vector<std::string> kSchemes = {"random", "post", "dami"};

class Demo : public ::testing::Test {
 protected:
  std::string at(const std::string& name) const { return scratch_.path() + "/" + name; }
  void ok(const std::string& arguments, CliResult* result = nullptr) const {
    const CliResult r = run_ebb(arguments);
    ASSERT_EQ(r.code, 0) << arguments << "\n" << r.err;
    if (result) *result = r;
  }
  void make_data() const {
    for (const char* part : {"train", "validation"}) {
      ok(std::string("demo-data --text ") + kText + " --documents 60 --seed " +
         (part[0] == 't' ? "1" : "2") + " --out " + at(part) + ".jsonl");
      ok("tokenize " + at(part) + ".jsonl --tokenizer bytes --out " + at(part));
    }
  }
  // The demo's own recipe, made small.
  std::string train(const std::string& scheme, const std::string& out, int steps) const {
    return "train " EBB_TEST_DATA "/../../recipes/demo.json --resume --quiet --device cpu" +
           (" --set init.scheme=" + scheme) + " --set steps=" + std::to_string(steps) +
           " --set model.hidden_size=32 --set model.head_dim=8 --set model.intermediate_size=32" +
           " --set init.calibration_sequences=2 --set init.calibration_length=64" +
           " --set sequences=2 --set length=64 --set log_every=1 --set validation_batches=1" +
           " --set 'data.train=[\"" + at("train") + "\"]'" + " --set 'data.validation=[\"" +
           at("validation") + "\"]' --set out=" + at(out);
  }

  ScratchFolder scratch_;
};

// The recipe of a run without what may differ between the three.
json common_recipe(const std::string& run) {
  json recipe = json::parse(read_file(run + "/recipe.json"));
  recipe.erase("out");
  recipe["init"].erase("scheme");
  return recipe;
}

TEST_F(Demo, StartsDifferInTheDecayGatesOnly) {
  make_data();
  for (const std::string& s : kSchemes) ok(train(s, s, 0));
  const SafeTensors random(at("random/final/model.safetensors"));
  for (const std::string& s : {kSchemes[1], kSchemes[2]}) {
    const SafeTensors other(at(s + "/final/model.safetensors"));
    ASSERT_EQ(random.names(), other.names());
    int same = 0, changed = 0;
    for (const std::string& n : random.names()) {
      const bool gate = n.ends_with(".A_log") || n.ends_with(".dt_bias");
      const bool equal = bitwise_equal(random.get(n), other.get(n));
      EXPECT_TRUE(gate || equal) << s << ": " << n;
      same += !gate && equal;
      changed += gate && !equal;
    }
    EXPECT_GT(same, 20) << s;
    // PoST leaves dt_bias as Random draws it; DAMI sets both, in two layers.
    EXPECT_EQ(changed, s == "post" ? 2 : 4) << s;
  }
}

TEST_F(Demo, RoadFromTextToReport) {
  make_data();
  std::string models, folders;
  for (const std::string& s : kSchemes) {
    ok(train(s, s, 4));
    EXPECT_EQ(common_recipe(at(s)), common_recipe(at("random"))) << s;
    for (const char* file : {"metrics.jsonl", "metrics.csv", "gates_initial.json",
                             "gates_final.json", "final/config.json", "final/tokenizer.json"})
      EXPECT_TRUE(fs::exists(at(s + "/" + file))) << s << " " << file;
    models += (models.empty() ? "" : ",") + s + "=" + at(s + "/final");
    folders.append(" ").append(at(s));
  }
  // A finished run: the same command again changes nothing.
  const std::string weights = read_file(at("dami/final/model.safetensors"));
  CliResult again;
  ok(train("dami", "dami", 4), &again);
  EXPECT_NE(again.out.find("nothing left to do"), std::string::npos) << again.out;
  EXPECT_EQ(read_file(at("dami/final/model.safetensors")), weights);

  CliResult eval, report;
  ok("eval --model " + models + " --task niah_single_1 --lengths 768,1024 --samples 4 --data " +
         at("needles") + " --max-new-tokens 4 --device auto --dtype f32 --out " + at("eval"),
     &eval);
  EXPECT_NE(eval.out.find("accuracy, % (95% interval)"), std::string::npos) << eval.out;
  const json result = json::parse(read_file(at("eval/results.json")));
  EXPECT_EQ(result["complete"], true);
  EXPECT_EQ(result["scores"].size(), 6u);
  ok("report" + folders + " " + at("eval") + " --out " + at("report.html"), &report);
  EXPECT_NE(report.out.find("3 runs, 3 evaluated models"), std::string::npos) << report.out;
  EXPECT_NE(report.out.find("r(A_log)"), std::string::npos) << report.out;
  EXPECT_EQ(report.err, "");
  const std::string page = read_file(at("report.html"));
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const size_t begin = page.find(open) + open.size();
  const json data = json::parse(page.substr(begin, page.find("</script>", begin) - begin));
  ASSERT_EQ(data["runs"].size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(data["runs"][i]["name"], kSchemes[i]);
    EXPECT_EQ(data["runs"][i]["training"]["step"].size(), 4u);
    EXPECT_EQ(data["runs"][i]["training"]["validation"].size(), 1u);
    EXPECT_TRUE(data["runs"][i]["gates"]["correlation"].contains("A_log"));
    EXPECT_EQ(data["models"][i]["run"], kSchemes[i]);
  }
  EXPECT_EQ(data["scores"].size(), 6u);
}

TEST_F(Demo, MistakesOfDemoData) {
  const auto expect_error = [&](const std::string& arguments, int code, const std::string& part) {
    const CliResult r = run_ebb("demo-data " + arguments);
    EXPECT_EQ(r.code, code) << r.err;
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    EXPECT_NE(r.err.find(part), std::string::npos) << r.err;
  };
  const std::string out = " --out " + at("d.jsonl"), text = std::string("--text ") + kText;
  std::ofstream(at("empty")) << " \n\n";
  std::ofstream(at("broken")) << "caf\xE9 noir";
  expect_error("", 2, "required");
  expect_error("--text " + at("none") + out, 1, "none");
  expect_error("--text " + scratch_.path() + out, 1, scratch_.path());
  expect_error("--text " + at("empty") + out, 1, "holds no text");
  expect_error("--text " + at("broken") + out, 1, "byte 3 is not UTF-8");
  expect_error(text + out + " --documents 0", 2, "--documents");
  expect_error(text + out + " --documents ten", 2, "--documents");
  expect_error(text + out + " --seed -1", 2, "--seed");
  expect_error(text + " --out " + at("no/folder.jsonl"), 1, "no/folder.jsonl");
  expect_error(text + " --documents 5 --out " + scratch_.path(), 1, scratch_.path());
  std::vector<std::string> left;
  for (const auto& e : fs::directory_iterator(scratch_.path()))
    left.push_back(e.path().filename().string());
  std::sort(left.begin(), left.end());
  EXPECT_EQ(left, (std::vector<std::string>{"broken", "empty"}));
}

}  // namespace
}  // namespace ebb::testing
