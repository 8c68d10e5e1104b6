// The C++ examples do what they say.
#include <gtest/gtest.h>

#include <cmath>
#include <regex>

#include "models/calibrate.h"
#include "models/checkpoint.h"
#include "tensor/compare.h"
#include "tensor/file.h"
#include "tests/cli.h"
#include "tests/model_folder.h"

namespace ebb::testing {
namespace {

CliResult run_example(const std::string& name, const std::string& arguments) {
  return run_program(std::string(EBB_EXAMPLES) + "/" + name, arguments);
}

std::vector<double> numbers_after(const std::string& text, const std::string& word) {
  std::vector<double> out;
  const std::regex number(word + " ([-+.e0-9]+)");
  for (std::sregex_iterator i(text.begin(), text.end(), number), end; i != end; ++i)
    out.push_back(std::stod((*i)[1]));
  return out;
}

TEST(Examples, TrainModelLearnsSavesAndWrites) {
  const ScratchFolder scratch;
  const std::string text = scratch.path() + "/text.txt", out = scratch.path() + "/model";
  write_file_atomically(text, some_text(20000));
  const CliResult r = run_example("train_model", text + " " + out + " 40");
  ASSERT_EQ(r.code, 0) << r.err;
  const std::vector<double> losses = numbers_after(r.out, "loss");
  ASSERT_EQ(losses.size(), 3u) << r.out;
  EXPECT_NEAR(losses.front(), std::log(257.0), 0.3);
  EXPECT_LT(losses.back(), 0.7 * losses.front());
  EXPECT_NE(r.out.find("\nThe "), std::string::npos);
  EXPECT_EQ(load_model(out)->config().num_hidden_layers, 2);
  EXPECT_EQ(Tokenizer::load(out).vocab_size(), 257);
  EXPECT_EQ(run_example("train_model", text).code, 2);
  const CliResult missing = run_example("train_model", scratch.path() + "/none " + out);
  EXPECT_EQ(missing.code, 1);
  EXPECT_NE(missing.err.find("/none"), std::string::npos) << missing.err;
}

TEST(Examples, CustomOpPassesItsGradientCheck) {
  const CliResult r = run_example("custom_op", "");
  EXPECT_EQ(r.code, 0) << r.err;
  const std::vector<double> errors =
      numbers_after(r.out, "gradients right, largest relative error");
  ASSERT_EQ(errors.size(), 1u) << r.out;
  EXPECT_GT(errors[0], 0);
  EXPECT_LE(errors[0], 1e-6);
  EXPECT_NE(r.out.find("d(sum y)/dw = "), std::string::npos) << r.out;
}

TEST(Examples, CalibrateReachesItsTargetsAndKeepsTheOtherWeights) {
  const ScratchFolder scratch;
  const std::string text = scratch.path() + "/text.txt", from = scratch.path() + "/model",
                    to = scratch.path() + "/calibrated";
  write_file_atomically(text, some_text(4 * 512));
  save_small_model(from);
  const CliResult r = run_example("calibrate", from + " " + text + " " + to + " 64");
  ASSERT_EQ(r.code, 0) << r.err;
  const auto before = load_model(from), after = load_model(to);
  const StateDict a = before->state_dict(), b = after->state_dict();
  for (size_t i = 0; i < a.size(); ++i) {
    const bool gate = a[i].first.ends_with("A_log") || a[i].first.ends_with("dt_bias");
    EXPECT_NE(bitwise_equal(a[i].second, b[i].second), gate) << a[i].first;
  }
  std::vector<int64_t> ids = Tokenizer::load(to).encode(read_file(text));
  const auto heads = measure_gates(*after, Tensor::from(ids, {4, 512}));
  ASSERT_EQ(heads.size(), 4u);
  for (const HeadReport& h : heads) EXPECT_NEAR(h.timescale / (h.head == 0 ? 64 : 1), 1, 1e-4);
  write_file_atomically(text, some_text(100));
  const CliResult few = run_example("calibrate", from + " " + text + " " + to);
  EXPECT_EQ(few.code, 1);
  EXPECT_NE(few.err.find("has 100 tokens, want 2048"), std::string::npos) << few.err;
}

}  // namespace
}  // namespace ebb::testing
