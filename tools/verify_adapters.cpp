// The golden operators in terms of ebb's: names and layouts of the golden files on one side, our
// functions on the other. A new operator is one function and one line in the list.
#include "ops/rms_norm.h"
#include "tools/verify_case.h"

namespace ebb::tools {
namespace {

CaseOutputs run_rms_norm(const CaseInputs& in) {
  const float eps = float(in.number("eps"));
  if (!in["residual"]) return {{"y", rms_norm(in["x"], in["weight"], eps)}};
  const AddRmsNorm r = add_rms_norm(in["x"], in["residual"], in["weight"], eps);
  return {{"y", r.y}, {"res_out", r.u}};
}

}  // namespace

const std::vector<Adapter>& adapters() {
  static const std::vector<Adapter> list = {
      {"rms_norm", run_rms_norm, {"weight"}},
  };
  return list;
}

}  // namespace ebb::tools
