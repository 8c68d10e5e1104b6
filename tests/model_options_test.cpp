// Options of public configs beside the golden folders' (a mixer without its convolution or gate,
// grouped heads, biases ...): small models whose values are another program's, in f64
// (tests/data/README.md); on the GPU: models_cuda_test.cpp.
#include <gtest/gtest.h>

#include <filesystem>

#include "models/checkpoint.h"
#include "tests/cli.h"
#include "tests/model_properties.h"

namespace ebb::testing {
namespace {

namespace fs = std::filesystem;

const std::string kOptions = std::string(EBB_TEST_DATA) + "/options";

class ModelOptions : public ::testing::TestWithParam<const char*> {
 protected:
  std::string folder() const { return kOptions + "/" + GetParam(); }
  // Hidden states, logits, loss, every gradient, greedy steps, and the folder written back equal.
  void verify(const std::string& options) const {
    fs::create_directories(scratch_.path() + "/models");
    fs::create_directory_symlink(folder(), scratch_.path() + "/models/" + GetParam());
    const CliResult r = run_ebb("verify " + scratch_.path() + " --strict " + options);
    EXPECT_EQ(r.code, 0) << r.out << r.err;
    EXPECT_NE(r.out.find("1 passed, 0 failed, 0 skipped"), std::string::npos) << r.out << r.err;
  }
  const ScratchFolder scratch_;
};

TEST_P(ModelOptions, EqualTheReferenceInF32) { verify(""); }
TEST_P(ModelOptions, EqualTheReferenceInF64) { verify("--dtype f64"); }

TEST_P(ModelOptions, PrefillAndStepEqualTheFullForward) {
  expect_prefill_and_step(*load_model(folder()));
}
TEST_P(ModelOptions, PackedDocumentsDoNotSeeEachOther) {
  expect_documents_apart(*load_model(folder()));
}

INSTANTIATE_TEST_SUITE_P(All, ModelOptions,
                         ::testing::Values("gdn_no_gate_no_conv", "kda_no_conv",
                                           "mamba2_groups_bias", "mamba2_norm_first",
                                           "mamba2_no_norm", "gla_shared_keys_conv",
                                           "gla_bare_norm", "retnet_shared_keys", "hgrn2_conv",
                                           "lightnet_conv", "rwkv7_l2warp_tied"));

}  // namespace
}  // namespace ebb::testing
