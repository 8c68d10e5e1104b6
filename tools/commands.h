// The subcommands of `ebb`, one function each: it adds the subcommand with its options, examples
// and callback. tools/main.cpp lists them.
//   void add_verify(CLI::App& app) {
//     auto* c = add_command(app, "verify", "Check ...", "ebb verify tests/data");
//     auto o = std::make_shared<VerifyOptions>();
//     c->add_option("paths", o->paths, "...");
//     c->callback([o] { run_verify(*o); });
//   }
// A callback returns on success; it throws ebb::Error, or Exit after it has said itself what is
// wrong. Exit codes: 0 ok, 1 failure, 2 usage.
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "tensor/device.h"
#include "tensor/dtype.h"

namespace ebb::tools {

// ---- the subcommands ----
void add_bench(CLI::App& app);           // tools/bench_command.cpp
void add_bench_gemm(CLI::App& bench);    // tools/bench_gemm.cpp, a subcommand of bench
void add_bench_models(CLI::App& bench);  // tools/bench_models.cpp, likewise
void add_convert(CLI::App& app);         // tools/convert.cpp
void add_eval(CLI::App& app);            // tools/eval_command.cpp
void add_generate(CLI::App& app);        // tools/generate.cpp
void add_mqar(CLI::App& app);            // tools/mqar_command.cpp
void add_gradcheck(CLI::App& app);       // tools/gradcheck_command.cpp
void add_init(CLI::App& app);            // tools/init.cpp
void add_inspect(CLI::App& app);         // tools/inspect.cpp
void add_tokenize(CLI::App& app);        // tools/tokenize.cpp
void add_demo_data(CLI::App& app);       // tools/demo_data.cpp
void add_train(CLI::App& app);           // tools/train.cpp
void add_report(CLI::App& app);          // tools/report_command.cpp
void add_study(CLI::App& app);           // tools/study_command.cpp
void add_verify(CLI::App& app);          // tools/verify_command.cpp

inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;
struct Exit {
  int code = kExitFailure;
};
// Wrong use of the command line that CLI11 cannot see; one line, exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A subcommand with `examples` (one command a line) in its help.
CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& description,
                      const std::string& examples);

// Values of --device (auto: the first GPU, or else the CPU) and --dtype. Wrong words are usage
// errors; a GPU that is not there is an Error that says why.
Device usable_device(const std::string& text);
DType parse_dtype(const std::string& text, const std::vector<DType>& allowed);

std::string grouped(int64_t n);  // 103,789,528

// The candidate closest to `word` by edit distance, if close enough to be a typing error; else "".
std::string closest(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace ebb::tools
