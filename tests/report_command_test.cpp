// `ebb report`, and its page in a real browser where there is one.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tensor/file.h"
#include "tests/cli.h"

namespace ebb::testing {
namespace {

using nlohmann::json;

// A run with everything, and one evaluation of it.
void make_run(const std::string& folder) {
  std::filesystem::create_directories(folder);
  std::ofstream metrics(folder + "/metrics.jsonl");
  for (int step = 1; step <= 50; ++step)
    metrics << json{{"step", step}, {"loss", 5.0 / step},       {"norm", 1.0},
                    {"lr", 1e-3},   {"tokens_per_second", 1e4}, {"validation_loss", 5.5 / step}}
                   .dump()
            << "\n";
  for (const char* when : {"initial", "final"}) {
    json gates = json::array();
    for (int i = 0; i < 12; ++i)
      gates.push_back({{"layer", i / 4},
                       {"head", i % 4},
                       {"A_log", 0.1 * i},
                       {"dt_bias", -0.2 * i},
                       {"sensitivity", 0.02 * i},
                       {"timescale", 1.0 + i * i}});
    write_file_atomically(folder + "/gates_" + when + ".json", gates.dump());
  }
  write_file_atomically(folder + "/recipe.json", R"({"init": {"scheme": "dami"}, "steps": 50})");
  json bins = json::array();
  for (int b = 0; b < 16; ++b)
    bins.push_back({{"center", (b + 0.5) / 16},
                    {"accuracy", b == 3 ? json() : json(0.5)},
                    {"low", 0.3},
                    {"high", 0.7},
                    {"tasks", b != 3},
                    {"samples", {b == 3 ? 0 : 4}},
                    {"right", {b == 3 ? 0 : 2}}});
  const json tokenizer = {{"kind", "bytes"}, {"sha256", std::string(64, 'a')}};
  const json result = {
      {"command", "eval"},
      {"complete", false},
      {"models",
       {{{"name", "demo/final"},
         {"folder", "demo/final"},
         {"checkpoint", "xxh64:1"},
         {"parameters", 1234567},
         {"tokenizer", tokenizer}}}},
      {"scores",
       {{{"model", "demo/final"},
         {"task", "niah_single_1"},
         {"length", 1024},
         {"count", 60},
         {"right", 30},
         {"accuracy", 0.5},
         {"low", 0.377},
         {"high", 0.623},
         {"data", "d.jsonl"},
         {"data_sha256", std::string(64, 'b')},
         {"fit", "binary"},
         {"seed", 42},
         {"prompt_tokens", {{"min", 800}, {"mean", 850}, {"max", 896}}},
         {"max_length", 1024},
         {"truncated", 0}}}},
      {"means", {{{"model", "demo/final"}, {"settings", 1}, {"accuracy", 0.5}}}},
      {"distance",
       {{{"model", "demo/final"},
         {"lengths", {{{"length", 1024}, {"tasks", {"niah_single_1"}}, {"bins", bins}}}}}}},
      {"perplexity",
       {{{"model", "demo/final"},
         {"nll", 300.0},
         {"tokens", 100},
         {"documents", 3},
         {"bytes", 100},
         {"perplexity", 20.0855},
         {"byte_perplexity", 20.0855},
         {"bits_per_byte", 4.328}}}}};
  std::filesystem::create_directories(folder + "/eval");
  write_file_atomically(folder + "/eval/results.json", result.dump());
}

TEST(ReportCommand, WritesOnePage) {
  const ScratchFolder scratch;
  const std::string run = scratch.path() + "/demo", page = scratch.path() + "/new/report.html";
  make_run(run);
  const CliResult r = run_ebb("report " + run + " --title 'A & B' --out " + page);
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("1 run, 1 evaluated model"), std::string::npos) << r.out;
  EXPECT_NE(r.err.find("the evaluation was not finished"), std::string::npos) << r.err;
  EXPECT_NE(read_file(page).find("<h1>A &amp; B</h1>"), std::string::npos);
  const CliResult none = run_ebb("report " + scratch.path() + "/none");
  EXPECT_EQ(none.code, 1);
  EXPECT_NE(none.err.find("there is no folder"), std::string::npos);
  EXPECT_EQ(run_ebb("report").code, 2);
  EXPECT_EQ(run_ebb("report " + run + " --out /proc/report.html").code, 1);
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

bool browser() { return std::system("command -v chromium >/dev/null") == 0; }

// The page of `folders` as the browser has it after its scripts, which must not complain.
void draw(const std::string& folders, const std::string& base, std::string* result) {
  const CliResult r = run_ebb("report " + folders + " --out " + base + "report.html");
  ASSERT_EQ(r.code, 0) << r.err;
  const std::string command =
      "timeout 120 chromium --headless --no-sandbox --disable-gpu --enable-logging=stderr "
      "--user-data-dir=" +
      base + "profile --virtual-time-budget=5000 --dump-dom file://" + base + "report.html >" +
      base + "dom 2>" + base + "log";
  ASSERT_EQ(std::system(command.c_str()), 0) << read_file(base + "log");
  const std::string dom = read_file(base + "dom"), log = read_file(base + "log");
  EXPECT_EQ(log.find("CONSOLE"), std::string::npos) << log;
  EXPECT_EQ(count(dom, "<figure>"), count(dom, "_echarts_instance_="));
  *result = dom;
}

TEST(ReportCommand, DrawsInABrowser) {
  if (!browser()) GTEST_SKIP() << "no chromium here";
  const ScratchFolder scratch;
  make_run(scratch.path() + "/demo");
  std::string dom;
  draw(scratch.path() + "/demo", scratch.path() + "/", &dom);
  // Loss and three small ones, one task, one length, two maps, three scatter plots.
  EXPECT_EQ(count(dom, "<figure>"), 11u);
  for (const char* section :
       {"training", "retrieval", "distance", "perplexity", "gates", "movement", "sources"})
    EXPECT_EQ(count(dom, std::string("<section id=\"") + section + "\""), 1u) << section;
  for (const char* text : {"50.00", "37.7–62.3", "20.0855", "4.3280", "1.0000", "was not finished"})
    EXPECT_NE(dom.find(text), std::string::npos) << text;
}

// Unfinished, broken and oddly named things beside each other.
TEST(ReportCommand, DrawsWhateverThereIs) {
  if (!browser()) GTEST_SKIP() << "no chromium here";
  const ScratchFolder scratch;
  const std::string base = scratch.path() + "/", odd = base + "a<b>&\"c\" 'd'";
  const auto quoted = [](const std::string& path) {
    std::string out = "'";
    for (char c : path) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return out + "'";
  };
  make_run(odd);  // with an unfinished evaluation
  // All losses not finite; gates measured as not finite; killed while writing.
  std::filesystem::create_directories(base + "diverged");
  std::ofstream(base + "diverged/metrics.jsonl")
      << "{\"step\": 1, \"loss\": null, \"norm\": null, \"skipped\": 1}\n{\"step\": 2, \"lo";
  json gates = json::array();
  for (int i = 0; i < 4; ++i)
    gates.push_back({{"layer", i / 2},
                     {"head", i % 2},
                     {"A_log", nullptr},
                     {"dt_bias", nullptr},
                     {"sensitivity", nullptr},
                     {"timescale", nullptr}});
  for (const char* when : {"initial", "final"})
    write_file_atomically(base + "diverged/gates_" + when + ".json", gates.dump());
  // One step only, of a loss that is negative.
  std::filesystem::create_directories(base + "short");
  std::ofstream(base + "short/metrics.jsonl") << "{\"step\": 1, \"loss\": -1.5, \"norm\": 0}\n";
  std::string dom;
  draw(quoted(odd) + " " + base + "diverged " + base + "short", base, &dom);
  EXPECT_NE(dom.find("a&lt;b&gt;&amp;\"c\" 'd'"), std::string::npos);
  EXPECT_EQ(dom.find("<b>"), std::string::npos);
  EXPECT_NE(dom.find("the last line is broken off"), std::string::npos);

  // An evaluation without its run; a run without an evaluation.
  draw(quoted(odd + "/eval"), base, &dom);
  EXPECT_EQ(count(dom, "<section id=\"retrieval\""), 1u);
  EXPECT_EQ(count(dom, "<section id=\"training\""), 0u);
  std::filesystem::remove_all(odd + "/eval");
  draw(quoted(odd), base, &dom);
  EXPECT_EQ(count(dom, "<section id=\"retrieval\""), 0u);
  EXPECT_EQ(count(dom, "<section id=\"training\""), 1u);
}

}  // namespace
}  // namespace ebb::testing
