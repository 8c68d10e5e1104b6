// The report: its numbers, its text in HTML, and runs that have only some of the files.
#include "eval/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <regex>

#include "tensor/check.h"
#include "tensor/file.h"
#include "tests/temporary_folder.h"

namespace ebb::testing {
namespace {

using nlohmann::json;

class Report : public ::testing::Test {
 protected:
  std::string run(const std::string& name) {
    std::filesystem::create_directories(folder_.file(name));
    return folder_.file(name);
  }
  void put(const std::string& file, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(folder_.file(file)).parent_path());
    write_file_atomically(folder_.file(file), text);
  }
  std::string error(const std::vector<std::string>& folders) {
    try {
      report_data(folders);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }
  TemporaryFolder folder_;
};

json gate(int layer, int head, double a_log, double dt_bias, double timescale) {
  return {{"layer", layer},     {"head", head},       {"A_log", a_log},
          {"dt_bias", dt_bias}, {"sensitivity", 0.2}, {"timescale", timescale}};
}

json scores_of(const std::string& model, double accuracy) {
  const json head = {{"model", model}, {"task", "niah_single_1"}, {"length", 1024}};
  json score = head, mean = {{"model", model}, {"settings", 1}, {"accuracy", accuracy}};
  score["accuracy"] = accuracy;
  return {{"command", "eval"},
          {"complete", true},
          {"models", {{{"name", model}, {"folder", "x"}}}},
          {"scores", {score}},
          {"means", {mean}}};
}

TEST_F(Report, TrainingCurvesAreMeansOfNeighbours) {
  std::string lines;
  const size_t n = 2 * kReportPoints + 1;  // means of three
  for (size_t i = 0; i < n; ++i) {
    json j = {{"step", i}, {"loss", double(i % 3)}, {"lr", 0.5}};
    if (i == 4) j["loss"] = nullptr;
    if (i == 9) j["validation_loss"] = 1.25;
    lines += j.dump() + "\n";
  }
  put("a/metrics.jsonl", lines + "{\"step\": 77");  // killed while writing
  const json d = report_data({run("a")});
  const json& t = d["runs"][0]["training"];
  EXPECT_EQ(t["bucket"], 3);
  EXPECT_EQ(t["step"].size(), (n + 2) / 3);
  EXPECT_EQ(t["step"][0], 1);
  EXPECT_EQ(t["loss"][0], 1);
  EXPECT_EQ(t["loss"][1], 1);  // of 0 and 2: the middle one is missing
  EXPECT_EQ(t["norm"][0], nullptr);
  EXPECT_EQ(t["validation"], json::parse("[[9, 1.25]]"));
  EXPECT_EQ(t["summary"]["validation_loss"], 1.25);
  EXPECT_EQ(t["summary"]["steps"], n - 1);
  EXPECT_NEAR(t["summary"]["loss"].get<double>(), 1, 0.01);
  ASSERT_EQ(d["notes"].size(), 1u);
  EXPECT_NE(d["notes"][0].get<std::string>().find("broken off"), std::string::npos);
}

TEST_F(Report, CorrelationsOfGates) {
  json before = json::array(), after = json::array();
  for (int l = 0; l < 2; ++l)
    for (int h = 0; h < 3; ++h) {
      before.push_back(gate(l, h, h, l + h, std::pow(10, h)));
      // A_log reversed in layer 1; the timescale's logarithm shifted.
      after.insert(after.begin(), gate(l, h, l ? -h : h, 2 * (l + h) + 1, std::pow(10, h + 1)));
    }
  put("a/gates_initial.json", before.dump());
  put("a/gates_final.json", after.dump());
  const json c = report_data({run("a")})["runs"][0]["gates"]["correlation"];
  EXPECT_NEAR(c["dt_bias"]["all"].get<double>(), 1, 1e-12);
  EXPECT_NEAR(c["timescale"]["all"].get<double>(), 1, 1e-12);
  EXPECT_NEAR(c["A_log"]["all"].get<double>(), 0, 1e-12);
  EXPECT_NEAR(c["A_log"]["by_layer"][0][1].get<double>(), 1, 1e-12);
  EXPECT_NEAR(c["A_log"]["by_layer"][1][1].get<double>(), -1, 1e-12);
  EXPECT_EQ(c["sensitivity"]["all"], nullptr);  // constant: undefined
}

json decays(double median) {
  const json s = {{"median", median}, {"lower_quartile", 0.25}, {"upper_quartile", nullptr}};
  json layer = s;
  layer["layer"] = 0;
  return {{"tokens", 2048}, {"layers", {layer}}, {"all", s}};
}

TEST_F(Report, DecaysInUseAndSpeed) {
  put("a/decays_initial.json", decays(0.5).dump());
  put("a/decays_final.json", decays(0.75).dump());
  put("a/speed.json", R"({"tokens_per_gpu_per_second": 1e6, "gpus": 1})");
  put("b/decays.json", json{{"command", "inspect"}, {"decays", decays(0.8)}}.dump());
  const json runs = report_data({run("a"), run("b")})["runs"];
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0]["decays"]["initial"]["all"]["median"], 0.5);
  EXPECT_EQ(runs[0]["decays"]["final"]["layers"][0]["median"], 0.75);
  EXPECT_EQ(runs[0]["speed"]["tokens_per_gpu_per_second"], 1e6);
  EXPECT_EQ(runs[1]["decays"]["measured"]["all"]["median"], 0.8);
  EXPECT_FALSE(runs[1].contains("speed"));

  put("c/decays_final.json", "[]");
  EXPECT_NE(error({run("c")}).find("decays_final.json does not hold the decays of a model"),
            std::string::npos);
  json broken = decays(0.5);
  broken["layers"][0].erase("median");
  put("c/decays_final.json", broken.dump());
  EXPECT_NE(error({run("c")}).find("a layer without the number median"), std::string::npos);
  broken = decays(0.5);
  broken["layers"][0]["layer"] = "0";
  put("c/decays_final.json", broken.dump());
  EXPECT_NE(error({run("c")}).find("a layer without the number layer"), std::string::npos);
  put("d/speed.json", "{}");
  EXPECT_NE(error({run("d")}).find("no number tokens_per_gpu_per_second"), std::string::npos);
}

TEST_F(Report, TakesWhateverIsThere) {
  put("gates/gates_initial.json", json{gate(0, 0, 1, 2, 3)}.dump());
  put("recipe/recipe.json", "{\"steps\": 3}");
  put("eval/results.json", scores_of("one", 0.5).dump());
  put("run/eval/results.json", scores_of("one", 0.75).dump());
  put("run/bench/results.json", "{\"command\": \"bench ops\"}");
  const json d =
      report_data({run("gates"), run("recipe"), run("eval"), run("run"), run("run/eval")});
  EXPECT_EQ(d["runs"].size(), 2u);
  EXPECT_FALSE(d["runs"][0]["gates"].contains("correlation"));
  // The same name in two files, and one file reached twice.
  ASSERT_EQ(d["models"].size(), 2u);
  EXPECT_EQ(d["models"][0]["name"], "one");
  EXPECT_EQ(d["models"][1]["name"], "one (" + folder_.file("run/eval") + ")");
  EXPECT_EQ(d["scores"][1]["model"], d["models"][1]["name"]);
  EXPECT_EQ(d["scores"][1]["accuracy"], 0.75);
  // Runs of the same name are told apart.
  put("x/same/recipe.json", "{}");
  put("y/same/recipe.json", "{}");
  const json two = report_data({run("x/same"), run("y/same/")});
  EXPECT_NE(two["runs"][0]["name"], two["runs"][1]["name"]);
}

TEST_F(Report, ModelsBelongToTheRunTheyCameFrom) {
  put("x/same/recipe.json", "{}");
  put("y/same/recipe.json", "{}");
  put("x/same/final/config.json", "{}");
  put("y/same/final/config.json", "{}");
  put("other/same/config.json", "{}");
  json results = scores_of("here", 0.5);
  const auto model = [&](const std::string& name, const std::string& folder) {
    results["models"].push_back({{"name", name}, {"folder", folder}});
  };
  results["models"] = json::array();
  model("here", folder_.file("y/same/final"));
  model("a/final", folder_.file("x/same"));
  model("elsewhere", folder_.file("other/same"));
  model("gone", "/no/such/folder/same");
  put("eval/results.json", results.dump());
  const std::string x = run("x/same"), y = run("y/same");
  const json d = report_data({x, y, run("eval"), x + "/", run("x/../x/same")});
  EXPECT_EQ(d["runs"].size(), 2u);  // the same folder thrice is one run
  ASSERT_EQ(d["models"].size(), 4u);
  EXPECT_EQ(d["models"][0]["run"], y);
  EXPECT_EQ(d["models"][1]["run"], x);
  EXPECT_FALSE(d["models"][2].contains("run"));
  EXPECT_FALSE(d["models"][3].contains("run"));

  // Where the folders have moved, the name says it; a stranger does not take a run's name.
  put("dami/recipe.json", "{}");
  json moved = scores_of("dami/final", 0.5), stranger = scores_of("dami", 0.25);
  stranger["models"][0]["folder"] = folder_.file("other/same");
  put("e1/results.json", moved.dump());
  put("e2/results.json", stranger.dump());
  const json e = report_data({run("e1"), run("e2"), run("dami")});
  EXPECT_EQ(e["models"][0]["run"], "dami");
  EXPECT_EQ(e["models"][1]["name"], "dami (" + folder_.file("e2") + ")");
  EXPECT_FALSE(e["models"][1].contains("run"));
}

TEST_F(Report, LossesThatAreNotNumbers) {
  put("a/metrics.jsonl",
      "{\"step\": 1, \"loss\": null, \"skipped\": 1}\n{\"step\": 2, \"loss\": null, "
      "\"skipped\": 2}\n");
  const json t = report_data({run("a")})["runs"][0]["training"];
  EXPECT_EQ(t["loss"], json::parse("[null, null]"));
  EXPECT_EQ(t["summary"]["loss"], nullptr);
  EXPECT_EQ(t["summary"]["skipped"], 2);
  // A run killed before its first record, and nothing else there.
  put("b/metrics.jsonl", "{\"st");
  const json b = report_data({run("b")});
  EXPECT_TRUE(b["runs"].empty());
  EXPECT_EQ(b["notes"].size(), 2u);
}

TEST_F(Report, Mistakes) {
  EXPECT_NE(error({folder_.file("none")}).find("there is no folder"), std::string::npos);
  EXPECT_NE(error({run("empty")}).find("holds none of metrics.jsonl"), std::string::npos);
  put("a/gates_final.json", "[{\"layer\": 0}]");
  EXPECT_NE(error({run("a")}).find("without the number head"), std::string::npos);
  put("a/gates_final.json",
      R"([{"layer": null, "head": 0, "A_log": 1, "dt_bias": 1, "sensitivity": 1, "timescale": 1}])");
  EXPECT_NE(error({run("a")}).find("without the number layer"), std::string::npos);
  put("e/results.json", "{\"command\": 7}");
  EXPECT_NE(error({run("e")}).find("holds none of"), std::string::npos);
  put("b/metrics.jsonl", "nonsense\n{\"step\": 1}\n");
  EXPECT_NE(error({run("b")}).find("metrics.jsonl:1: not a record"), std::string::npos);
  put("c/results.json", "{\"command\": \"eval\"}");
  EXPECT_NE(error({run("c")}).find("is not a result of ebb eval"), std::string::npos);
  put("d/recipe.json", "{");
  EXPECT_NE(error({run("d")}).find("not valid JSON"), std::string::npos);
}

TEST_F(Report, ThePageIsOneFileAndItsTextsAreOnlyText) {
  const std::string bad = "</script><b>&\"\xFF";
  const json data = {{"runs", {{{"name", bad}}}}};
  const std::string page = report_page(data, "<i>title</i>", "a & b");
  EXPECT_EQ(page.find("</script><b>"), std::string::npos);
  EXPECT_EQ(page.find("<i>title"), std::string::npos);
  EXPECT_NE(page.find("&lt;i&gt;title"), std::string::npos);
  // The data come back as they went, but for the byte that is not UTF-8.
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const size_t at = page.find(open) + open.size();
  const json back = json::parse(page.substr(at, page.find("</script>", at) - at));
  EXPECT_EQ(back["runs"][0]["name"], "</script><b>&\"\xEF\xBF\xBD");
  // Nothing is fetched.
  const std::regex outside("<(script|link|img|iframe)[^>]*(src|href)=");
  EXPECT_FALSE(std::regex_search(page.substr(0, at), outside));
  EXPECT_FALSE(std::regex_search(page.substr(page.size() - 40'000), outside));
  EXPECT_NE(page.find("Licensed to the Apache Software Foundation"), std::string::npos);
  EXPECT_TRUE(page.ends_with("</html>\n"));
}

}  // namespace
}  // namespace ebb::testing
