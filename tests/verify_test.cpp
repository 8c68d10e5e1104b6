// `ebb verify` must notice what is wrong with a case, and say so with its exit code.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tensor/device.h"
#include "tensor/file.h"
#include "tensor/safetensors.h"
#include "tests/cli.h"

namespace ebb::testing {
namespace {

namespace fs = std::filesystem;

const std::string kCase = std::string(EBB_TEST_DATA) + "/ops/rms_norm/residual.safetensors";

class Verify : public ::testing::Test {
 protected:
  // Where a case of `op` lives in the scratch folder.
  std::string path(const std::string& op = "rms_norm", const std::string& name = "residual") const {
    const std::string folder = scratch_.path() + "/ops/" + op;
    fs::create_directories(folder);
    return folder + "/" + name + ".safetensors";
  }
  // The case with one tensor replaced by change(values).
  void write_changed(const std::string& tensor,
                     const std::function<void(std::vector<float>&)>& change) const {
    const SafeTensors file(kCase);
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const std::string& name : file.names()) {
      Tensor t = file.get(name).clone();
      if (name == tensor) {
        std::vector<float> values = t.to_vector<float>();
        change(values);
        t = Tensor::from(values, t.shape());
      }
      tensors.emplace_back(name, t);
    }
    save_safetensors(path(), tensors, file.metadata());
  }
  CliResult verify(const std::string& options = "") const {
    return run_ebb("verify " + scratch_.path() + " " + options);
  }
  const ScratchFolder scratch_;
};

void expect_failure(const CliResult& r, const std::string& text) {
  EXPECT_EQ(r.code, 1) << r.out << r.err;
  EXPECT_NE(r.out.find(text), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("0 passed, 1 failed, 0 skipped"), std::string::npos) << r.out;
}

TEST_F(Verify, PassesUntouched) {
  write_changed("", [](auto&) {});
  const CliResult r = verify("--json " + scratch_.path() + "/out/v.json");
  EXPECT_EQ(r.code, 0) << r.out << r.err;
  EXPECT_NE(r.out.find("1 passed, 0 failed, 0 skipped"), std::string::npos) << r.out;
  for (const char* t : {"out.y", "out.res_out", "grad.x", "grad.residual", "grad.weight"})
    EXPECT_NE(r.out.find(t), std::string::npos) << t;
  const auto json = nlohmann::json::parse(read_file(scratch_.path() + "/out/v.json"));
  EXPECT_EQ(json["passed"], 1);
  ASSERT_EQ(json["items"].size(), 1u);
  EXPECT_EQ(json["items"][0]["status"], "passed");
  EXPECT_EQ(json["items"][0]["tensors"].size(), 5u);
  for (const auto& t : json["items"][0]["tensors"])
    EXPECT_LE(t["error"].get<double>(), t["limit"].get<double>());
}

TEST_F(Verify, F64OnTheCpu) {
  write_changed("", [](auto&) {});
  EXPECT_EQ(verify("--dtype f64").code, 0);
}

// One value off by 1e-3 of itself, in every tensor that matters.
TEST_F(Verify, NoticesOneWrongValue) {
  for (const char* t : {"out.y", "out.res_out", "grad.x", "grad.residual", "grad.weight", "in.x",
                        "in.weight", "dout.y", "dout.res_out"}) {
    write_changed(t, [](std::vector<float>& v) { v[7] += std::abs(v[7]) * 1e-3f; });
    expect_failure(verify(), "FAILED");
  }
}

// The kind of its decays, not its name, says how the gradient of decays near zero is measured.
TEST_F(Verify, DecaysNearZeroByWhatTheCaseSays) {
  const SafeTensors file(std::string(EBB_TEST_DATA) + "/ops/gla/decay_near_zero.safetensors");
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.get(name));
  nlohmann::json parameters = nlohmann::json::parse(file.metadata("case"));
  const auto save = [&](const std::string& name, const std::string& decay) {
    parameters["name"] = name;
    parameters["decay"] = decay;
    save_safetensors(path("gla", name), tensors, {{"case", parameters.dump()}});
  };
  save("grouped", "zero");
  const CliResult r = verify();
  EXPECT_EQ(r.code, 0) << r.out << r.err;
  EXPECT_NE(r.out.find("(cancellation)"), std::string::npos) << r.out;
  save("grouped", "std");
  EXPECT_EQ(verify().out.find("(cancellation)"), std::string::npos);
}

// What is known of the decays is read from them, not from what the case calls itself.
TEST_F(Verify, Rwkv7NeedsNoKind) {
  const SafeTensors file(std::string(EBB_TEST_DATA) + "/ops/rwkv7/decay_strongest.safetensors");
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.get(name));
  nlohmann::json parameters = nlohmann::json::parse(file.metadata("case"));
  parameters.erase("kind");
  save_safetensors(path("rwkv7", "a"), tensors, {{"case", parameters.dump()}});
  const CliResult r = verify();
  EXPECT_EQ(r.code, 0) << r.out << r.err;
}

TEST_F(Verify, NoticesNaN) {
  write_changed("grad.x", [](std::vector<float>& v) { v[3] = NAN; });
  expect_failure(verify(), "grad.x holds a NaN");
}

TEST_F(Verify, NoticesTruncation) {
  const std::string bytes = read_file(kCase);
  for (const size_t keep :
       {size_t(0), size_t(5), size_t(100), bytes.size() / 2, bytes.size() - 1}) {
    write_file_atomically(path(), std::string_view(bytes).substr(0, keep));
    expect_failure(verify(), "FAIL  rms_norm/residual: ");
  }
}

TEST_F(Verify, NoticesMissingAndStrayTensors) {
  const SafeTensors file(kCase);
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& name : file.names())
    if (name != "out.y") tensors.emplace_back(name, file.get(name));
  save_safetensors(path(), tensors, file.metadata());
  expect_failure(verify(), "dout.y fits no output");
  tensors.emplace_back("out.y", file.get("out.y"));
  tensors.emplace_back("oout.z", file.get("out.y"));
  save_safetensors(path(), tensors, file.metadata());
  expect_failure(verify(), "unexpected tensor oout.z");
  save_safetensors(path(), {{"in.x", file.get("in.x")}}, {{"case", "{"}});
  expect_failure(verify(), "metadata \"case\" is not valid JSON");
}

TEST_F(Verify, NoticesACaseInTheWrongFolder) {
  write_changed("", [](auto&) {});
  fs::create_directories(scratch_.path() + "/ops/l2_norm");
  fs::rename(path(), path("l2_norm"));
  const CliResult r = verify();
  EXPECT_EQ(r.code, 1);
}

TEST_F(Verify, SkipsByName) {
  write_changed("", [](auto&) {});
  fs::copy_file(kCase, path("no_such_op", "a"));
  fs::create_directories(scratch_.path() + "/models/some_model");
  write_file_atomically(scratch_.path() + "/models/some_model/io.safetensors", "");
  write_file_atomically(scratch_.path() + "/models/some_model/config.json",
                        R"({"model_type": "perceptron"})");
  const CliResult r = verify();
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("operator no_such_op: not in this version"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("model some_model: model_type perceptron is not in this version"),
            std::string::npos)
      << r.out;
  EXPECT_NE(r.out.find("1 passed, 0 failed, 2 skipped"), std::string::npos) << r.out;
  EXPECT_EQ(verify("--strict").code, 1);
  const CliResult none = verify("--filter no_such_op");
  EXPECT_EQ(none.code, 1);
  EXPECT_NE(none.err.find("nothing was verified"), std::string::npos) << none.err;
}

TEST_F(Verify, LinksAreFollowedOnce) {
  write_changed("", [](auto&) {});
  fs::create_directory_symlink("..", scratch_.path() + "/ops/up");
  fs::create_directory_symlink("nowhere", scratch_.path() + "/ops/dangling");
  fs::create_directory_symlink("self", scratch_.path() + "/ops/self");
  const CliResult r = verify();
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("1 passed, 0 failed, 0 skipped"), std::string::npos) << r.out;
}

// Whatever byte of a case is damaged: a comparison, or one line that names the file.
TEST_F(Verify, AnyDamageIsAResult) {
  const std::string good = read_file(kCase);
  const size_t header = 8 + size_t(uint8_t(good[0])) + 256 * size_t(uint8_t(good[1]));
  write_changed("", [](auto&) {});
  int files = 0;
  for (size_t i = 0; i < header; i += 7, ++files) {
    std::string bad = good;
    bad[i] = char(bad[i] ^ (1 << (i % 8)));
    write_file_atomically(path("rms_norm", fmt::format("damaged_{}", i)), bad);
    write_file_atomically(path("rms_norm", fmt::format("cut_{}", i)), good.substr(0, i));
  }
  const CliResult r = verify();
  EXPECT_EQ(r.code, 1) << r.err;  // an exit, not a signal
  EXPECT_EQ(r.err, "");
  size_t cut = 0;
  for (size_t at = 0; (at = r.out.find("FAIL  rms_norm/cut_", at)) != std::string::npos; ++at)
    ++cut;
  EXPECT_EQ(cut, size_t(files));
}

TEST_F(Verify, ExitCodes) {
  EXPECT_EQ(verify().code, 1);  // an empty folder: nothing found
  EXPECT_EQ(run_ebb("verify /no/such/place").code, 1);
  EXPECT_EQ(run_ebb("verify").code, 2);
  EXPECT_EQ(verify("--device tpu").code, 2);
  EXPECT_EQ(verify("--dtype f16").code, 2);
  EXPECT_EQ(verify("--dtype bf16 --device cpu").code, 2);
  EXPECT_EQ(verify("--filter '['").code, 2);
  if (cuda_device_count() == 0) {
    const CliResult r = verify("--device cuda");
    EXPECT_EQ(r.code, 1);
    EXPECT_TRUE(r.err.starts_with("ebb: error: no GPU: ")) << r.err;
  }
}

}  // namespace
}  // namespace ebb::testing
