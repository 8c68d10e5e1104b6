// Rows of the sigmoid forget gate and of the running log-sum-exp.
#include <cmath>

#include "ops/forget_gate.h"
#include "ops/log_cumsum_exp.h"
#include "tests/op_table.h"
#include "tests/reference/decay.h"

namespace ebb::testing {
namespace {

struct GateCase {
  std::string name = {};
  Shape shape = {};
  bool bias = false, lower = false;
  double divisor = 1, spread = 1, most = 0.9;
  int64_t channels = 0;  // 0: the last dimension
};

OpCase gate_case(Draw& draw, const GateCase& s) {
  OpCase c;
  c.name = s.name;
  const int64_t channels = s.channels ? s.channels : s.shape.back();
  const auto when = [](bool on, Tensor t) { return on ? t : Tensor(); };
  c.inputs = {
      {"z", draw.normal(s.shape, s.spread)},
      {.name = "bias", .value = when(s.bias, draw.normal({channels}, 2)), .parameter = true},
      {.name = "lower",
       .value = when(s.lower, draw.uniform({channels}, 0.05, s.most)),
       .parameter = true}};
  c.run = [s](std::span<const Var> in) {
    return std::vector{
        forget_gate(in[0], {.bias = in[1], .lower_bound = in[2], .divisor = s.divisor})};
  };
  c.reference = [s, channels](std::span<const Tensor> in) {
    return std::vector{reference::forget_gate(in[0], in[1], in[2], s.divisor, channels)};
  };
  c.jacobian = s.shape.numel() <= 12;
  return c;
}

std::vector<OpError> gate_errors() {
  const auto e = [](const char* name, const char* pattern, const Tensor& z,
                    const ForgetGateOptions& options) {
    return OpError{name, [z, options] { forget_gate(z, options); },
                   std::string("^forget_gate: ") + pattern};
  };
  return {
      e("undefined", "z is undefined", {}, {}),
      e("bias", "bias is \\[3\\], z \\[2,4\\]; want", Tensor::zeros({2, 4}),
        {.bias = Tensor::zeros({3})}),
      e("lower", "lower_bound is \\[5\\], z \\[2,4\\]; want", Tensor::zeros({2, 4}),
        {.bias = Tensor::zeros({4}), .lower_bound = Tensor::zeros({5})}),
      e("dtype", "bias \\[4\\] is bf16; gate parameters stay f32", Tensor::zeros({2, 4}),
        {.bias = Tensor::zeros({4}, DType::bf16)}),
      e("divisor", "divisor is 0, want > 0", Tensor::zeros({2, 4}), {.divisor = 0}),
  };
}

struct ScanCase {
  std::string name = {};
  int64_t batch = 1, time = 1, channels = 4;
  bool z0 = false, final = true;
  std::vector<int64_t> cu = {};
  double spread = 1, slope = 0;
};

OpCase scan_case(Draw& draw, const ScanCase& s) {
  OpCase c;
  c.name = s.name;
  const int64_t n = s.cu.empty() ? s.batch : int64_t(s.cu.size()) - 1;
  const Tensor u = draw.normal({s.batch, s.time, s.channels}, s.spread);
  for (int64_t i = 0; i < u.numel(); ++i)
    u.data<double>()[i] += s.slope * double(i / s.channels % std::max<int64_t>(s.time, 1));
  c.inputs = {
      {"u", u},
      {.name = "z0", .value = s.z0 ? draw.normal({n, s.channels}) : Tensor(), .parameter = true}};
  c.run = [s](std::span<const Var> in) {
    LogCumsumExpOptions options{.want_final = s.final};
    if (!s.cu.empty()) options.layout = SeqLayout::packed(s.cu, in[0].device());
    const LogCumsumExp r = log_cumsum_exp(in[0], in[1], options);
    std::vector<Var> out{r.k, r.g};
    if (s.final) out.push_back(r.z);
    return out;
  };
  c.reference = [s](std::span<const Tensor> in) {
    std::vector<Tensor> out = reference::log_cumsum_exp(in[0], in[1], s.cu);
    if (!s.final) out.pop_back();
    return out;
  };
  c.jacobian = s.batch * s.time * s.channels <= 12;
  return c;
}

std::vector<OpError> scan_errors() {
  const auto e = [](const char* name, const char* pattern, const Tensor& u, const Tensor& z0,
                    const LogCumsumExpOptions& options = {}) {
    return OpError{name, [u, z0, options] { log_cumsum_exp(u, z0, options); },
                   std::string("^log_cumsum_exp: ") + pattern};
  };
  return {
      e("shape", "u is \\[4,3\\], want \\[B,T,C\\]", Tensor::zeros({4, 3}), {}),
      e("z0", "z0 is \\[1,3\\], want \\[2,3\\]", Tensor::zeros({2, 4, 3}), Tensor::zeros({1, 3})),
      e("z0_dtype", "z0 is bf16, want f32 beside f32", Tensor::zeros({2, 4, 3}),
        Tensor::zeros({2, 3}, DType::bf16)),
      e("layout", "cu_seqlens ends at 3, the input has 2x4 tokens", Tensor::zeros({2, 4, 3}), {},
        {.layout = SeqLayout::packed({0, 3})}),
  };
}

}  // namespace

std::vector<OpRow> decay_rows(Draw& draw) {
  OpRow gate{.op = "forget_gate", .errors = gate_errors()};
  for (const GateCase& s : std::vector<GateCase>{
           {.name = "plain", .shape = {2, 17, 24}},
           {.name = "gla", .shape = {2, 33, 2, 16}, .divisor = 16},
           {.name = "tiny", .shape = {2, 3}, .bias = true, .lower = true},
           {.name = "bias", .shape = {1, 40, 20}, .bias = true},
           {.name = "bias_heads", .shape = {2, 19, 3, 8}, .bias = true, .channels = 24},
           {.name = "lower", .shape = {2, 21, 32}, .lower = true},
           {.name = "lower_heads", .shape = {2, 600, 2, 16}, .lower = true, .channels = 32},
           {.name = "all", .shape = {1, 50, 7}, .bias = true, .lower = true, .divisor = 3},
           {.name = "steep", .shape = {1, 200, 8}, .spread = 30},
           {.name = "steep_lower", .shape = {1, 200, 8}, .lower = true, .spread = 30},
           {.name = "near_one", .shape = {1, 64, 8}, .lower = true, .most = 0.999},
           {.name = "empty", .shape = {2, 0, 8}, .bias = true, .lower = true},
       })
    gate.cases.push_back(gate_case(draw, s));
  OpRow scan{.op = "log_cumsum_exp", .errors = scan_errors()};
  for (const ScanCase& s : std::vector<ScanCase>{
           {.name = "t1", .batch = 2, .z0 = true},
           {.name = "tiny", .time = 3, .channels = 2, .z0 = true},
           {.name = "fresh", .batch = 2, .time = 40, .channels = 16},
           {.name = "started", .batch = 2, .time = 65, .channels = 7, .z0 = true},
           {.name = "long", .time = 700, .channels = 33, .z0 = true},
           {.name = "nofinal", .time = 130, .channels = 8, .final = false},
           {.name = "packed",
           .batch = 2,
           .time = 100,
           .channels = 9,
           .final = false,  // z of an empty sequence is −inf
            .cu = {0, 0, 1, 66, 66, 195, 200}},
           {.name = "packed_started",
           .time = 150,
           .channels = 16,
           .z0 = true,
           .cu = {0, 70, 70, 150}},
           {.name = "rising", .time = 200, .channels = 8, .z0 = true, .slope = 2},
           {.name = "falling", .time = 200, .channels = 8, .z0 = true, .slope = -2},
           {.name = "spread", .time = 150, .channels = 16, .spread = 20},
           {.name = "empty", .batch = 2, .time = 0, .z0 = true},
       })
    scan.cases.push_back(scan_case(draw, s));
  return {gate, scan};
}

}  // namespace ebb::testing
