// The golden operators in terms of ebb's: names and layouts of the golden files on one side, our
// functions on the other. A new operator is one function and one line in the list.
#include "ops/causal_conv1d.h"
#include "ops/delta_rule.h"
#include "ops/rms_norm.h"
#include "tools/verify_case.h"

namespace ebb::tools {
namespace {

CaseOutputs run_gated_delta_rule(const CaseInputs& in) {
  const DeltaRuleOutput r =
      gated_delta_rule(in["q"], in["k"], in["v"], in["g"], in["beta"], in["h0"],
                       {.scale = in.number("scale"), .want_final_state = true});
  return {{"o", r.o}, {"ht", r.ht}};
}

CaseOutputs run_rms_norm(const CaseInputs& in) {
  const float eps = float(in.number("eps"));
  if (!in["residual"]) return {{"y", rms_norm(in["x"], in["weight"], eps)}};
  const AddRmsNorm r = add_rms_norm(in["x"], in["residual"], in["weight"], eps);
  return {{"y", r.y}, {"res_out", r.u}};
}

CaseOutputs run_short_conv(const CaseInputs& in) {
  const bool silu = in.text("activation") == "silu";
  const CausalConv1d r = causal_conv1d(
      in["x"], in["weight"], in["bias"], in["cache"],
      {.activation = silu ? ConvActivation::silu : ConvActivation::none, .final_state = true});
  return {{"y", r.y}, {"cache_out", r.final_state}};
}

}  // namespace

const std::vector<Adapter>& adapters() {
  static const std::vector<Adapter> list = {
      {"gated_delta_rule", run_gated_delta_rule, {"g", "beta", "h0"}},
      {"rms_norm", run_rms_norm, {"weight"}},
      {"short_conv", run_short_conv, {"weight", "bias", "cache"}},
  };
  return list;
}

}  // namespace ebb::tools
