// The table behind the generated op suite, `ebb gradcheck` and the sanitizer runs: one row per
// operator, each with small cases that cover its contract. From a row the suite generates: values
// against the plain reference, f64 gradient check, f32 and bf16 on CPU and CUDA in both passes,
// strided inputs and upstream gradients, every subset of wanted gradients, poisoned memory and red
// zones, bitwise reruns, error texts.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "autograd/gradcheck.h"
#include "autograd/var.h"

namespace ebb::testing {

struct OpInput {
  std::string name = {};
  Tensor value = {};           // f64 or integer, on the CPU; undefined: an absent optional input
  bool differentiable = true;  // ignored for integers
  bool parameter = false;      // stays f32 beside bf16 activations (norm weights, gates, states)
};

struct OpCase {
  std::string name = {};  // letters, digits, '_'
  std::vector<OpInput> inputs = {};
  // The operator, on whatever device and dtype the inputs have.
  std::function<std::vector<Var>(std::span<const Var>)> run;
  // The plain formula in f64, token by token; an undefined output is not compared.
  std::function<std::vector<Tensor>(std::span<const Tensor>)> reference;
  // Limits on ‖out − ref‖/‖ref‖ of outputs and of gradients (design.md 5).
  double f64_limit = 1e-10;
  double f32_output = 2e-5, f32_gradient = 2e-5;
  double bf16_output = 8e-3, bf16_gradient = 1.5e-2;
  double gradcheck_tolerance = 1e-6;
  bool gradients = true;  // false: no backward pass (integer results, optimizers)
  bool cuda = true, bf16 = true;
  bool jacobian = false;  // small enough for the full Jacobian
};

struct OpError {
  std::string name;
  std::function<void()> run;  // must throw ebb::Error
  std::string pattern;        // regular expression the message matches; names the op
};

struct OpRow {
  std::string op;  // as in cmake/ops.cmake
  std::vector<OpCase> cases = {};
  std::vector<OpError> errors = {};
};

// The case's gradients against finite differences. Float inputs marked as passing no gradient are
// held fixed, as integers are.
GradcheckResult gradcheck_case(const OpCase& c, const GradcheckOptions& options);

// All rows, with inputs drawn from `seed`.
std::vector<OpRow> op_table(uint64_t seed);

// Random inputs for rows: f64, N(0,1)·scale.
class Draw {
 public:
  // Streams are independent: cases added to one do not change the numbers of another.
  explicit Draw(uint64_t seed, uint64_t stream = 0) : seed_(seed), next_(stream << 32) {}
  Tensor normal(const Shape& shape, double scale = 1, double mean = 0);
  Tensor uniform(const Shape& shape, double low, double high);
  Tensor integers(const Shape& shape, int64_t low, int64_t high);  // in [low, high)

 private:
  uint64_t seed_, next_;
};

// Rows by family, one function per file in tests/op_rows.
std::vector<OpRow> attention_rows(Draw& draw);
std::vector<OpRow> conv_rows(Draw& draw);
std::vector<OpRow> decay_rows(Draw& draw);
std::vector<OpRow> delta_rule_rows(Draw& draw);
std::vector<OpRow> delta_rule_channel_rows(Draw& draw);
std::vector<OpRow> dplr_rows(Draw& draw);
std::vector<OpRow> elementwise_rows(Draw& draw);
std::vector<OpRow> gate_rows(Draw& draw);
std::vector<OpRow> linear_attention_rows(Draw& draw);
std::vector<OpRow> loss_rows(Draw& draw);
std::vector<OpRow> matmul_rows(Draw& draw);
std::vector<OpRow> movement_rows(Draw& draw);
std::vector<OpRow> norm_rows(Draw& draw);
std::vector<OpRow> optimizer_rows(Draw& draw);
std::vector<OpRow> reduce_rows(Draw& draw);
std::vector<OpRow> state_memory_attention_rows(Draw& draw);

}  // namespace ebb::testing
