#include "tools/version.h"

#include <cblas.h>
#include <fmt/format.h>

#include <sstream>

#include "build_info.h"
#include "commit.h"
#include "tensor/device.h"

namespace ebb::tools {
namespace {

std::string blas_text() {
#ifdef OPENBLAS_VERSION
  return openblas_get_config();
#else
  return EBB_BLAS;
#endif
}

std::string cuda_text() {
  if constexpr (!kWithCuda) return "no (built without; configure with -DEBB_CUDA=ON)";
  const int gpus = cuda_device_count();
  return fmt::format("yes, toolkit {}, built for {}; {}", EBB_CUDA_VERSION, EBB_CUDA_ARCHS,
                     gpus ? fmt::format("{} GPU{}", gpus, gpus > 1 ? "s" : "")
                          : "no GPU here: " + cuda_unavailable_reason());
}

std::string list_text(const std::string& title, const std::string& semicolons) {
  std::string out;
  std::istringstream items(semicolons);
  for (std::string item; std::getline(items, item, ';');)
    out += fmt::format("{:<12} {}\n", out.empty() ? title : "", item);
  return out.empty() ? fmt::format("{:<12} none\n", title) : out;
}

}  // namespace

std::string version_number() { return EBB_VERSION; }
std::string commit() { return EBB_COMMIT; }

std::string version_text() {
  const std::string sanitizers = EBB_SANITIZERS;
  std::string out = fmt::format("ebb {} ({})\n", EBB_VERSION, EBB_COMMIT);
  out += fmt::format("{:<12} {}, {}{}{}\n", "build", EBB_COMPILER, EBB_BUILD_TYPE,
                     *EBB_MARCH ? ", -march=" EBB_MARCH : "",
                     sanitizers.empty() ? "" : ", sanitizers " + sanitizers);
  out += fmt::format("{:<12} {}\n", "CUDA", cuda_text());
  out += fmt::format("{:<12} {}\n", "BLAS", blas_text());
  out += "Optional libraries, by the feature that wants them:\n";
  out += list_text("found", EBB_OPTIONAL_FOUND);
  out += list_text("missing", EBB_OPTIONAL_MISSING);
  out.pop_back();
  return out;
}

}  // namespace ebb::tools
