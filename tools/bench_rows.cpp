// What `ebb bench ops` measures, by family: one line per operator and shape in tools/bench_rows/.
// 32768 tokens (8 × 4096) are a training batch of the 100M models; the CPU gets shapes it can
// afford.
#include "tools/bench.h"

namespace ebb::tools {

std::vector<BenchRow> attention_bench_rows();
std::vector<BenchRow> gate_bench_rows();
std::vector<BenchRow> loss_bench_rows();
std::vector<BenchRow> norm_bench_rows();
std::vector<BenchRow> optimizer_bench_rows();
std::vector<BenchRow> product_bench_rows();
std::vector<BenchRow> recurrence_bench_rows();
std::vector<BenchRow> tensor_bench_rows();

const std::vector<BenchRow>& bench_rows() {
  static const std::vector<BenchRow> rows = [] {
    std::vector<BenchRow> all;
    for (const auto family :
         {loss_bench_rows, product_bench_rows, norm_bench_rows, gate_bench_rows,
          recurrence_bench_rows, attention_bench_rows, optimizer_bench_rows, tensor_bench_rows})
      for (BenchRow& row : family()) all.push_back(std::move(row));
    return all;
  }();
  return rows;
}

}  // namespace ebb::tools
