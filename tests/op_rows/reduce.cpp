// Rows of reductions, scans and softmax.
#include "ops/reduce.h"

#include <algorithm>
#include <numeric>

#include "ops/cumsum.h"
#include "ops/softmax.h"
#include "tests/op_table.h"
#include "tests/reference/reduce.h"

namespace ebb::testing {
namespace {

using Vars = std::span<const Var>;
using Tensors = std::span<const Tensor>;
using reference::Values;

// Values at least 0.04 apart, in random order: a step of the gradient check changes no order.
Tensor distinct(Draw& draw, const Shape& shape) {
  const Tensor t = draw.normal(shape);
  double* v = t.data<double>();
  std::vector<size_t> order(size_t(t.numel()));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return v[a] < v[b]; });
  for (size_t i = 0; i < order.size(); ++i)
    v[order[i]] = 0.04 * (double(i) - double(order.size()) / 2);
  return t;
}

struct Reduction {
  const char* name;
  Var (*run)(const Var&, const Dims&, KeepDim);
  double (*formula)(const Values&);
  bool order = false;    // depends on the order of the values only
  bool integer = false;  // a position
};
const Reduction kReductions[] = {
    {"sum", sum, reference::sum},
    {"mean", mean, reference::mean},
    {"norm2", norm2, reference::norm2},
    {"logsumexp", logsumexp, reference::logsumexp},
    {"max", max, reference::max, true},
    {"min", min, reference::min, true},
    {"argmax", [](const Var& x, const Dims& d, KeepDim k) -> Var { return argmax(x, d, k); },
     reference::argmax, true, true},
    {"variance", [](const Var& x, const Dims& d, KeepDim k) { return variance(x, d, 1, k); },
     reference::variance},
};

struct Which {
  const char* name;
  Shape x;
  std::vector<int> dims;
  bool keep = false;
  bool sum_only = false;  // the others allow no empty reduction, or the kernels are the same
};
const Which kWhich[] = {
    {"all", {3, 5}, {0, 1}},
    {"first", {4, 7, 9}, {0}},
    {"middle", {4, 7, 9}, {1}, true},
    {"last", {4, 7, 9}, {-1}},
    {"ends", {4, 7, 9}, {0, 2}, true},
    {"ends4", {3, 2, 4, 2}, {0, 2}, false, true},
    {"nothing", {4, 3}, {}, false, true},
    {"of_nothing", {0, 3}, {0}, false, true},
    {"no_results", {0, 3}, {1}},
    {"scalar", {}, {}, false, true},
    {"columns_one_row", {1, 37}, {0}},
    {"columns_long", {100003, 2}, {0}, false, true},
    {"columns8", {700, 264}, {0}, false, true},
    {"row_long", {100003}, {0}, false, true},
    {"rows_long", {3, 9000}, {1}},
    {"columns_split", {5000, 3}, {0}},
    {"rows_warp", {70, 264}, {1}},
};

std::vector<OpCase> reductions(Draw& draw) {
  std::vector<OpCase> cases;
  for (const Reduction& r : kReductions)
    for (const Which& w : kWhich) {
      if (w.sum_only && r.run != static_cast<decltype(r.run)>(sum)) continue;
      if (std::string(r.name) == "variance" && std::string(w.name) == "columns_one_row") continue;
      OpCase c;
      c.name = std::string(r.name) + "_" + w.name;
      c.inputs = {{"x", r.order ? distinct(draw, w.x) : draw.normal(w.x, 1, 0.5)}};
      c.gradients = !r.integer;
      c.jacobian = w.x.numel() <= 24;
      const KeepDim keep = w.keep ? KeepDim::yes : KeepDim::no;
      c.run = [=](Vars in) { return std::vector{r.run(in[0], Dims(w.dims), keep)}; };
      c.reference = [=](Tensors in) {
        return std::vector{reference::reduce(in[0], w.dims, w.keep, r.formula)};
      };
      cases.push_back(c);
    }
  return cases;
}

std::vector<OpError> reduce_errors() {
  const Tensor x = Tensor::zeros({2, 3}), none = Tensor::zeros({0, 3});
  const Tensor ids = Tensor::zeros({3}, DType::i64);
  return {
      {"dim", [=] { sum(x, 2); }, "^sum: dimension 2 of x \\[2,3\\]"},
      {"twice",
       [=] {
         mean(x, {0, -2});
       },
       "^mean: dimension -2 of x \\[2,3\\] is named twice"},
      {"integers", [=] { sum(ids); }, "^sum: x \\[3\\] is i64, want a float type"},
      {"max_empty", [=] { max(none, 0); }, "^max: of no elements: x is \\[0,3\\]"},
      {"min_empty", [=] { min(none); }, "^min: of no elements: x is \\[0,3\\]"},
      {"argmax_empty", [=] { argmax(none); }, "^argmax: of no elements: x is \\[0,3\\]"},
      {"norm2_dtype", [=] { norm2(ids); }, "^norm2: x \\[3\\] is i64"},
      {"logsumexp", [=] { logsumexp(x, -3); }, "^logsumexp: dimension -3 of x \\[2,3\\]"},
      {"variance", [] { variance(Var(), 0); }, "^variance: x is undefined"},
  };
}

Values running_sum(const Values& v, const std::vector<int64_t>& bounds, bool backward) {
  Values out(v.size());
  for (size_t q = 0; q + 1 < bounds.size(); ++q) {
    double s = 0;
    const int64_t n = bounds[q + 1] - bounds[q];
    for (int64_t r = 0; r < n; ++r) {
      const size_t t = size_t(bounds[q] + (backward ? n - 1 - r : r));
      out[t] = s += v[t];
    }
  }
  return out;
}

std::vector<OpCase> scans(Draw& draw) {
  std::vector<OpCase> cases;
  struct Scan {
    const char* name;
    Shape x;
    int dim;
  };
  // The chunk lengths of the GPU are 128 (columns) and up to 2048 (rows); the longest cases scan
  // their chunk totals in chunks again.
  for (const Scan& s :
       {Scan{"last", {3, 5}, -1}, Scan{"first", {5, 4}, 0}, Scan{"middle", {2, 300, 3}, 1},
        Scan{"row33", {4, 33}, 1}, Scan{"row256", {2, 256}, 1}, Scan{"row_long", {2, 5000}, 1},
        Scan{"row_twice", {70000}, 0}, Scan{"column_twice", {40001, 2}, 0},
        Scan{"empty", {0, 3}, 0}, Scan{"one", {4, 1, 3}, 1}})
    for (const ScanOrder order : {ScanOrder::forward, ScanOrder::backward}) {
      const bool backward = order == ScanOrder::backward;
      OpCase c;
      c.name = std::string(s.name) + (backward ? "_backward" : "");
      c.inputs = {{"x", draw.normal(s.x)}};
      c.jacobian = s.x.numel() <= 24;
      c.run = [=](Vars in) { return std::vector{cumsum(in[0], s.dim, order)}; };
      c.reference = [=](Tensors in) {
        return std::vector{reference::along(in[0], s.dim, [&](const Values& v) {
          return running_sum(v, {0, int64_t(v.size())}, backward);
        })};
      };
      cases.push_back(c);
    }
  struct Packed {
    const char* name;
    Shape x;
    std::vector<int64_t> bounds;
  };
  for (const Packed& p : {Packed{"packed", {1, 11, 2}, {0, 0, 3, 4, 4, 11, 11}},
                          Packed{"packed_rows", {2, 300}, {0, 1, 257, 258, 600}},
                          Packed{"packed_row_chunks", {1, 9000}, {0, 2047, 2048, 2049, 8500, 9000}},
                          Packed{"packed_columns", {1, 1000, 3}, {0, 127, 128, 700, 1000}}})
    for (const ScanOrder order : {ScanOrder::forward, ScanOrder::backward}) {
      const bool backward = order == ScanOrder::backward;
      OpCase c;
      c.name = std::string(p.name) + (backward ? "_backward" : "");
      c.inputs = {{"x", draw.normal(p.x)}};
      c.jacobian = p.x.numel() <= 24;
      c.run = [=](Vars in) {
        return std::vector{cumsum(in[0], SeqLayout::packed(p.bounds, in[0].device()), order)};
      };
      c.reference = [=](Tensors in) {
        const int64_t tokens = in[0].size(0) * in[0].size(1), inner = in[0].numel() / tokens;
        const Tensor flat = in[0].contiguous().view({tokens, inner});
        return std::vector{reference::along(flat, 0, [&](const Values& v) {
                             return running_sum(v, p.bounds, backward);
                           }).view(in[0].shape())};
      };
      cases.push_back(c);
    }
  OpCase dense = cases[2];
  dense.name = "dense_layout";
  dense.inputs = {{"x", draw.normal({2, 5, 2})}};
  dense.run = [](Vars in) { return std::vector{cumsum(in[0], SeqLayout())}; };
  dense.reference = [](Tensors in) {
    return std::vector{reference::along(in[0], 1, [](const Values& v) {
      return running_sum(v, {0, int64_t(v.size())}, false);
    })};
  };
  cases.push_back(dense);
  return cases;
}

std::vector<OpError> scan_errors() {
  const Tensor x = Tensor::zeros({2, 3});
  return {
      {"dim", [=] { cumsum(x, 2); }, "^cumsum: dimension 2 of x \\[2,3\\]"},
      {"dtype", [] { cumsum(Tensor::zeros({3}, DType::i64), 0); }, "^cumsum: x \\[3\\] is i64"},
      {"rank", [] { cumsum(Tensor::zeros({3}), SeqLayout()); }, "^cumsum: x is \\[3\\], want"},
      {"layout",
       [=] {
         cumsum(x, SeqLayout::packed({0, 5}));
       },
       "^cumsum: cu_seqlens ends at 5, the input has 2x3 tokens"},
  };
}

std::vector<OpCase> softmaxes(Draw& draw) {
  std::vector<OpCase> cases;
  for (const bool logarithm : {false, true})
    for (const Shape& s : {Shape{3, 5}, Shape{4, 1}, Shape{2, 3, 33}, Shape{7, 264}, Shape{5, 1000},
                           Shape{2, 5003}, Shape{0, 4}, Shape{3, 0}}) {
      OpCase c;
      c.name = (logarithm ? "log_n" : "n") + std::to_string(s.first(s.size() - 1).numel()) + "_d" +
               std::to_string(s.back());
      c.inputs = {{"x", draw.normal(s, 2)}};
      c.jacobian = s.numel() <= 24;
      c.run = [=](Vars in) { return std::vector{logarithm ? log_softmax(in[0]) : softmax(in[0])}; };
      c.reference = [=](Tensors in) {
        return std::vector{reference::along(in[0], -1, [&](const Values& v) {
          Values out;
          const double lse = v.empty() ? 0 : reference::logsumexp(v);
          for (double x : v) out.push_back(logarithm ? x - lse : std::exp(x - lse));
          return out;
        })};
      };
      cases.push_back(c);
    }
  return cases;
}

}  // namespace

std::vector<OpRow> reduce_rows(Draw& draw) {
  return {{.op = "reduce", .cases = reductions(draw), .errors = reduce_errors()},
          {.op = "cumsum", .cases = scans(draw), .errors = scan_errors()},
          {.op = "softmax",
           .cases = softmaxes(draw),
           .errors = {
               {"rank", [] { softmax(Tensor::zeros({})); }, "^softmax: x is \\[\\], want at least"},
               {"dtype", [] { log_softmax(Tensor::zeros({2}, DType::u8)); },
                "^log_softmax: x \\[2\\] is u8"}}}};
}

}  // namespace ebb::testing
