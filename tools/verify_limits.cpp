#include "tools/verify_limits.h"

#include <algorithm>
#include <array>
#include <vector>

#include "tensor/check.h"

namespace ebb::tools {
namespace {

struct Exception {
  const char* case_name;
  Limits limits;
};
struct Line {
  const char* op;
  Limits limits;
  std::vector<Exception> exceptions = {};
};

const std::vector<Line>& table() {
  static const std::vector<Line> lines = {
      {"channel_mix", {1e-6, 2e-6}},
      {"cross_entropy", {1e-6, 2e-6}},
      {"gated_delta_rule", {1e-5, 2e-5}, {{"decay_mixed", {5e-5, 1e-4}}}},
      {"gated_rms_norm", {1e-6, 2e-6}},
      {"gdn2", {1e-5, 2e-5}, {{"decay_mixed", {5e-5, 1e-4}}, {"decay_near_zero", {1e-5, 1e-4}}}},
      {"gdn_gate", {1e-6, 2e-6}},
      {"gla", {5e-6, 1e-5}},
      {"group_norm", {1e-6, 2e-6}},
      {"kda", {1e-5, 2e-5}, {{"decay_mixed", {5e-5, 1e-4}}}},
      {"kda_gate", {1e-6, 2e-6}},
      {"l2_norm", {1e-6, 2e-6}},
      {"layer_norm", {1e-6, 2e-6}},
      {"mamba2_gated_rms_norm", {1e-6, 2e-6}},
      {"rms_norm", {1e-6, 2e-6}},
      {"rope_attention", {1e-6, 2e-6}},
      {"rotary", {1e-6, 2e-6}},
      {"rwkv7", {5e-6, 1e-5}},
      {"short_conv", {1e-6, 2e-6}},
      {"simple_gla", {5e-6, 1e-5}},
      {"sma", {1e-5, 2e-5}},
      {"ssd", {1e-5, 2e-5}, {{"small_dt", {1e-5, 5e-5}}}},
      {"swiglu", {1e-6, 2e-6}},
      {"token_shift", {1e-6, 2e-6}},
  };
  return lines;
}

// By its name or, for a case of another name, by the kind of its decays.
bool is_case(const std::string& name, const std::string& case_name, const std::string& decay) {
  return name == case_name || (name == "decay_mixed" && decay == "mixed") ||
         (name == "decay_near_zero" && decay == "zero");
}

}  // namespace

Limits golden_limits(const std::string& op, const std::string& case_name,
                     const std::string& decay) {
  for (const Line& line : table()) {
    if (line.op != op) continue;
    for (const Exception& e : line.exceptions)
      if (is_case(e.case_name, case_name, decay)) return e.limits;
    return line.limits;
  }
  fail("operator {} has no limits in the table of golden cases", op);
}

ModelLimits model_limits(const std::string& model_type, DType dtype) {
  if (dtype == DType::bf16) return {3e-2, 3e-2, 0.12, 0.12};
  return {model_type == "kda" ? 2e-5 : 1e-5, 1e-6, 5e-5, 1e-4};
}

bool measured_against_cancellation(const std::string& op, const std::string& case_name,
                                   const std::string& decay, const std::string& tensor) {
  constexpr std::array ops = {"gated_delta_rule", "kda", "gdn2", "gla", "simple_gla"};
  return tensor == "grad.g" && is_case("decay_near_zero", case_name, decay) &&
         std::find(ops.begin(), ops.end(), op) != ops.end();
}

}  // namespace ebb::tools
