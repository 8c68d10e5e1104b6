// Rows of the normalisations.
#include <cmath>

#include "ops/rms_norm.h"
#include "tests/op_table.h"
#include "tests/reference/norm.h"

namespace ebb::testing {

std::vector<OpRow> norm_rows(Draw& draw) {
  OpRow rms{.op = "rms_norm", .cases = {}, .errors = {}};
  for (const Shape& s : {Shape{3, 5}, Shape{2, 7, 64}, Shape{131, 33}, Shape{0, 8}, Shape{4, 1}}) {
    OpCase c;
    c.name = "d" + std::to_string(s.back()) + "_n" + std::to_string(s.first(s.size() - 1).numel());
    // With d = 1 the gradient is w·ε·r³·dy, which is what cancellation leaves of 1 − x²r²: ε of the
    // order of x² keeps it well conditioned.
    const float eps = s.back() == 1 ? 0.5f : 1e-5f;
    c.inputs = {{"x", draw.normal(s)},
                {.name = "w", .value = draw.normal({s.back()}, 0.3, 1), .parameter = true}};
    c.run = [eps](std::span<const Var> in) { return std::vector{rms_norm(in[0], in[1], eps)}; };
    c.reference = [eps](std::span<const Tensor> in) {
      return std::vector{reference::rms_norm(in[0], in[1], double(eps))};
    };
    c.jacobian = s.numel() <= 15;
    rms.cases.push_back(c);
  }
  OpCase add;
  add.name = "residual";
  add.inputs = {{"x", draw.normal({2, 9, 24})},
                {"residual", draw.normal({2, 9, 24})},
                {.name = "w", .value = draw.normal({24}, 0.3, 1), .parameter = true}};
  add.run = [](std::span<const Var> in) {
    const AddRmsNorm r = add_rms_norm(in[0], in[1], in[2], 1e-6f);
    return std::vector{r.y, r.u};
  };
  add.reference = [](std::span<const Tensor> in) {
    const Tensor u = reference::add(in[0], in[1]);
    return std::vector{reference::rms_norm(u, in[2], double(1e-6f)), u};
  };
  rms.cases.push_back(add);
  rms.errors = {
      {"width",
       [] {
         rms_norm(Tensor::zeros({2, 3}), Tensor::zeros({4}), 1e-5f);
       },
       "^rms_norm: w is \\[4\\], x is \\[2,3\\]"},
      {"dtype",
       [] {
         rms_norm(Tensor::zeros({2, 3}, DType::i64), Tensor::zeros({3}), 1e-5f);
       },
       "^rms_norm: x \\[2,3\\] is i64"},
      {"residual",
       [] {
         add_rms_norm(Tensor::zeros({2, 3}), Tensor::zeros({3, 2}), Tensor::zeros({3}), 1e-5f);
       },
       "^add_rms_norm: residual is \\[3,2\\], x is \\[2,3\\]"},
  };
  return {rms};
}

}  // namespace ebb::testing
