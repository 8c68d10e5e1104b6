// `ebb convert`: there and back again, bit by bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>

#include "models/weight_files.h"
#include "tensor/compare.h"
#include "tensor/file.h"
#include "tensor/json_text.h"
#include "tests/cli.h"
#include "tests/model_folder.h"
#include "tests/temporary_folder.h"

namespace ebb::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Tensors = std::map<std::string, Tensor>;

class Convert : public ::testing::Test {
 protected:
  std::string at(const std::string& name) const { return temporary_.file(name); }
  void convert(const std::string& arguments) const {
    const CliResult r = run_ebb("convert " + arguments);
    EXPECT_EQ(r.code, 0) << arguments << "\n" << r.err;
    EXPECT_EQ(r.err, "") << arguments;
  }
  // One line, and nothing is left behind.
  void refuse(const std::string& arguments, const std::string& says, int code = 1) const {
    const std::vector<std::string> before = sorted(temporary_.names());
    const CliResult r = run_ebb("convert " + arguments + " --out " + at("refused"));
    EXPECT_EQ(r.code, code) << arguments << r.err;
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    EXPECT_NE(r.err.find(says), std::string::npos) << "want " << says << "\n" << r.err;
    EXPECT_EQ(sorted(temporary_.names()), before) << arguments;
  }
  static std::vector<std::string> sorted(std::vector<std::string> x) {
    std::sort(x.begin(), x.end());
    return x;
  }
  static Tensors read(const std::string& folder) {
    const StateDict all = WeightFiles(folder).tensors();
    return {all.begin(), all.end()};
  }
  static json config(const std::string& folder) {
    return parse_python_json(read_file(folder + "/config.json"), folder);
  }
  static void expect_equal(const std::string& a, const std::string& b) {
    const Tensors x = read(a), y = read(b);
    ASSERT_EQ(x.size(), y.size()) << a << " " << b;
    for (const auto& [name, t] : x) {
      ASSERT_TRUE(y.count(name)) << name;
      EXPECT_EQ(t.dtype(), y.at(name).dtype()) << name;
      EXPECT_TRUE(bitwise_equal(t, y.at(name))) << name;
    }
  }
  static std::vector<std::string> golden_models() {
    std::vector<std::string> out;
    for (const auto& f : fs::directory_iterator(std::string(EBB_TEST_DATA) + "/models"))
      if (!f.path().filename().string().ends_with("_layer")) out.push_back(f.path().string());
    std::sort(out.begin(), out.end());
    return out;
  }

  TemporaryFolder temporary_;
};

// Every public folder there is: into shards and back, and every field of its config kept.
TEST_F(Convert, GoldenFoldersThroughShards) {
  const std::vector<std::string> folders = golden_models();
  ASSERT_GE(folders.size(), 11u);
  for (const std::string& folder : folders) {
    const std::string name = fs::path(folder).filename().string();
    convert(folder + " --shard-size 50kB --out " + at("shards-" + name));
    EXPECT_FALSE(fs::exists(at("shards-" + name) + "/model.safetensors"));
    const json index =
        json::parse(read_file(at("shards-" + name) + "/model.safetensors.index.json"));
    const Tensors given = read(folder);
    EXPECT_EQ(index["weight_map"].size(), given.size());
    int64_t bytes = 0;
    for (const auto& [tensor, t] : given) bytes += t.nbytes();
    EXPECT_EQ(index["metadata"]["total_size"], bytes);
    for (const std::string& path : WeightFiles(at("shards-" + name)).paths()) {
      const SafeTensors shard(path);
      int64_t size = 0;
      for (const auto& info : shard.infos()) size += info.end - info.begin;
      EXPECT_TRUE(size <= 50'000 || shard.infos().size() == 1) << path;
    }
    convert(at("shards-" + name) + " --out " + at("one-" + name));
    expect_equal(folder, at("shards-" + name));
    expect_equal(folder, at("one-" + name));
    const json kept = config(at("one-" + name)), source = config(folder);
    for (const auto& [key, value] : source.items()) EXPECT_EQ(kept[key], value) << name << key;
    EXPECT_GT(WeightFiles(at("shards-" + name)).paths().size(), 1u) << name;
  }
}

// f32 -> bf16 rounds to nearest; bf16 -> f32 -> bf16 changes no bit.
TEST_F(Convert, Dtypes) {
  for (const std::string& folder : golden_models()) {
    const std::string name = fs::path(folder).filename().string(), half = at(name + "-bf16");
    convert(folder + " --dtype bf16 --out " + half);
    const Tensors x = read(folder), y = read(half);
    int matrices = 0;
    for (const auto& [tensor, t] : x) {
      const bool vector = t.dim() < 2 || y.at(tensor).dtype() == DType::f32;
      EXPECT_TRUE(bitwise_equal(y.at(tensor), vector ? t : t.to(DType::bf16))) << tensor;
      if (tensor.ends_with("proj.weight")) {
        EXPECT_EQ(y.at(tensor).dtype(), DType::bf16) << tensor;
      }
      if (tensor.ends_with("A_log") || tensor.ends_with("dt_bias")) {
        EXPECT_EQ(y.at(tensor).dtype(), DType::f32) << tensor;
      }
      matrices += !vector;
    }
    EXPECT_GT(matrices, 4) << name;
    EXPECT_EQ(config(half)["dtype"], "bfloat16");
    convert(half + " --dtype f32 --out " + at(name + "-f32"));
    EXPECT_EQ(config(at(name + "-f32"))["dtype"], "float32");
    convert(at(name + "-f32") + " --dtype bf16 --out " + at(name + "-again"));
    expect_equal(half, at(name + "-again"));

    convert(folder + " --dtype bf16 --all --out " + at(name + "-all"));
    for (const auto& [tensor, t] : read(at(name + "-all"))) EXPECT_EQ(t.dtype(), DType::bf16);
    convert(at(name + "-all") + " --dtype f32 --out " + at(name + "-wide"));
    convert(at(name + "-wide") + " --dtype bf16 --all --out " + at(name + "-all2"));
    expect_equal(at(name + "-all"), at(name + "-all2"));
  }
}

// A folder in f16 becomes f32, exactly.
TEST_F(Convert, HalfPrecisionIsWidened) {
  save_small_model(at("m"));
  convert(at("m") + " --dtype bf16 --all --out " + at("h"));
  std::string bytes = read_file(at("h/model.safetensors"));
  for (size_t i = 0; (i = bytes.find("\"BF16\"", i)) != std::string::npos;)
    bytes.replace(i, 6, "\"F16\" ");
  write_file_atomically(at("h/model.safetensors"), bytes);
  convert(at("h") + " --out " + at("wide"));
  const SafeTensors file(at("h/model.safetensors"));
  for (const auto& [name, t] : read(at("wide"))) {
    EXPECT_EQ(t.dtype(), DType::f32);
    EXPECT_TRUE(bitwise_equal(t, file.get(name, DType::f32))) << name;
  }
}

// A checkpoint to a public folder, and back with its moments: training goes on as if never stopped.
TEST_F(Convert, ACheckpointThereAndBack) {
  write_file_atomically(at("text.txt"), some_text(4000));
  ASSERT_EQ(run_ebb("tokenize " + at("text.txt") + " --tokenizer bytes --out " + at("text")).code,
            0);
  json recipe = small_recipe(at("text"));
  recipe.update({{"steps", 6}, {"keep_last", 10}});
  write_file_atomically(at("r.json"), recipe.dump());
  const std::string train = "train " + at("r.json") + " --device cpu --quiet --resume --set out=";
  ASSERT_EQ(run_ebb(train + at("whole")).code, 0);
  const std::string checkpoint = at("whole/checkpoint-000003");
  convert(checkpoint + " --out " + at("public"));
  for (const char* own : {"optimizer.safetensors", "loop.json", "checksums.json"})
    EXPECT_FALSE(fs::exists(at("public") + "/" + own)) << own;
  EXPECT_TRUE(fs::exists(at("public/tokenizer.json")));
  expect_equal(checkpoint, at("public"));
  convert(at("public") + " --shard-size 20kB --out " + at("sharded"));

  for (const std::string& from : {at("public"), at("sharded")}) {
    const std::string run = from + "-run";
    convert(from + " --to checkpoint --optimizer " + checkpoint + " --out " + run);
    for (const char* file : {"model.safetensors", "optimizer.safetensors"})
      for (const std::string& name : SafeTensors(checkpoint + "/" + file).names())
        EXPECT_TRUE(bitwise_equal(SafeTensors(checkpoint + "/" + file).get(name),
                                  SafeTensors(run + "/checkpoint-000003/" + file).get(name)))
            << name;
    EXPECT_EQ(json::parse(read_file(checkpoint + "/loop.json"))["cursor"],
              json::parse(read_file(run + "/checkpoint-000003/loop.json"))["cursor"]);
    const CliResult r = run_ebb(train + run);
    EXPECT_EQ(r.code, 0) << r.err;
    expect_equal(at("whole/final"), run + "/final");
    EXPECT_TRUE(fs::exists(run + "/recipe.json"));
    EXPECT_EQ(run_ebb(train + run + " --set optim.lr=1").code, 1);  // bound to its recipe now
  }

  // Without moments it is the start of a run; of a checkpoint they come along.
  convert(at("public") + " --to checkpoint --out " + at("fresh"));
  for (const std::string& name : SafeTensors(checkpoint + "/optimizer.safetensors").names()) {
    const Tensor t = SafeTensors(at("fresh/checkpoint-000000/optimizer.safetensors")).get(name);
    EXPECT_TRUE(bitwise_equal(t, Tensor::zeros(t.shape(), t.dtype()))) << name;
  }
  const CliResult r = run_ebb(train + at("fresh"));
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("6 steps"), std::string::npos) << r.out;
  convert(checkpoint + " --to checkpoint --out " + at("copy"));
  expect_equal(checkpoint, at("copy/checkpoint-000003"));
  ASSERT_EQ(run_ebb(train + at("copy")).code, 0);
  expect_equal(at("whole/final"), at("copy/final"));

  refuse(at("public") + " --to checkpoint --optimizer " + at("public"), "checksums.json");
  save_small_model(at("other"));
  refuse(at("other") + " --to checkpoint --optimizer " + checkpoint,
         "AdamW: the state does not fit these parameters: ");
  convert(at("whole") + " --out " + at("of-the-run"));  // its final model
  expect_equal(at("whole/final"), at("of-the-run"));
}

// What commands do with shards is what they do with one file.
TEST_F(Convert, ShardsAreReadEverywhere) {
  save_small_model(at("m"));
  convert(at("m") + " --shard-size 10000 --out " + at("s"));
  write_file_atomically(at("t.txt"), some_text(600));
  ASSERT_EQ(run_ebb("tokenize " + at("t.txt") + " --tokenizer bytes --out " + at("t")).code, 0);
  const auto out = [&](const std::string& command, const std::string& model) {
    const CliResult r = run_ebb(command + at(model));
    EXPECT_EQ(r.code, 0) << r.err;
    return r.out;
  };
  const std::string generate = "generate --prompt Line --max-new-tokens 5 --model ";
  EXPECT_EQ(out(generate, "m"), out(generate, "s"));
  EXPECT_EQ(out("inspect ", "m").substr(at("m").size()),
            out("inspect ", "s").substr(at("s").size()));
  const CliResult r = run_ebb("eval --model " + at("m") + "," + at("s") +
                              " --task perplexity --tokens " + at("t") + " --out " + at("e"));
  ASSERT_EQ(r.code, 0) << r.err;
  const json rows = json::parse(read_file(at("e/results.json")))["perplexity"];
  EXPECT_EQ(rows[0]["perplexity"], rows[1]["perplexity"]);
}

TEST_F(Convert, WrongInput) {
  save_small_model(at("m"));
  convert(at("m") + " --shard-size 10000 --out " + at("s"));
  const std::vector<std::string> shards = WeightFiles(at("s")).paths();
  ASSERT_GT(shards.size(), 3u);
  const auto broken = [&](const std::string& name) {
    fs::copy(at("s"), at(name));
    return at(name);
  };
  const std::string index = "/model.safetensors.index.json";
  const auto edit = [&](const std::string& folder, const std::function<void(json*)>& change) {
    json j = json::parse(read_file(folder + index));
    change(&j);
    write_file_atomically(folder + index, j.dump());
  };
  // All that is wrong with shards, at once.
  std::string folder = broken("lost");
  fs::remove(folder + "/" + fs::path(shards[1]).filename().string());
  std::string one;  // of a shard with several
  for (const std::string& path : shards)
    if (const SafeTensors shard(path); path != shards[1] && shard.infos().size() > 1)
      one = shard.names()[0];
  edit(folder, [&](json* j) { j->at("weight_map").erase(one); });
  refuse(folder, fs::path(shards[1]).filename().string() + " is missing");
  refuse(folder, one + " of model-");
  folder = broken("moved");
  edit(folder, [](json* j) {
    j->at("weight_map")["lm_head.weight"] =
        "model-00001-of-0000" + j->at("weight_map")["lm_head.weight"].get<std::string>().substr(19);
  });
  refuse(folder, "model-00001-of-");
  folder = broken("outside");
  edit(folder, [](json* j) { j->at("weight_map")["lm_head.weight"] = "../m/model.safetensors"; });
  refuse(folder, "want the name of a file beside it");
  write_file_atomically(folder + index, "{}");
  refuse(folder, "want an object ");

  // Tensors that do not fit the config: each is named.
  folder = at("config");
  fs::copy(at("m"), folder);
  json config = json::parse(read_file(folder + "/config.json"));
  config["num_hidden_layers"] = 3;
  config["vocab_size"] = 301;
  write_file_atomically(folder + "/config.json", config.dump());
  refuse(folder, "missing model.layers.2.attn.A_log");
  refuse(folder, "lm_head.weight is [300,32], want [301,32]");
  config["num_hidden_layers"] = 1;
  write_file_atomically(folder + "/config.json", config.dump());
  refuse(folder, "unexpected model.layers.1.attn.A_log");
  refuse(folder, folder + ": load_state_dict");

  fs::create_directories(at("pickle"));
  fs::copy(at("m/config.json"), at("pickle/config.json"));
  write_file_atomically(at("pickle/pytorch_model.bin"), "x");
  refuse(at("pickle"), "holds neither");
  EXPECT_NE(run_ebb("inspect " + at("pickle")).err.find("save it again as safetensors"),
            std::string::npos);
  refuse(at("none"), "there is no folder");
  refuse(at("m") + " --to checkpoint --dtype bf16", "a checkpoint is f32", 2);
  refuse(at("m") + " --optimizer x", "--optimizer is for", 2);
  refuse(at("m") + " --all", "--all is for", 2);
  refuse(at("m") + " --dtype f16", "--dtype", 2);
  refuse(at("m") + " --shard-size 5XB", "--shard-size", 2);
  convert(at("m") + " --out " + at("there"));
  EXPECT_NE(run_ebb("convert " + at("m") + " --out " + at("there")).err.find("--overwrite"),
            std::string::npos);
  convert(at("m") + " --overwrite --dtype bf16 --out " + at("there"));
  EXPECT_EQ(read(at("there")).at("lm_head.weight").dtype(), DType::bf16);
}

// A head beside the embedding that it is tied to.
TEST_F(Convert, TiedHead) {
  auto model = small_model();
  ModelConfig config = model->config();
  config.tie_word_embeddings = true;
  model = make_model(config);
  init_weights(*model, 3);
  save_model(at("m"), *model);
  StateDict with = WeightFiles(at("m")).tensors();
  Tensor embeddings;
  for (const auto& [name, t] : with)
    if (name == "model.embeddings.weight") embeddings = t.clone();
  with.emplace_back("lm_head.weight", embeddings);
  save_weights(at("m"), with);
  convert(at("m") + " --out " + at("a"));
  EXPECT_FALSE(read(at("a")).count("lm_head.weight"));
  with.back().second = embeddings.clone();
  with.back().second.fill_(1);
  fs::create_directories(at("b"));
  fs::copy(at("m/config.json"), at("b/config.json"));
  save_weights(at("b"), with);
  refuse(at("b"), "the two differ");
}

}  // namespace
}  // namespace ebb::testing
