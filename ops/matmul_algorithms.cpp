#include "ops/matmul_algorithms.h"

#include <atomic>
#include <nlohmann/json.hpp>

#include "ops/matmul.h"
#include "tensor/check.h"
#include "tensor/json_text.h"

namespace ebb {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "ebb matmul algorithms 1";

std::atomic<bool> autotune{false};

int64_t library_version() {
  if constexpr (kWithCuda) return gpu::cublaslt_version();
  return 0;
}

MatmulAlgorithm parse(const json& entry) {
  MatmulAlgorithm a;
  a.gpu = entry.at("gpu").get<std::string>();
  for (int i = 0; i < GemmKey::fields; ++i)
    a.key.v[size_t(i)] = entry.at(kGemmKeyNames[i]).get<int64_t>();
  a.bytes = entry.at("algorithm").get<std::string>();
  a.workspace = entry.at("workspace").get<int64_t>();
  check(a.workspace >= 0, "matmul algorithms: workspace {} is negative", a.workspace);
  check(a.bytes.find_first_not_of("0123456789abcdef") == std::string::npos,
        "matmul algorithms: '{}' is not lower-case hexadecimal", a.bytes);
  return a;
}

}  // namespace

void set_matmul_autotune(bool on) { autotune = on; }
bool matmul_autotune() { return autotune; }

std::string matmul_algorithms_json() {
  json list = json::array();
  if constexpr (kWithCuda)
    for (const MatmulAlgorithm& a : gpu::matmul_algorithms()) {
      json entry = {{"gpu", a.gpu}, {"algorithm", a.bytes}, {"workspace", a.workspace}};
      for (int i = 0; i < GemmKey::fields; ++i) entry[kGemmKeyNames[i]] = a.key.v[size_t(i)];
      list.push_back(entry);
    }
  return json{{"format", kFormat}, {"cublaslt", library_version()}, {"algorithms", list}}.dump(1);
}

LoadedAlgorithms load_matmul_algorithms(const std::string& text) {
  LoadedAlgorithms result;
  try {
    const json j = parse_json(text, "matmul algorithms");
    const std::string format = j.at("format").get<std::string>();
    check(format == kFormat, "matmul algorithms: format is '{}', want '{}'", format, kFormat);
    const bool usable = kWithCuda && j.at("cublaslt").get<int64_t>() == library_version();
    std::vector<MatmulAlgorithm> all;
    for (const json& entry : j.at("algorithms")) all.push_back(parse(entry));
    (usable ? result.loaded : result.foreign) = int64_t(all.size());
    if constexpr (kWithCuda)
      if (usable)
        for (const MatmulAlgorithm& a : all) gpu::add_matmul_algorithm(a);
  } catch (const json::exception& e) {
    fail("matmul algorithms: {}", json_problem(e));
  }
  return result;
}

}  // namespace ebb
