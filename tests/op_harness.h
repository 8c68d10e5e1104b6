// Runs one case of the op table on a device and dtype, in the variations the suite asks about.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "tensor/compare.h"
#include "tests/op_table.h"

namespace ebb::testing {

struct RunOptions {
  Device device = {};
  DType dtype = DType::f64;       // of float inputs; parameters stay f32 beside bf16
  bool strided_inputs = false;    // inputs as views into larger, permuted buffers
  bool strided_upstream = false;  // upstream gradients likewise
  bool far_rows = false;          // both: the last row lies beyond element 2^31 (CPU)
  std::vector<bool> wanted = {};  // which inputs want gradients; empty: all differentiable
  uint64_t upstream_seed = 99;
};

struct RunResult {
  std::vector<Tensor> outputs;    // on the CPU, in the dtype they were produced in
  std::vector<Tensor> gradients;  // per input; undefined where none was wanted
};

// Input values as the run sees them (rounded to the dtype), widened to f64.
std::vector<Tensor> rounded_inputs(const OpCase& c, DType dtype);
RunResult run_case(const OpCase& c, const RunOptions& options);
// Outputs and gradients of the same rounded inputs and upstream gradients, in f64 on the CPU.
RunResult exact_case(const OpCase& c, DType rounding);

// The same values behind strides: permuted storage, a step of 2 in the last dimension, an offset.
Tensor strided_copy(const Tensor& t);
// The same values with rows (the last dimension) so far apart that the last one lies beyond element
// 2^31, in memory that is mapped but, between the rows, never touched. The tensor itself where it
// has only one row. Undefined when the system does not give that much address space.
Tensor far_copy(const Tensor& t);

// Fails the current test where limits are exceeded.
void expect_close(const std::string& what, const RunResult& got, const RunResult& want,
                  double output_limit, double gradient_limit);
void expect_bitwise(const std::string& what, const RunResult& a, const RunResult& b);

struct NamedCase {
  std::string op;
  OpCase c;
};
// Every case of the table, drawn from EBB_TEST_SEED (default 1).
const std::vector<NamedCase>& all_cases();
uint64_t test_seed();
std::string case_name(const NamedCase& n);
void PrintTo(const NamedCase& n, std::ostream* out);  // what gtest shows of a parameter

// Poison and red zones on for a scope; the zones of `device` are verified at the end.
class GuardedMemory {
 public:
  explicit GuardedMemory(Device device);
  ~GuardedMemory();

 private:
  Device device_;
};

}  // namespace ebb::testing
