// `ebb bench gemm`: the CPU's matrix products beside the same BLAS called directly.
//
// On a machine that others use, absolute times drift by more than the difference of interest. So
// the two run in turn in one process and the median of the ratios of neighbours is what counts. On
// one thread (OMP_NUM_THREADS=1) the processor time of the process is looked at too: time that
// others took does not count there.
#include <cblas.h>
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <functional>
#include <memory>
#include <thread>

#include "ops/gemm.h"
#include "tensor/check.h"
#include "tensor/random.h"
#include "tools/commands.h"
#include "tools/result_file.h"

extern "C" {
[[gnu::weak]] void openblas_set_num_threads(int n);
}

namespace ebb::tools {
namespace {

struct GemmShape {
  const char* what;
  int64_t m, n, k;
  bool transpose_a = false, transpose_b = false;
  DType dtype = DType::f32;
};

// The products of the models' projections come as y = x·wᵀ, dx = dy·w and dw = dyᵀ·x.
const GemmShape kShapes[] = {
    {"square", 128, 128, 128},
    {"square", 256, 256, 256},
    {"square", 512, 512, 512},
    {"square", 1024, 1024, 1024},
    {"square", 2048, 2048, 2048},
    {"square f64", 1024, 1024, 1024, false, false, DType::f64},
    {"projection y", 1024, 1536, 512, false, true},
    {"projection dx", 1024, 512, 1536},
    {"projection dw", 1536, 512, 1024, true, false},
    {"long rows y", 8192, 512, 512, false, true},
    {"long rows dw", 512, 512, 8192, true, false},
    {"head y", 256, 32000, 512, false, true},
    {"head dw", 32000, 512, 256, true, false},
    {"narrow", 4096, 16, 512, false, true},
    {"one row", 1, 32000, 512, false, true},
};

struct Operands {
  explicit Operands(const GemmShape& s) : shape(s) {
    const auto draw = [&](int64_t rows, int64_t cols, uint64_t purpose) {
      const Tensor t = Tensor::empty({rows, cols}, s.dtype);
      fill_normal(t, {1, purpose});
      return t;
    };
    a = s.transpose_a ? draw(s.k, s.m, 1) : draw(s.m, s.k, 1);
    b = s.transpose_b ? draw(s.n, s.k, 2) : draw(s.k, s.n, 2);
    c = Tensor::zeros({s.m, s.n}, s.dtype);
    direct = Tensor::zeros({s.m, s.n}, s.dtype);
  }
  void run_ebb() const {
    matmul_into(shape.transpose_a ? a.transpose(0, 1) : a,
                shape.transpose_b ? b.transpose(0, 1) : b, c);
  }
  void run_blas() const {
    const auto flag = [](bool t) { return t ? CblasTrans : CblasNoTrans; };
    const auto call = [&]<class T>(auto gemm) {
      gemm(CblasRowMajor, flag(shape.transpose_a), flag(shape.transpose_b), int(shape.m),
           int(shape.n), int(shape.k), T(1), a.data<T>(), int(a.size(1)), b.data<T>(),
           int(b.size(1)), T(0), direct.data<T>(), int(shape.n));
    };
    if (shape.dtype == DType::f64)
      call.operator()<double>(cblas_dgemm);
    else
      call.operator()<float>(cblas_sgemm);
  }
  GemmShape shape;
  Tensor a, b, c, direct;
};

struct Clocks {
  double wall = 0, cpu = 0;  // milliseconds per call; cpu: of all threads together
};

Clocks time_calls(int calls, const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  const std::clock_t cpu = std::clock();
  for (int i = 0; i < calls; ++i) run();
  const double used = 1e3 * double(std::clock() - cpu) / CLOCKS_PER_SEC;
  const std::chrono::duration<double, std::milli> d = std::chrono::steady_clock::now() - start;
  return {d.count() / calls, used / calls};
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + long(v.size() / 2), v.end());
  return v[v.size() / 2];
}

struct Timing {
  Clocks ebb, blas, ratio;  // ratio: speed of ebb over that of BLAS
};

Timing time_pairs(const Operands& o, int pairs) {
  const int threads = omp_get_max_threads();
  // Each side as it is used: ebb spreads tiles over threads itself, BLAS has its own threads.
  const auto blas_threads = [](int n) {
    if (openblas_set_num_threads) openblas_set_num_threads(n);
  };
  // A side's idle threads spin for up to 25 ms, on the cores that the other side is to have.
  const auto let_idle = [&] {
    if (threads > 1) std::this_thread::sleep_for(std::chrono::milliseconds(40));
  };
  const auto ebb = [&](int calls) {
    blas_threads(1);
    omp_set_num_threads(threads);  // a BLAS on OpenMP has changed it
    let_idle();
    o.run_ebb();
    return time_calls(calls, [&] { o.run_ebb(); });
  };
  const auto blas = [&](int calls) {
    blas_threads(threads);
    let_idle();
    o.run_blas();
    return time_calls(calls, [&] { o.run_blas(); });
  };
  const int calls =
      std::clamp(int(4 / std::max(1e-3, std::min(ebb(1).wall, blas(1).wall))), 1, 1000);
  std::vector<double> values[6];
  for (int i = 0; i < pairs; ++i) {
    const bool first = i % 2 == 0;
    Clocks mine = first ? ebb(calls) : Clocks();
    const Clocks theirs = blas(calls);
    if (!first) mine = ebb(calls);
    const double all[] = {mine.wall,
                          mine.cpu,
                          theirs.wall,
                          theirs.cpu,
                          theirs.wall / mine.wall,
                          theirs.cpu / std::max(1e-6, mine.cpu)};
    for (size_t j = 0; j < 6; ++j) values[j].push_back(all[j]);
  }
  const auto at = [&](size_t i) { return median(values[i]); };
  return {{at(0), at(1)}, {at(2), at(3)}, {at(4), at(5)}};
}

struct Options {
  int pairs = 31;
  double least = 0;
  std::string filter, json;
};

double largest_difference(const Operands& o) {
  const auto x = o.c.to_vector<double>(), y = o.direct.to_vector<double>();
  double worst = 0, scale = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, std::abs(x[i] - y[i]));
    scale = std::max(scale, std::abs(y[i]));
  }
  return worst / scale;
}

nlohmann::json run_shape(const GemmShape& s, const Options& o) {
  const Operands operands(s);
  const Timing t = time_pairs(operands, o.pairs);
  check(largest_difference(operands) < 1e-4, "bench gemm: ebb and BLAS disagree on {} {}x{}x{}",
        s.what, s.m, s.n, s.k);
  const double flops = 2 * double(s.m) * double(s.n) * double(s.k);
  const std::string form =
      fmt::format("{}{}", s.transpose_a ? 't' : 'n', s.transpose_b ? 't' : 'n');
  fmt::print(
      "{:<13} {:>6} {:>6} {:>6} {:<3} {:<4} {:>9.4f} {:>9.4f} {:>9.1f} {:>9.1f} {:>6.3f} "
      "{:>9.3f}\n",
      s.what, s.m, s.n, s.k, form, name(s.dtype), t.ebb.wall, t.blas.wall,
      flops / t.ebb.wall * 1e-6, flops / t.blas.wall * 1e-6, t.ratio.wall, t.ratio.cpu);
  std::fflush(stdout);
  return {{"what", s.what},
          {"m", s.m},
          {"n", s.n},
          {"k", s.k},
          {"form", form},
          {"dtype", name(s.dtype)},
          {"ebb_ms", t.ebb.wall},
          {"blas_ms", t.blas.wall},
          {"ebb_cpu_ms", t.ebb.cpu},
          {"blas_cpu_ms", t.blas.cpu},
          {"ebb_gflop_per_s", flops / t.ebb.wall * 1e-6},
          {"blas_gflop_per_s", flops / t.blas.wall * 1e-6},
          {"speed_ratio", t.ratio.wall},
          {"cpu_time_ratio", t.ratio.cpu}};
}

void run(const Options& o) {
  if (!(o.least >= 0))
    throw UsageError(fmt::format("--least {}: want a share of 0 or more", o.least));
  check_result_path(o.json);
  const int threads = omp_get_max_threads();
  nlohmann::json result = result_header("bench gemm", {});
  result["statistic"] =
      "medians of neighbouring pairs, ebb and BLAS in turn, with several threads after a pause in "
      "which those of the other side fall asleep; speed_ratio: BLAS time / ebb time of a "
      "pair; cpu_time_ratio: the same of processor time";
  result["pairs"] = o.pairs;
  result["threads"] = threads;
  result["rows"] = nlohmann::json::array();
  fmt::print("{:<13} {:>6} {:>6} {:>6} {:<3} {:<4} {:>9} {:>9} {:>9} {:>9} {:>6} {:>9}\n",
             "product", "m", "n", "k", "", "", "ebb ms", "BLAS ms", "ebb GF/s", "BLAS GF/s",
             "speed", "cpu time");
  double worst = INFINITY;
  for (const GemmShape& s : kShapes) {
    if (std::string(s.what).find(o.filter) == std::string::npos) continue;
    result["rows"].push_back(run_shape(s, o));
    const nlohmann::json& row = result["rows"].back();
    worst = std::min(worst, row[threads == 1 ? "cpu_time_ratio" : "speed_ratio"].get<double>());
  }
  check(!result["rows"].empty(), "no product's name contains --filter '{}'", o.filter);
  result["slowest"] = worst;
  fmt::print("slowest product: {:.3f} of BLAS's speed\n", worst);
  if (!o.json.empty()) write_result(o.json, result);
  check(worst >= o.least, "bench gemm: {:.3f} of BLAS's speed, wanted {}", worst, o.least);
}

}  // namespace

void add_bench_gemm(CLI::App& bench) {
  CLI::App* c =
      add_command(bench, "gemm", "CPU matrix products beside BLAS called directly",
                  "ebb bench gemm\nOMP_NUM_THREADS=1 ebb bench gemm --pairs 101 --json gemm.json");
  auto o = std::make_shared<Options>();
  c->add_option("--pairs", o->pairs, "Measurements of either side, of which medians count")
      ->capture_default_str()
      ->check(CLI::Range(3, 10000));
  c->add_option("--filter", o->filter, "Only products whose name contains this");
  c->add_option("--least", o->least, "Fail when a product is slower than this share of BLAS");
  c->add_option("--json", o->json, "Also write the results to this file");
  c->callback([o] { run(*o); });
}

}  // namespace ebb::tools
