// The command line of `ebb gradcheck`.
#include <cstdlib>
#include <memory>

#include "tools/commands.h"
#include "tools/gradcheck.h"
#include "tools/result_file.h"

namespace ebb::tools {

void add_gradcheck(CLI::App& app) {
  CLI::App* c = add_command(app, "gradcheck",
                            "Check every operator's gradients against finite differences (f64)",
                            "ebb gradcheck\n"
                            "ebb gradcheck --filter '^delta_rule/' --seed 7 --jacobian");
  auto o = std::make_shared<GradcheckCommand>();
  auto json = std::make_shared<std::string>();
  c->add_option("--filter", o->filter,
                "Only cases whose 'operator/case' matches this regular expression");
  c->add_option("--seed", o->seed, "Seed of inputs and directions")->capture_default_str();
  c->add_option("--directions", o->directions, "Random directions per input")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  c->add_option("--tolerance", o->tolerance, "Largest relative error (default: each case's own)")
      ->check([](const std::string& text) {
        const double v = std::strtod(text.c_str(), nullptr);
        return v > 0 && v < 1 ? "" : "'" + text + "' is not between 0 and 1";
      });
  c->add_flag("--jacobian", o->jacobian, "Also element by element, where inputs are small");
  c->add_flag("--failures-only", o->failures_only, "Print only what fails");
  c->add_option("--json", *json, "Also write the results to this file");
  c->callback([o, json] {
    nlohmann::json cases;
    check_result_path(*json);
    const int code = run_gradcheck(*o, &cases);
    if (!json->empty()) {
      nlohmann::json result = result_header("gradcheck", Device::cpu());
      result["seed"] = o->seed;
      result["cases"] = cases;
      write_result(*json, result);
    }
    if (code) throw Exit{code};
  });
}

}  // namespace ebb::tools
