// Recipes: strict reading, all mistakes at once; schedules.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <regex>
#include <sstream>

#include "models/config.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/json_text.h"
#include "train/config.h"

namespace ebb {
namespace {

using nlohmann::json;

std::string mistakes(const json& recipe) {
  try {
    parse_train_config(recipe, "r.json");
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Config, EveryMistakeIsListedWithPathAndSuggestion) {
  const std::string m = mistakes({{"model", {{"preset", "gdn-100m"}}},
                                  {"stesp", 10},
                                  {"optim", {{"lr", "fast"}, {"schedule", "cosin"}}},
                                  {"init", {{"dami", {{"tau_mx", 3}}}}},
                                  {"length", 0}});
  for (const char* want :
       {"/stesp: unknown; did you mean steps?", "/optim/lr: want a number", "did you mean cosine?",
        "/init/dami/tau_mx: unknown; did you mean", "/length: must be at least 1", "5 mistakes"})
    EXPECT_NE(m.find(want), std::string::npos) << want << " in\n" << m;
}

TEST(Json, IsReadStrictly) {
  const auto refused = [](std::string_view text, Comments comments = Comments::refuse) {
    try {
      parse_json(text, "x.json", comments);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(parse_json("{\"a\": [1, {\"a\": 2}], \"b\": {\"a\": 3}}", "")["b"]["a"], 3);
  EXPECT_EQ(refused("// c\n{}", Comments::allow), "");
  EXPECT_NE(refused("// c\n{}").find("x.json is not valid JSON: line 1, column 1"),
            std::string::npos);
  EXPECT_NE(refused("{\"a\": 1,\n  \"b\": NaN}").find("line 2, column "), std::string::npos);
  EXPECT_NE(refused("").find("x.json is not valid JSON: line 1, column 1"), std::string::npos);
  EXPECT_NE(refused("{} {}").find("not valid JSON"), std::string::npos);
  EXPECT_NE(refused("{\"a\": -1e400}").find("1e400"), std::string::npos);
  EXPECT_NE(refused("{\"a\": {\"b\": 1, \"c\": 2, \"b\": 3}}").find("\"b\" appears twice"),
            std::string::npos);
  EXPECT_NE(refused(std::string_view("{}\0", 3)).find("a byte 0"), std::string::npos);
  const auto nested = [](int n) {
    return std::string(size_t(n), '[') + std::string(size_t(n), ']');
  };
  EXPECT_EQ(refused(nested(kMaxJsonDepth)), "");
  for (const int n : {kMaxJsonDepth + 2, 1000000})
    EXPECT_NE(refused(nested(n)).find("nested too deeply"), std::string::npos) << n;
  json j;
  EXPECT_TRUE(parse_json_line("[1]", &j));
  EXPECT_EQ(j, json({1}));
  for (const std::string bad : {"", "[", "{\"a\": 1, \"a\": 1}", "1e999"})
    EXPECT_FALSE(parse_json_line(bad, &j)) << bad;
}

// What Python writes, which is not JSON: numbers there, words in a string.
TEST(Json, InfiniteNumbersOfPython) {
  const std::string text =
      R"({"a": [0.5, Infinity], "b": {"c": -Infinity, "d": NaN}, "Infinity": "NaN \" Infinity"})";
  EXPECT_THROW(parse_json(text, "x.json"), Error);
  const json j = parse_python_json(text, "x.json");
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(j["a"], json({0.5, infinity}));
  EXPECT_EQ(j["b"]["c"], -infinity);
  EXPECT_TRUE(std::isnan(j["b"]["d"].get<double>()));
  EXPECT_EQ(j["Infinity"], "NaN \" Infinity");
  const std::string back = dump_python_json(j);
  EXPECT_NE(back.find(": -Infinity"), std::string::npos) << back;
  EXPECT_NE(back.find(": NaN"), std::string::npos) << back;
  EXPECT_EQ(dump_python_json(parse_python_json(back, "back")), back);
  EXPECT_EQ(parse_python_json(back, "back")["Infinity"], j["Infinity"]);
  for (const char* bad :
       {"{\"a\": Infinit}", "{\"a\": InfinityNaN}", "{\"a\": \"Infinity}", "NaN Na"})
    EXPECT_THROW(parse_python_json(bad, "x.json"), Error) << bad;
  // Where a number is computed with it has to be one.
  json model = preset("gdn-100m").to_json();
  for (const double bad : {infinity, -infinity, std::nan("")}) {
    model["norm_eps"] = bad;
    try {
      parse_foreign_config(model, "x.json");
      ADD_FAILURE() << bad;
    } catch (const Error& e) {
      EXPECT_TRUE(std::strstr(e.what(), "/norm_eps: want a finite number")) << e.what();
    }
  }
}

TEST(Config, NumbersBeyondTheirRangeAreRefused) {
  for (const json& steps : {json(1e300), json(-1e300), json(18446744073709551615u), json(0.5)})
    EXPECT_NE(mistakes({{"model", {{"preset", "gdn-100m"}}}, {"steps", steps}})
                  .find("/steps: want a whole number"),
              std::string::npos)
        << steps;
}

// The tables of docs/guide.md: "/optim/lr" -> "6e-4". A row may name several keys, with a default
// for each or one for all.
std::map<std::string, std::string> keys_of_the_guide() {
  std::map<std::string, std::string> out;
  std::istringstream lines(read_file(EBB_TEST_DATA "/../../docs/guide.md"));
  const std::regex words("`([^`]+)`"), commas(", *");
  std::string section = "none";
  for (std::string line; std::getline(lines, line);) {
    std::smatch m;
    if (std::regex_match(
            line, m, std::regex("\\| key(?: of (?:a )?`(\\w+)`(?: model)?)? \\| default \\|.*"))) {
      section = m[1].length() ? "/" + m[1].str() + "/" : "/";
    } else if (line.empty()) {
      section = "none";
    } else if (section != "none" &&
               std::regex_match(line, m, std::regex("\\| (`[^|]+) \\| ([^|]*) \\|.*"))) {
      const std::string names = m[1], cell = std::regex_replace(m[2].str(), std::regex("`"), "");
      const std::vector<std::string> defaults(
          std::sregex_token_iterator(cell.begin(), cell.end(), commas, -1), {});
      size_t i = 0;
      for (std::sregex_iterator k(names.begin(), names.end(), words), end; k != end; ++k, ++i) {
        std::string key = section + (*k)[1].str();
        std::replace(key.begin(), key.end(), '.', '/');
        out[key] = defaults[std::min(i, defaults.size() - 1)];
      }
    }
  }
  return out;
}

void expect_in_guide(const json& keys) {
  const auto guide = keys_of_the_guide();
  for (const auto& [key, value] : keys.items()) {
    auto row = guide.find(key);
    // Keys that models share stand in the first table.
    for (const std::string part : {"/mamba2/", "/rwkv7/"})
      if (row == guide.end() && key.starts_with(part))
        row = guide.find("/model/" + key.substr(part.size()));
    if (row == guide.end()) {
      ADD_FAILURE() << "docs/guide.md has no row for " << key;
      continue;
    }
    const json said = json::parse(row->second, nullptr, false);
    // Words stand for what is required, absent or derived from others.
    if (!said.is_discarded())
      EXPECT_EQ(said.is_number() ? json(said.get<double>()) : said,
                value.is_number() ? json(value.get<double>()) : value)
          << key;
    else if (value.is_string() && !value.get<std::string>().empty() && row->second != "required")
      EXPECT_EQ(row->second, value.get<std::string>()) << key;
    else
      EXPECT_TRUE(value.is_null() || value.empty() || row->second == "required")
          << key << " is " << value << ", the guide says " << row->second;
  }
}

TEST(Config, TheGuideNamesEveryKeyAndItsDefault) {
  const auto owned = std::make_unique<TrainConfig>();  // GCC 12 warns of one on the stack
  TrainConfig& config = *owned;
  json keys = config.resolved().flatten();
  json model = config.model.to_json(), mamba2 = preset("mamba2-100m").to_json();
  for (json* m : {&model, &mamba2}) m->erase("architectures");
  for (const auto& [key, value] : model.items()) keys["/model/" + key] = value;
  for (const auto& [key, value] : mamba2.items())
    if (key != "dt_limit") keys["/mamba2/" + key] = value;
  ModelConfig scaled = preset("rwkv7-100m");
  scaled.frozen_decay_scale = true;  // else it is not written
  json rwkv7 = scaled.to_json();
  rwkv7["frozen_decay_scale"] = false;
  for (const auto& [key, value] : rwkv7.items())
    if (key != "architectures" && key != "initializer_range") keys["/rwkv7/" + key] = value;
  const json dart = preset("dart-130m").to_json();
  for (const auto& [key, value] : dart.items())  // its own
    if (!mamba2.contains(key) && key != "architectures") keys["/dart/" + key] = value;
  // Commas separate the defaults of a row: the limit is no list there.
  EXPECT_EQ(mamba2["dt_limit"].dump(), "[0.0,null]");
  keys["/mamba2/dt_limit"] = json();
  config.data.kind = DataKind::mqar;
  const json mqar = {{"data", {{"mqar", config.resolved()["data"]["mqar"]}}}};
  keys.update(mqar.flatten());
  keys["/data/kind"] = "shards";
  expect_in_guide(keys);
}

TEST(Config, ModelSectionIsStrict) {
  EXPECT_NE(mistakes({{"model", {{"preset", "gdn-100m"}, {"num_head", 3}}}})
                .find("/model/num_head: unknown; did you mean num_heads?"),
            std::string::npos);
  EXPECT_NE(mistakes({{"model", {{"preset", "gdn-10m"}}}}).find("gdn-100m"), std::string::npos);
  EXPECT_NE(mistakes(json::object()).find("/model: is missing"), std::string::npos);
  EXPECT_EQ(mistakes({{"model", {{"preset", "gdn-100m"}, {"num_hidden_layers", 2}}}}), "");
}

TEST(Config, ForeignConfigKeepsWhatItDoesNotKnow) {
  const json foreign = {{"model_type", "gated_deltanet"},
                        {"hidden_size", 64},
                        {"fancy", {1, 2}},
                        {"attn", nullptr},
                        {"num_v_heads", nullptr}};
  const ModelConfig c = parse_foreign_config(foreign, "config.json");
  const json back = c.to_json();
  for (const auto& [key, value] : foreign.items()) EXPECT_EQ(back.at(key), value) << key;
  json hybrid = foreign;
  hybrid["attn"] = {{"layers", {1}}};
  EXPECT_THROW(parse_foreign_config(hybrid, "config.json"), Error);
}

TEST(Config, BoundedGateIsReadForKdaOnly) {
  json kda = {{"model_type", "kda"}, {"safe_gate", true}, {"lower_bound", -5.0}};
  const ModelConfig c = parse_foreign_config(kda, "config.json");
  EXPECT_EQ(c.lower_bound, -5.0);
  EXPECT_EQ(c.to_json()["lower_bound"], -5.0);
  kda["lower_bound"] = nullptr;
  EXPECT_THROW(parse_foreign_config(kda, "config.json"), Error);  // bounded, but by what?
  kda["lower_bound"] = 5.0;
  EXPECT_THROW(parse_foreign_config(kda, "config.json"), Error);
  EXPECT_NE(mistakes({{"model", {{"preset", "gdn-100m"}, {"lower_bound", -5.0}}}})
                .find("/model/lower_bound: unknown"),
            std::string::npos);
  EXPECT_EQ(mistakes({{"model", {{"preset", "kda-100m"}, {"lower_bound", -5.0}}}}), "");
}

TEST(Config, ResolvedRecipeReadsBackEqual) {
  const json recipe = {{"model", {{"preset", "gdn-100m"}}},
                       {"steps", 7},
                       {"init", {{"scheme", "dami"}, {"dami", {{"peak_layer", 4}}}}},
                       {"optim", {{"schedule", "wsd"}}}};
  const TrainConfig c = parse_train_config(recipe, "r");
  EXPECT_EQ(parse_train_config(c.resolved(), "again").resolved(), c.resolved());
}

TEST(Config, SetPathOverrides) {
  json r = {{"optim", {{"lr", 1}}}};
  set_path(&r, "optim.lr=3e-4");
  set_path(&r, "data.train=[\"a\"]");
  set_path(&r, "out=runs/x");
  EXPECT_EQ(r["optim"]["lr"], 3e-4);
  EXPECT_EQ(r["data"]["train"][0], "a");
  EXPECT_EQ(r["out"], "runs/x");
  EXPECT_THROW(set_path(&r, "no-equals"), Error);
  EXPECT_THROW(set_path(&r, "out.deeper=1"), Error);
}

TEST(Schedule, WarmsUpAndEndsWhereAsked) {
  for (Schedule s : {Schedule::cosine, Schedule::linear, Schedule::wsd}) {
    OptimConfig o;
    o.schedule = s;
    o.warmup = 0.1;
    o.final_lr = 0.05;
    EXPECT_NEAR(schedule_factor(o, 0, 100), 0.1, 1e-12);
    EXPECT_NEAR(schedule_factor(o, 9, 100), 1, 1e-12);
    EXPECT_NEAR(schedule_factor(o, 99, 100), 0.05, 1e-12);
    for (int64_t t = 10; t < 99; ++t)
      EXPECT_GE(schedule_factor(o, t, 100) + 1e-12, schedule_factor(o, t + 1, 100));
    EXPECT_GT(schedule_factor(o, 0, 1), 0);
  }
}

TEST(Preset, GdnWidthRule) {
  EXPECT_EQ(preset("gdn-100m").mlp_width(), 1536);
  EXPECT_EQ(preset("gdn-100m").v_dim(), 128);
}

}  // namespace
}  // namespace ebb
