// Weights as other software leaves them: half precision, several files.
#include "models/checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <regex>

#include "models/weight_files.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/file.h"
#include "tensor/safetensors.h"
#include "tests/model_folder.h"
#include "tests/temporary_folder.h"

namespace ebb::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The nearest of the f16 numbers that are not denormal.
uint16_t half_bits(float x) {
  int exponent = 0;
  const double fraction = std::frexp(double(std::fabs(x)), &exponent);  // in [1/2, 1)
  const int64_t mantissa = std::llround(fraction * 2048);               // 11 bits and the carry
  if (x == 0 || exponent < -13) return 0;
  const int64_t bits = (int64_t(exponent + 14) << 10) + (mantissa - 1024);
  return uint16_t(bits | (x < 0 ? 0x8000 : 0));
}

void write_half(const std::string& path, const StateDict& state) {
  json header;
  std::string data;
  for (const auto& [name, tensor] : state) {
    const size_t begin = data.size();
    for (const float v : tensor.to_vector<float>()) {
      const uint16_t half = half_bits(v);
      data.append(reinterpret_cast<const char*>(&half), 2);
    }
    header[name] = {
        {"dtype", "F16"}, {"shape", tensor.shape()}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  write_file_atomically(path, bytes + text + data);
}

void expect_refused(const std::string& folder, const std::string& says) {
  try {
    load_model(folder);
    ADD_FAILURE() << "loaded; want: " << says;
  } catch (const Error& e) {
    EXPECT_TRUE(std::regex_search(e.what(), std::regex(says))) << e.what() << "\nwant: " << says;
  }
}

class ForeignWeights : public ::testing::Test {
 protected:
  void SetUp() override {
    save_small_model(folder_);
    state_ = load_model(folder_)->state_dict();
  }
  // The weights in two files and their index, of which `damage` may change something.
  void write_parts(const std::function<void(json*)>& damage = {}) {
    fs::remove(folder_ + "/model.safetensors");
    json index = {{"metadata", {{"total_size", 1}}}};
    StateDict half[2];
    for (size_t i = 0; i < state_.size(); ++i) {
      half[i % 2].push_back(state_[i]);
      index["weight_map"][state_[i].first] = kParts[i % 2];
    }
    for (int i : {0, 1}) save_safetensors(folder_ + "/" + kParts[i], half[i]);
    if (damage) damage(&index);
    write_file_atomically(folder_ + "/model.safetensors.index.json", index.dump());
  }

  const std::string kParts[2] = {"model-00001-of-00002.safetensors",
                                 "model-00002-of-00002.safetensors"};
  TemporaryFolder temporary_;
  const std::string folder_ = temporary_.file("model");
  StateDict state_;
};

TEST_F(ForeignWeights, HalfPrecision) {
  write_half(folder_ + "/model.safetensors", state_);
  const StateDict read = load_model(folder_)->state_dict();
  ASSERT_EQ(read.size(), state_.size());
  for (size_t i = 0; i < read.size(); ++i) {
    EXPECT_EQ(read[i].second.dtype(), DType::f32);
    EXPECT_LE(relative_error(read[i].second, state_[i].second), 5e-4) << read[i].first;
  }
}

TEST_F(ForeignWeights, InParts) {
  write_parts();
  EXPECT_EQ(WeightFiles(folder_).paths(),
            (std::vector<std::string>{folder_ + "/" + kParts[0], folder_ + "/" + kParts[1]}));
  const StateDict read = load_model(folder_)->state_dict();
  ASSERT_EQ(read.size(), state_.size());
  for (size_t i = 0; i < read.size(); ++i)
    EXPECT_TRUE(bitwise_equal(read[i].second, state_[i].second)) << read[i].first;
}

TEST_F(ForeignWeights, DamageIsNamed) {
  const auto refused = [&](const std::function<void(json*)>& damage, const std::string& says) {
    write_parts(damage);
    expect_refused(folder_, says);
  };
  const std::string name = state_[0].first;
  refused([](json* j) { *j = json::array(); }, "index.json: want an object \"weight_map\"");
  refused([](json* j) { j->erase("weight_map"); }, "index.json: want an object \"weight_map\"");
  refused([&](json* j) { (*j)["weight_map"][name] = 7; }, "want the name of a file beside it");
  refused([&](json* j) { (*j)["weight_map"][name] = "../x"; }, "want the name of a file beside it");
  refused([&](json* j) { (*j)["weight_map"][name] = "none.safetensors"; }, "none.safetensors");
  refused([&](json* j) { (*j)["weight_map"][name] = kParts[1]; }, name);
  refused([&](json* j) { (*j)["weight_map"].erase(name); },
          name + " of " + kParts[0] + " is not listed");
}

TEST_F(ForeignWeights, TypesThatAreNone) {
  state_[0].second = Tensor::zeros(state_[0].second.shape(), DType::i32);
  save_safetensors(folder_ + "/model.safetensors", state_);
  expect_refused(folder_, "model: load_state_dict: (.|\n)*is i32, want a float type");
}

}  // namespace
}  // namespace ebb::testing
