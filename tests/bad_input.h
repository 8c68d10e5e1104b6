// What the tests of bad input stand on: a folder of good and broken files, and rows, each a
// command,
// '@' standing for that folder, with the exit code and what its one line says.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>

#include "tensor/device.h"
#include "tensor/file.h"
#include "tensor/safetensors.h"
#include "tests/cli.h"
#include "tests/model_folder.h"
#include "train/shards.h"

namespace ebb::testing {

namespace fs = std::filesystem;
using nlohmann::json;

struct Row {
  const char* command;
  int code;
  const char* says;  // regular expression
};

// Good and broken inputs, made once.
class BadInput : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    scratch_ = std::make_unique<ScratchFolder>();
    write("text.txt", some_text(4000));
    write("empty.txt", "");
    write("file", "not a folder");
    write("broken.json", "{\n \"a\": 1,\n \"b\" 2\n}\n");
    write("lines.jsonl", "{\"text\": \"a\"}\n{\"text\": \n");
    write("number.json", "{\"steps\": 1e400}");
    write("twice.json", "{\"steps\": 1,\n \"out\": {\"steps\": 2}, \"steps\": 3}");
    write("deep.json", "{\"data\": " + std::string(100000, '[') + std::string(100000, ']') + "}");
    write("zero.json", std::string("{\n}\0 more", 9));
    fs::create_directories(at("folder"));
    fs::create_symlink(at("loop"), at("loop"));
    save_small_model(at("model"));
    make_shards();
    make_broken_models();
    make_recipes();
    make_runs();
  }
  static void TearDownTestSuite() { scratch_.reset(); }

  static std::string at(const std::string& name) { return scratch_->path() + "/" + name; }
  static void write(const std::string& name, const std::string& text) {
    fs::create_directories(fs::path(at(name)).parent_path());
    write_file_atomically(at(name), text);
  }
  static void copy_model(const std::string& to) {
    fs::copy(at("model"), at(to), fs::copy_options::recursive);
  }

  static void make_shards() {
    ShardWriter bytes(at("data/text"), Tokenizer::bytes().vocab_hash(), 257);
    bytes.add(Tokenizer::bytes().encode_document(some_text(4000)));
    bytes.finish();
    ShardWriter other(at("data/other"), 12345, 257);
    other.add(Tokenizer::bytes().encode_document(some_text(4000)));
    other.finish();
    const std::string good = read_file(at("data/text-00000.bin"));
    std::string flipped = good;
    flipped[2000] ^= 1;
    write("data/flipped-00000.bin", flipped);
    std::string vocabulary = good;
    vocabulary[25] = 100;  // of 25,601 ids
    write("data/vocabulary-00000.bin", vocabulary);
    write("data/gap-00000.bin", good);
    write("data/gap-00002.bin", good);
    write("data/short-00000.bin", good.substr(0, good.size() / 2));
  }

  static void make_broken_models() {
    const std::string config = read_file(at("model/config.json"));
    const auto with = [&](const std::string& name, const std::string& key, const json& value) {
      copy_model(name);
      json j = json::parse(config);
      j[key] = value;
      write(name + "/config.json", j.dump());
    };
    with("m_type", "model_type", "gated_deltanets");
    with("m_width", "hidden_size", 48);
    with("m_word", "num_heads", "two");
    with("m_negative", "num_hidden_layers", -1);
    with("m_small_vocabulary", "vocab_size", 100);
    with("m_layers", "num_hidden_layers", 1'000'000'000'000);
    with("m_wide", "hidden_size", int64_t(1) << 62);
    json deep = 1;
    for (int i = 0; i < 200; ++i) deep = json::array({deep});
    with("m_deep", "else", deep);
    copy_model("m_config");
    write("m_config/config.json", read_file(at("broken.json")));
    copy_model("m_cut");
    const std::string weights = read_file(at("model/model.safetensors"));
    write("m_cut/model.safetensors", weights.substr(0, weights.size() / 2));
    copy_model("m_text");
    write("m_text/model.safetensors", "these are not weights");
    copy_model("m_no_weights");
    fs::remove(at("m_no_weights/model.safetensors"));
    copy_model("m_no_tokenizer");
    fs::remove(at("m_no_tokenizer/tokenizer.json"));
    copy_model("m_tokenizer");
    write("m_tokenizer/tokenizer.json", "{\"ebb_tokenizer\": 3}");
    copy_model("m_tokenizer_broken");
    write("m_tokenizer_broken/tokenizer.json", "{");
    copy_model("m_missing_tensor");
    const SafeTensors file(at("model/model.safetensors"));
    StateDict fewer;
    for (const std::string& n : file.names())
      if (n != "model.norm.weight") fewer.emplace_back(n, file.get(n));
    save_safetensors(at("m_missing_tensor/model.safetensors"), fewer, {});
    copy_model("m_nan");
    StateDict broken;
    for (const std::string& n : file.names())
      broken.emplace_back(n, n == "model.norm.weight"
                                 ? Tensor::full(file.get(n).shape(), std::nan(""))
                                 : file.get(n));
    save_safetensors(at("m_nan/model.safetensors"), broken, {});
    auto tiny = small_model();
    ModelConfig small = tiny->config();
    small.vocab_size = 100;
    const auto narrow = make_model(small);
    save_model(at("m_narrow"), *narrow);
  }

  static void make_recipes() {
    json recipe = small_recipe(at("data/text"));
    recipe["out"] = at("out/run");
    write("recipe.json", recipe.dump());
    json no_data = recipe;
    no_data.erase("data");
    write("no_data.json", no_data.dump());
    json unknown = recipe;
    unknown["optim"] = {{"learning_rate", 1e-3}, {"warmpu", 0.1}};
    unknown["model"]["n_heads"] = 4;
    write("unknown.json", unknown.dump());
  }

  static void make_runs() {
    ASSERT_EQ(run("train @/recipe.json --device cpu --quiet --set out=@/run").code, 0);
    fs::copy(at("run"), at("damaged_run"), fs::copy_options::recursive);
    for (const auto& e : fs::directory_iterator(at("damaged_run")))
      if (e.path().filename().string().starts_with("checkpoint-"))
        write_file_atomically((e.path() / "model.safetensors").string(), "damaged");
    write("r_recipe/recipe.json", "{");
    write("r_metrics/metrics.jsonl", "{\"step\": 1}\nnonsense\n{\"step\": 3}\n");
    write("r_gates/gates_initial.json", "[{\"layer\": null, \"head\": 0}]");
    write("r_results/results.json", "{\"command\": \"eval\", \"models\": 7}");
    write("niah/niah_single_1_256.jsonl", "{\"input\": 1}\n");
    write("niah2/niah_single_1_256.jsonl", "{\n");
    write("cases/ops/rms_norm/broken.safetensors", "nothing");
  }

  static CliResult run(std::string command) {
    for (size_t i; (i = command.find('@')) != std::string::npos;)
      command.replace(i, 1, scratch_->path());
    return run_ebb(command);
  }
  // Files and their sizes, what is below out/ left aside.
  static std::vector<std::string> listing() {
    std::vector<std::string> out;
    for (const auto& e : fs::recursive_directory_iterator(scratch_->path())) {
      const std::string name = e.path().string().substr(scratch_->path().size());
      if (!name.starts_with("/out"))
        out.push_back(!e.is_symlink() && e.is_regular_file()
                          ? name + " " + std::to_string(e.file_size())
                          : name);
    }
    std::sort(out.begin(), out.end());
    return out;
  }

  static void expect_refused(const std::vector<Row>& rows) {
    for (const Row& row : rows) {
      const std::vector<std::string> before = listing();
      const CliResult r = run(row.command);
      EXPECT_EQ(r.code, row.code) << row.command << "\n" << r.err;
      EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << row.command << "\n" << r.err;
      EXPECT_TRUE(r.err.starts_with("ebb: error: ")) << row.command << "\n" << r.err;
      EXPECT_TRUE(std::regex_search(r.err, std::regex(row.says)))
          << row.command << "\nsays " << r.err << "want " << row.says;
      for (const char* foreign : {"json.exception", "filesystem error", "std::", "vector::"})
        EXPECT_EQ(r.err.find(foreign), std::string::npos) << row.command << "\n" << r.err;
      EXPECT_EQ(listing(), before) << row.command;
      if (fs::exists(at("out")))
        for (const auto& e : fs::recursive_directory_iterator(at("out"))) {
          const std::string name = e.path().filename().string();
          EXPECT_TRUE(name[0] != '.' && name.find(".tmp-") == std::string::npos) << e.path();
        }
      fs::remove_all(at("out"));
    }
  }

  inline static std::unique_ptr<ScratchFolder> scratch_;
};

}  // namespace ebb::testing
