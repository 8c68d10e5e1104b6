// The golden operators in terms of ebb's: names and layouts of the golden files on one side, our
// functions on the other. A new operator is one function and one line in the list.
#include <algorithm>

#include "ops/attention.h"
#include "ops/causal_conv1d.h"
#include "ops/channel_mix.h"
#include "ops/cross_entropy.h"
#include "ops/decay_gate.h"
#include "ops/delta_rule.h"
#include "ops/delta_rule_channel.h"
#include "ops/dplr.h"
#include "ops/gated_linear_attention.h"
#include "ops/gated_rms_norm.h"
#include "ops/l2_norm.h"
#include "ops/layer_norm.h"
#include "ops/matmul.h"
#include "ops/movement.h"
#include "ops/rms_norm.h"
#include "ops/rotary.h"
#include "ops/sigmoid_gate.h"
#include "ops/ssd.h"
#include "ops/state_memory_attention.h"
#include "ops/swiglu.h"
#include "ops/token_shift.h"
#include "tools/verify_case.h"

namespace ebb::tools {
namespace {

CaseOutputs run_channel_mix(const CaseInputs& in) {
  return {{"y", channel_mix(in["x"], in["x_k"], in["key"], in["value"], in["last"]).y}};
}

CaseOutputs run_cross_entropy(const CaseInputs& in) {
  const CrossEntropy r =
      cross_entropy(in["logits"], in["labels"].value(), {.ignore_index = in.whole("ignore_index")});
  return {{"loss", r.loss}, {"token_loss", r.token_loss}, {"lse", r.lse}};
}

CaseOutputs run_gated_delta_rule(const CaseInputs& in) {
  const DeltaRuleOutput r =
      gated_delta_rule(in["q"], in["k"], in["v"], in["g"], in["beta"], in["h0"],
                       {.scale = in.number("scale"), .want_final_state = true});
  return {{"o", r.o}, {"ht", r.ht}};
}

CaseOutputs run_gated_rms_norm(const CaseInputs& in) {
  const GateAct act = in.text("activation") == "sigmoid" ? GateAct::sigmoid : GateAct::silu;
  return {{"y", gated_rms_norm(in["x"], in["gate"], in["weight"],
                               {.eps = float(in.number("eps")), .act = act})}};
}

CaseOutputs run_gdn2(const CaseInputs& in) {
  const DeltaRuleOutput r = gdn2(in["q"], in["k"], in["v"], in["g"], in["b"], in["w"], in["h0"],
                                 {.scale = in.number("scale"), .want_final_state = true});
  return {{"o", r.o}, {"ht", r.ht}};
}

CaseOutputs run_kda(const CaseInputs& in) {
  const DeltaRuleOutput r = kda(in["q"], in["k"], in["v"], in["g"], in["beta"], in["h0"],
                                {.scale = in.number("scale"), .want_final_state = true});
  return {{"o", r.o}, {"ht", r.ht}};
}

CaseOutputs run_gdn_gate(const CaseInputs& in) {
  return {{"g", decay_gate(in["a"], in["A_log"], in["dt_bias"])}, {"beta", sigmoid_gate(in["b"])}};
}

CaseOutputs run_kda_gate(const CaseInputs& in) {
  const double bound = in.has("lower_bound") ? in.number("lower_bound") : 0;
  return {{"g", decay_gate(in["a"], in["A_log"], in["dt_bias"], {.lower_bound = bound})}};
}

CaseOutputs run_group_norm(const CaseInputs& in) {
  return {{"y", group_norm(in["x"], in["weight"], in["bias"], in.whole("groups"),
                           float(in.number("eps")))}};
}

CaseOutputs run_l2_norm(const CaseInputs& in) {
  return {{"y", l2_norm(in["x"], float(in.number("eps")))}};
}

CaseOutputs run_layer_norm(const CaseInputs& in) {
  return {{"y", layer_norm(in["x"], in["weight"], in["bias"], float(in.number("eps")))}};
}

CaseOutputs run_mamba2_gated_rms_norm(const CaseInputs& in) {
  return {{"y", gated_rms_norm(in["x"], in["z"], in["weight"],
                               {.eps = float(in.number("eps")),
                                .order = GateOrder::gate_first,
                                .groups = in.whole("groups")})}};
}

CaseOutputs run_rms_norm(const CaseInputs& in) {
  const float eps = float(in.number("eps"));
  if (!in["residual"]) return {{"y", rms_norm(in["x"], in["weight"], eps)}};
  const AddRmsNorm r = add_rms_norm(in["x"], in["residual"], in["weight"], eps);
  return {{"y", r.y}, {"res_out", r.u}};
}

CaseOutputs run_rope_attention(const CaseInputs& in) {
  const double base = in.number("rope_base");
  const Var q = rotary(in["q"], {.base = base, .offset = in.whole("q_position_offset")});
  const Var k = rotary(in["k"], {.base = base});
  const Attention r =
      attention(q, k, in["v"],
                {.scale = in.number("scale"), .window = in.has("window") ? in.whole("window") : 0});
  return {{"o", r.o}, {"lse", r.lse}};
}

CaseOutputs run_rotary(const CaseInputs& in) {
  return {{"y", rotary(in["x"],
                       {.base = in.number("rope_base"), .offset = in.whole("position_offset")})}};
}

// The bound of RWKV-7's decays is declared where the given ones keep it.
CaseOutputs run_rwkv7(const CaseInputs& in) {
  constexpr double kBound = -0.6066;
  const std::vector<double> w = in["w"].value().to(DType::f64, Device::cpu()).to_vector<double>();
  const bool bounded = std::all_of(w.begin(), w.end(), [](double x) { return x >= kBound; });
  const DplrOutput r = dplr(
      in["r"], in["w"], in["k"], in["v"], in["a"], in["b"], in["h0"],
      {.scale = in.number("scale"), .want_final_state = true, .lower_bound = bounded ? kBound : 0});
  return {{"o", r.o}, {"ht", r.ht}};
}

CaseOutputs run_short_conv(const CaseInputs& in) {
  const bool silu = in.text("activation") == "silu";
  const CausalConv1d r = causal_conv1d(
      in["x"], in["weight"], in["bias"], in["cache"],
      {.activation = silu ? ConvActivation::silu : ConvActivation::none, .final_state = true});
  return {{"y", r.y}, {"cache_out", r.final_state}};
}

// gla and simple_gla: a decay per channel or per head.
CaseOutputs run_gla(const CaseInputs& in) {
  const LinearAttentionOutput r =
      gated_linear_attention(in["q"], in["k"], in["v"], in["g"], in["h0"],
                             {.scale = in.number("scale"), .want_final_state = true});
  return {{"o", r.o}, {"ht", r.ht}};
}

// y and the memories come from the scan; of those, the golden ones are the complete runs.
CaseOutputs run_sma(const CaseInputs& in) {
  const int64_t chunk = in.whole("chunk"), batch = in["x"].size(0), time = in["x"].size(1);
  const LinearAttentionOutput scan = gated_linear_attention(
      in["c"], in["b"], in["x"], in["la"], {},
      {.want_final_state = true, .memory_chunk = chunk, .wide_contributions = true});
  const double eps = in.number("eps");
  const StateMemoryAttention r =
      state_memory_attention(in["q"], in["e"], in["c"], scan.contributions, chunk,
                             {.gate = in["gate"], .base = scan.o, .eps = eps, .eps_row = eps});
  Shape runs = scan.contributions.shape();
  runs[0] = (time + chunk - 1) / chunk;
  runs.insert(0, batch);
  return {{"y", r.o},
          {"r", r.r},
          {"lse", r.lse},
          {"mem", scan.contributions.value().view(runs).slice(1, 0, time / chunk)},
          {"ht", scan.ht}};
}

// The golden states are [B,H,P,N].
CaseOutputs run_ssd(const CaseInputs& in) {
  const Var h0 = in["h0"] ? transpose(in["h0"], 2, 3) : Var();
  const SsdOutput r = ssd(in["x"], in["dt"], in["A"], in["B"], in["C"], h0,
                          {.D = in["D"], .dt_bias = in["dt_bias"], .want_final_state = true});
  return {{"y", r.y}, {"ht", transpose(r.ht, 2, 3)}};
}

CaseOutputs run_swiglu(const CaseInputs& in) {
  const Var z = swiglu(in["gate"], in["up"]);
  return {{"y", in["down"] ? linear(z, in["down"]) : z}};
}

CaseOutputs run_token_shift(const CaseInputs& in) {
  return {{"delta", token_shift(in["x"], in["last"]).delta}};
}

}  // namespace

const std::vector<Adapter>& adapters() {
  static const std::vector<Adapter> list = {
      {"channel_mix", run_channel_mix, {"x_k"}},
      {"cross_entropy", run_cross_entropy},
      {"gated_delta_rule", run_gated_delta_rule, {"g", "beta", "h0"}},
      {"gated_rms_norm", run_gated_rms_norm, {"weight"}},
      {"gdn2", run_gdn2, {"g", "b", "w", "h0"}},
      {"gdn_gate", run_gdn_gate, {"A_log", "dt_bias"}},
      {"gla", run_gla, {"g", "h0"}},
      {"group_norm", run_group_norm, {"weight", "bias"}},
      {"kda", run_kda, {"g", "beta", "h0"}},
      {"kda_gate", run_kda_gate, {"A_log", "dt_bias"}},
      {"l2_norm", run_l2_norm},
      {"layer_norm", run_layer_norm, {"weight", "bias"}},
      {"mamba2_gated_rms_norm", run_mamba2_gated_rms_norm, {"weight"}},
      {"rms_norm", run_rms_norm, {"weight"}},
      {"rope_attention", run_rope_attention},
      {"rotary", run_rotary},
      {"rwkv7", run_rwkv7, {"w", "h0"}},
      {"short_conv", run_short_conv, {"weight", "bias", "cache"}},
      {"simple_gla", run_gla, {"g", "h0"}},
      {"sma", run_sma, {"la"}},
      {"ssd", run_ssd, {"A", "D", "dt", "dt_bias", "h0"}},
      {"swiglu", run_swiglu},
      {"token_shift", run_token_shift},
  };
  return list;
}

}  // namespace ebb::tools
