// The command line of `ebb bench`.
#include <fmt/format.h>

#include <memory>
#include <regex>

#include "ops/matmul.h"
#include "tensor/check.h"
#include "tensor/device_info.h"
#include "tools/bench.h"
#include "tools/commands.h"
#include "tools/result_file.h"

namespace ebb::tools {
namespace {

struct BenchOptions {
  std::string device = "cpu", dtype, filter, json;
  int repeats = 20;
  bool list = false;
};

bool runs_on(const BenchRow& row, Device device, DType dtype) {
  if (row.where == BenchRow::Where::cpu && device.is_cuda()) return false;
  if (row.where == BenchRow::Where::cuda && !device.is_cuda()) return false;
  return row.dtypes.empty() ||
         std::find(row.dtypes.begin(), row.dtypes.end(), dtype) != row.dtypes.end();
}

std::vector<const BenchRow*> chosen_rows(const std::string& filter, Device device, DType dtype) {
  std::regex pattern;
  try {
    pattern = std::regex(filter);
  } catch (const std::regex_error&) {
    throw UsageError(fmt::format("--filter '{}' is not a regular expression", filter));
  }
  std::vector<const BenchRow*> rows;
  for (const BenchRow& row : bench_rows())
    if (runs_on(row, device, dtype) && std::regex_search(row.op + " " + row.shape, pattern))
      rows.push_back(&row);
  return rows;
}

void print_head(Device device) {
  fmt::print("{:<24} {:<24} {:<4} {:>9} {:>8} {:>8} {:>9} {:>6}{}\n", "op", "shape", "pass", "ms",
             "GB/s", "TFLOP/s", "floor ms", "share", device.is_cuda() ? "  eager ms" : "");
}

void print_pass(const BenchRow& row, const char* pass, const PassTiming& t, double floor) {
  fmt::print("{:<24} {:<24} {:<4} {:>9.4f} {:>8.1f} {:>8.2f} {:>9.4f} {:>5.1f}%{}\n", row.op,
             row.shape, pass, t.ms, t.cost.bytes / t.ms * 1e-6, t.cost.flops / t.ms * 1e-9, floor,
             100 * floor / t.ms, t.eager_ms > 0 ? fmt::format(" {:>9.4f}", t.eager_ms) : "");
  std::fflush(stdout);
}

nlohmann::json pass_record(const PassTiming& t, double floor) {
  nlohmann::json r = {{"ms", t.ms},
                      {"bytes", t.cost.bytes},
                      {"flops", t.cost.flops},
                      {"gb_per_s", t.cost.bytes / t.ms * 1e-6},
                      {"tflop_per_s", t.cost.flops / t.ms * 1e-9},
                      {"floor_ms", floor},
                      {"share_of_floor", floor / t.ms}};
  if (t.eager_ms > 0) r["eager_ms"] = t.eager_ms;
  return r;
}

nlohmann::json run_row(const BenchRow& row, const BenchSettings& settings,
                       const Ceilings& ceilings) {
  const RowTiming t = time_row(row, settings);
  nlohmann::json r = {{"op", row.op},
                      {"shape", row.shape},
                      {"dtype", name(settings.dtype)},
                      {"input_copies", t.copies}};
  const double forward = floor_ms(t.forward.cost, ceilings, settings.dtype);
  print_pass(row, "fwd", t.forward, forward);
  r["forward"] = pass_record(t.forward, forward);
  if (t.has_backward) {
    const double backward = floor_ms(t.backward.cost, ceilings, settings.dtype);
    print_pass(row, "bwd", t.backward, backward);
    r["backward"] = pass_record(t.backward, backward);
    r["memory"] = {{"given_bytes", t.memory.given},
                   {"tensor_bytes", t.memory.tensors},
                   {"peak_bytes", t.memory.peak}};
  }
  return r;
}

void run_bench_ops(const BenchOptions& o) {
  const bool named = o.list && o.device.starts_with("cuda");  // rows are known without a GPU too
  BenchSettings settings{.device = named ? Device::parse(o.device) : usable_device(o.device),
                         .repeats = o.repeats};
  const bool cuda = settings.device.is_cuda();
  settings.dtype = o.dtype.empty() ? (cuda ? DType::bf16 : DType::f32)
                                   : parse_dtype(o.dtype, {DType::f32, DType::bf16});
  if (!cuda && settings.dtype == DType::bf16)
    throw UsageError("--dtype bf16: operators run in f32 on cpu");
  const auto rows = chosen_rows(o.filter, settings.device, settings.dtype);
  check(!rows.empty(), "no benchmark matches --filter '{}' on {}", o.filter, o.device);
  if (o.list) {
    for (const BenchRow* row : rows) fmt::print("{} {}\n", row->op, row->shape);
    return;
  }
  check_result_path(o.json);
  set_matmul_autotune(true);  // each shape's fastest algorithm
  const Ceilings ceilings = device_ceilings(settings.device);
  fmt::print("{}, {}; ceilings ({}): {:.0f} GB/s, {:.1f} TFLOP/s\n",
             device_info(settings.device).name, name(settings.dtype), ceilings.source,
             ceilings.bytes_per_second * 1e-9,
             (settings.dtype == DType::bf16 ? ceilings.flops_bf16 : ceilings.flops_f32) * 1e-12);
  print_head(settings.device);
  nlohmann::json result = result_header("bench ops", settings.device);
  result["ceilings"] = {{"source", ceilings.source},
                        {"bytes_per_second", ceilings.bytes_per_second},
                        {"flops_f32", ceilings.flops_f32},
                        {"flops_bf16", ceilings.flops_bf16}};
  result["repeats"] = settings.repeats;
  result["rows"] = nlohmann::json::array();
  int failed = 0;
  for (const BenchRow* row : rows) {
    try {
      result["rows"].push_back(run_row(*row, settings, ceilings));
    } catch (const Error& e) {  // the other rows are still worth having
      ++failed;
      fmt::print("{:<24} {:<24} failed: {}\n", row->op, row->shape, e.what());
      result["rows"].push_back({{"op", row->op}, {"shape", row->shape}, {"error", e.what()}});
    }
  }
  if (!o.json.empty()) write_result(o.json, result);
  check(failed == 0, "{} of {} benchmarks failed", failed, rows.size());
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* bench = add_command(app, "bench", "Measure speed against what the device allows",
                                "ebb bench ops --device cuda\n"
                                "ebb bench models --device cuda\n"
                                "ebb bench ops --help");
  bench->require_subcommand(1);
  CLI::App* ops = add_command(*bench, "ops", "Operators, forward and backward",
                              "ebb bench ops\n"
                              "ebb bench ops --device cuda --filter norm --json ops.json\n"
                              "ebb bench ops --device cuda --dtype f32 --filter delta");
  auto o = std::make_shared<BenchOptions>();
  ops->add_option("--device", o->device, "cpu, cuda or cuda:N")->capture_default_str();
  ops->add_option("--dtype", o->dtype, "f32 or bf16; the default is bf16 on a GPU, f32 on the CPU");
  ops->add_option("--filter", o->filter,
                  "Only rows whose 'op shape' matches this regular expression");
  ops->add_option("--repeats", o->repeats, "Measurements, of which the median counts")
      ->capture_default_str()
      ->check(CLI::Range(3, 10000));
  ops->add_option("--json", o->json, "Also write the results to this file");
  ops->add_flag("--list", o->list, "Only list the rows");
  ops->callback([o] { run_bench_ops(*o); });
  add_bench_models(*bench);
  add_bench_gemm(*bench);
}

}  // namespace ebb::tools
