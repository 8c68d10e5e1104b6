// `ebb verify` on model folders and tokenizers: it must notice what is wrong with them.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "tensor/compare.h"
#include "tensor/file.h"
#include "tensor/safetensors.h"
#include "tests/cli.h"

namespace ebb::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kData = EBB_TEST_DATA;
const std::string kModel = kData + "/models/gated_deltanet_gva";

void expect_failure(const CliResult& r, const std::string& text) {
  EXPECT_EQ(r.code, 1) << r.out << r.err;
  EXPECT_NE(r.out.find(text), std::string::npos) << "want " << text << "\n" << r.out;
  EXPECT_NE(r.out.find("0 passed, 1 failed, 0 skipped"), std::string::npos) << r.out;
}

// The lines of `out` that end in FAILED, each cut to its first word.
std::vector<std::string> failed_names(const std::string& out) {
  std::vector<std::string> names;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);)
    if (line.ends_with("FAILED")) names.push_back(line.substr(6, line.find("  ", 6) - 6));
  return names;
}

class VerifyModel : public ::testing::Test {
 protected:
  VerifyModel() {
    fs::create_directories(folder());
    for (const char* f : {"config.json", "model.safetensors", "io.safetensors"}) restore(f);
  }
  std::string folder() const { return scratch_.path() + "/models/m"; }
  void restore(const std::string& file) const {
    fs::copy_file(kModel + "/" + file, folder() + "/" + file, fs::copy_options::overwrite_existing);
  }
  // Rewrites a file of the folder, each tensor passed through `change` (undefined: left out).
  void rewrite(const std::string& file,
               const std::function<Tensor(const std::string&, const Tensor&)>& change,
               const std::vector<std::pair<std::string, Tensor>>& more = {}) const {
    const SafeTensors from(kModel + "/" + file);
    std::vector<std::pair<std::string, Tensor>> tensors = more;
    for (const std::string& name : from.names())
      if (const Tensor t = change(name, from.get(name))) tensors.emplace_back(name, t);
    save_safetensors(folder() + "/" + file, tensors, from.metadata());
  }
  // One value of one float tensor moved by `by` times the tensor's norm.
  void nudge(const std::string& file, const std::string& tensor, double by) const {
    rewrite(file, [&](const std::string& name, const Tensor& t) {
      if (name != tensor) return t;
      std::vector<float> v = t.to_vector<float>();
      v[v.size() / 2] += float(by * euclidean_norm(t));
      return Tensor::from(v, t.shape());
    });
  }
  void change_config(const std::function<void(json&)>& change) const {
    json j = json::parse(read_file(kModel + "/config.json"));
    change(j);
    write_file_atomically(folder() + "/config.json", j.dump());
  }
  CliResult verify(const std::string& options = "") const {
    return run_ebb("verify " + scratch_.path() + " " + options);
  }
  const ScratchFolder scratch_;
};

TEST_F(VerifyModel, PassesUntouchedWithEverythingCompared) {
  for (const char* dtype : {"f32", "f64"}) {
    const std::string file = scratch_.path() + "/v.json";
    const CliResult r = verify("--strict --dtype " + std::string(dtype) + " --json " + file);
    ASSERT_EQ(r.code, 0) << r.out << r.err;
    const json item = json::parse(read_file(file))["items"][0];
    // 2 layers: embed, 2 blocks, norm, logits, loss; 39 gradients; greedy logits and tokens; copy.
    const size_t gradients = SafeTensors(kModel + "/model.safetensors").names().size();
    EXPECT_EQ(item["tensors"].size(), 6 + gradients + 3 + (std::string(dtype) == "f64"));
    for (const json& t : item["tensors"]) {
      EXPECT_TRUE(t["passed"]) << t;
      EXPECT_FALSE(t.contains("informative")) << t;
    }
  }
}

TEST_F(VerifyModel, NoticesOneWrongValue) {
  for (const std::string t :
       {"hidden.embed", "hidden.block1", "hidden.final_norm", "logits", "loss", "greedy.logits",
        "grad.model.layers.1.attn.q_conv1d.weight", "grad.lm_head.weight"}) {
    nudge("io.safetensors", t, 3e-4);
    const CliResult r = verify();
    expect_failure(r, "FAILED");
    EXPECT_EQ(failed_names(r.out), std::vector<std::string>{t});
  }
  nudge("io.safetensors", "grad.model.layers.0.attn.A_log", 3e-4);
  expect_failure(verify(), "grad.model.layers.0.attn.A_log");
}

TEST_F(VerifyModel, NoticesOneWrongGreedyToken) {
  rewrite("io.safetensors", [&](const std::string& name, const Tensor& t) {
    if (name != "greedy.tokens") return t;
    std::vector<int64_t> v = t.to_vector<int64_t>();
    v.back() = (v.back() + 1) % 256;
    return Tensor::from(v, t.shape());
  });
  expect_failure(verify(), "1 of 16 tokens differ, first at 15  FAILED");
}

TEST_F(VerifyModel, NoticesOtherWeights) {
  nudge("model.safetensors", "model.layers.0.attn.b_proj.weight", 0.1);
  expect_failure(verify(), "FAILED");
  rewrite("model.safetensors", [&](const std::string& name, const Tensor& t) {
    return name == "model.norm.weight" ? Tensor() : t;
  });
  expect_failure(verify(), "missing model.norm.weight");
}

TEST_F(VerifyModel, NoticesWhatIsNotWrittenBackEqual) {
  // Read in f32 whatever the file holds, so that this tensor comes back with another type.
  rewrite("model.safetensors", [&](const std::string& name, const Tensor& t) {
    return name == "model.norm.weight" ? t.to(DType::f64) : t;
  });
  const CliResult r = verify();
  expect_failure(r, "differ, first model.norm.weight  FAILED");
  EXPECT_EQ(failed_names(r.out), std::vector<std::string>{"written back"});
}

TEST_F(VerifyModel, NoticesWhatDoesNotFitTogether) {
  const auto same = [](const std::string&, const Tensor& t) { return t; };
  const auto without = [](const std::string& gone) {
    return [gone](const std::string& name, const Tensor& t) { return name == gone ? Tensor() : t; };
  };
  for (const char* gone : {"grad.lm_head.weight", "hidden.block0", "greedy.tokens", "targets"}) {
    rewrite("io.safetensors", without(gone));
    expect_failure(verify(), std::string("io.safetensors: no ") + gone);
  }
  rewrite("io.safetensors", same, {{"grad.extra", Tensor::zeros({1})}});
  expect_failure(verify(), "unexpected tensor grad.extra");
  rewrite("io.safetensors", [](const std::string& name, const Tensor& t) {
    return name == "logits" ? Tensor::full(t.shape(), NAN) : t;
  });
  expect_failure(verify(), "logits holds a NaN");
  rewrite("io.safetensors", [](const std::string& name, const Tensor& t) {
    if (name != "targets") return t;
    std::vector<int64_t> v = t.to_vector<int64_t>();
    v[3] ^= 1;
    return Tensor::from(v, t.shape());
  });
  expect_failure(verify(), "not the labels shifted by one, at token 3");
  const std::string bytes = read_file(kModel + "/io.safetensors");
  write_file_atomically(folder() + "/io.safetensors", bytes.substr(0, bytes.size() / 2));
  expect_failure(verify(), "FAIL  m: ");
}

TEST_F(VerifyModel, ConfigsItCannotRun) {
  change_config([](json& j) { j["attn"] = {{"layers", {1}}}; });
  expect_failure(verify(), "/attn: hybrid attention layers are not supported");
  change_config([](json& j) { j["num_heads"] = 2; });
  expect_failure(verify(), "the tensors do not fit this model");
  write_file_atomically(folder() + "/config.json", "{");
  expect_failure(verify(), "config.json is not valid JSON: line 1");
  fs::remove(folder() + "/config.json");
  expect_failure(verify(), "config.json");
  change_config([](json& j) { j["model_type"] = "perceptron"; });
  const CliResult r = verify();
  EXPECT_EQ(r.code, 1);
  EXPECT_NE(r.out.find("skip  model m: model_type perceptron is not in this version of ebb"),
            std::string::npos)
      << r.out;
  EXPECT_NE(r.err.find("nothing was verified"), std::string::npos) << r.err;
}

// ---- tokenizers ----

class VerifyTokenizer : public ::testing::Test {
 protected:
  VerifyTokenizer() {
    fs::create_directories(scratch_.path() + "/tokenizers");
    fs::create_directories(files() + "/bytes");
    write_file_atomically(files() + "/bytes/tokenizer.json", R"({"ebb_tokenizer": "bytes"})");
    write("bytes.jsonl", kGood);
    write("bytes.decode.jsonl", R"({"name": "cut", "ids": [72, 195], "bytes_hex": "48c3"})");
  }
  std::string files() const { return scratch_.path() + "/files"; }
  void write(const std::string& name, const std::string& text) const {
    write_file_atomically(scratch_.path() + "/tokenizers/" + name, text + "\n");
  }
  CliResult verify(const std::string& options) const {
    return run_ebb("verify " + scratch_.path() + "/tokenizers " + options);
  }
  CliResult verify() const { return verify("--tokenizers " + files()); }

  static constexpr const char* kGood =
      R"({"name": "hi", "text": "Hi\u00e9", "ids": [72, 105, 195, 169], "roundtrip": true})";
  const ScratchFolder scratch_;
};

TEST_F(VerifyTokenizer, PassesUntouched) {
  const CliResult r = verify("--strict --tokenizers " + files());
  EXPECT_EQ(r.code, 0) << r.out << r.err;
  EXPECT_NE(r.out.find("0 of 1 strings differ"), std::string::npos) << r.out;
}

TEST_F(VerifyTokenizer, NoticesWhatDiffers) {
  write("bytes.jsonl", std::string(kGood) + "\n" +
                           R"({"name": "x", "text": "x", "ids": [121], "roundtrip": true})");
  const CliResult r = verify();
  expect_failure(r, "1 of 2 strings differ, first x  FAILED");
  EXPECT_EQ(failed_names(r.out), (std::vector<std::string>{"ids", "text"}));
  write("bytes.jsonl",
        R"({"name": "x", "text": "x", "ids": [120], "roundtrip": false, "decoded": "y"})");
  EXPECT_EQ(failed_names(verify().out), (std::vector<std::string>{"text"}));
  write("bytes.jsonl", kGood);
  write("bytes.decode.jsonl", R"({"name": "cut", "ids": [72, 195], "bytes_hex": "48"})");
  EXPECT_EQ(failed_names(verify().out), (std::vector<std::string>{"bytes"}));
}

TEST_F(VerifyTokenizer, NoticesDamage) {
  for (const auto& [line, problem] : std::vector<std::pair<std::string, std::string>>{
           {"{", "bytes.jsonl:2: not a JSON object"},
           {R"({"name": "x", "ids": [120], "roundtrip": true})", "bytes.jsonl:2: "},
           {R"({"name": "x", "text": "x", "ids": "y", "roundtrip": true})", "bytes.jsonl:2: "},
           {R"({"name": "x", "text": "x", "ids": [120], "roundtrip": false})", "bytes.jsonl:2: "},
           {R"({"name": "x", "text": "x", "ids": [999], "roundtrip": true})", "id 999 outside"}}) {
    write("bytes.jsonl", std::string(kGood) + "\n" + line);
    expect_failure(verify(), problem);
  }
  write_file_atomically(scratch_.path() + "/tokenizers/bytes.jsonl", "");
  expect_failure(verify(), "holds no line");
  write("bytes.jsonl", kGood);
  write_file_atomically(files() + "/bytes/tokenizer.json", "{");
  expect_failure(verify(), "FAIL  bytes: ");
}

TEST_F(VerifyTokenizer, SkipsByName) {
  write("other.jsonl", kGood);
  fs::create_directories(files() + "/other");
  write_file_atomically(files() + "/other/vocab.txt", "x");
  const CliResult r = verify();
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("skip  tokenizer other: "), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("1 passed, 0 failed, 1 skipped"), std::string::npos) << r.out;
  EXPECT_EQ(verify("--strict --tokenizers " + files()).code, 1);
  fs::remove_all(files() + "/other");
  EXPECT_NE(verify().out.find("skip  tokenizer other: there is no folder "), std::string::npos);
  const CliResult none = verify("");
  EXPECT_EQ(none.code, 1);
  EXPECT_NE(none.out.find("say where its files are with --tokenizers"), std::string::npos);
  EXPECT_EQ(verify("--tokenizers /no/such/folder").code, 2);
}

TEST_F(VerifyTokenizer, NoticesADamagedModel) {
  write("bytes.jsonl", kGood);
  write_file_atomically(files() + "/bytes/tokenizer.model", "no protobuf");
#ifdef EBB_WITH_SENTENCEPIECE
  expect_failure(verify(), "is not a SentencePiece model");
#else
  EXPECT_NE(verify().out.find("this build has no SentencePiece"), std::string::npos);
#endif
}

}  // namespace
}  // namespace ebb::testing
