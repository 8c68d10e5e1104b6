// Rows of the embedding and the losses.
#include "tests/reference/loss.h"

#include "ops/cross_entropy.h"
#include "ops/embedding.h"
#include "ops/linear_cross_entropy.h"
#include "tests/op_table.h"
#include "tests/reference/matmul.h"

namespace ebb::testing {
namespace {

OpCase lookup(const char* name, Tensor table, Tensor ids) {
  OpCase c;
  c.name = name;
  c.jacobian = table.numel() <= 40 && ids.numel() <= 10;
  c.inputs = {{"table", std::move(table)}, {"ids", std::move(ids)}};
  c.run = [](std::span<const Var> in) { return std::vector{embedding(in[0], in[1].value())}; };
  c.reference = [](std::span<const Tensor> in) {
    return std::vector{reference::embedding(in[0], in[1])};
  };
  return c;
}

OpRow embedding_row(Draw& draw) {
  OpRow row{.op = "embedding", .cases = {}, .errors = {}};
  // Runs of one id that end inside, at and far beyond the tiles of the CUDA gradient.
  std::vector<int64_t> runs;
  for (const int64_t length : {1, 31, 32, 33, 64, 1, 95, 1100, 3})
    runs.insert(runs.end(), size_t(length), int64_t(runs.size()) % 13);
  row.cases = {
      lookup("small", draw.normal({7, 5}), draw.integers({2, 3}, 0, 7)),
      lookup("i32", draw.normal({7, 4}), draw.integers({9}, 0, 7).to(DType::i32)),
      lookup("one", draw.normal({1, 1}), Tensor::zeros({1}, DType::i64)),
      lookup("no_shape", draw.normal({3, 4}), Tensor::full({}, 2, DType::i64)),
      lookup("none", draw.normal({3, 4}), Tensor::zeros({0}, DType::i64)),
      lookup("no_columns", draw.normal({3, 0}), draw.integers({5}, 0, 3)),
      lookup("many", draw.normal({11, 64}), draw.integers({4, 80}, 0, 11)),
      lookup("odd_width", draw.normal({50, 33}), draw.integers({333}, 0, 50)),
      lookup("wide", draw.normal({5, 1100}), draw.integers({40}, 0, 5)),
      lookup("runs", draw.normal({13, 6}), Tensor::from(runs, {int64_t(runs.size())})),
      lookup("one_id", draw.normal({4, 8}), Tensor::full({2500}, 3, DType::i64)),
      lookup("large_vocabulary", draw.normal({131072, 1}),
             Tensor::from(std::vector<int64_t>{70000, 4464, 131071, 70000}, {4})),
  };
  const Tensor table = Tensor::zeros({10, 2});
  row.errors = {
      {"id_above", [=] { embedding(table, Tensor::full({3}, 10, DType::i64)); },
       "^embedding: id 10 at position 0 lies outside \\[0, 10\\)"},
      {"id_below", [=] { embedding(table, Tensor::full({3}, -1, DType::i32)); },
       "^embedding: id -1 at position 0"},
      {"ids", [=] { embedding(table, Tensor::zeros({3})); },
       "^embedding: ids \\[3\\] are f32, want i32 or i64"},
      {"table", [=] { embedding(Tensor::zeros({4}), Tensor::zeros({3}, DType::i64)); },
       "^embedding: table is \\[4\\], want \\[V,d\\]"},
      {"output", [=] { embedding(table, Tensor::zeros({3}, DType::i64), DType::bf16); },
       "^embedding: output dtype bf16 from a table of f32"},
  };
  return row;
}

// Labels in [0, v), every `period`-th replaced by `ignored`; 0: none.
Tensor labels_with(Draw& draw, const Shape& shape, int64_t v, int64_t period,
                   int64_t ignored = -100) {
  const Tensor labels = draw.integers(shape, 0, v);
  for (int64_t i = 0; period && i < labels.numel(); i += period)
    labels.data<int64_t>()[i] = ignored;
  return labels;
}

// The divisor the reference is told for a reduction and a handed-in count.
double divisor(Reduction reduction, const Tensor& count) {
  if (reduction != Reduction::mean) return NAN;
  return count ? count.item() : -1;
}

// A case that compares the loss, with gradients, and one that also compares the token losses and
// lse, which pass no gradient on.
std::vector<OpCase> with_statistics(std::vector<OpCase> cases) {
  std::vector<OpCase> out;
  for (OpCase& c : cases) {
    OpCase all = c;
    all.name += "_statistics";
    all.gradients = false;
    c.run = [run = c.run](std::span<const Var> in) { return std::vector{run(in)[0]}; };
    c.reference = [reference = c.reference](std::span<const Tensor> in) {
      return std::vector{reference(in)[0]};
    };
    out.push_back(std::move(c));
    out.push_back(std::move(all));
  }
  return out;
}

OpCase loss(const char* name, Tensor logits, Tensor labels, Reduction reduction,
            int64_t ignore_index = -100, Tensor count = {}) {
  OpCase c;
  c.name = name;
  c.jacobian = logits.numel() <= 40;
  c.inputs = {
      {"logits", std::move(logits)},
      {"labels", std::move(labels)},
      {.name = "count", .value = std::move(count), .differentiable = false, .parameter = true}};
  c.run = [=](std::span<const Var> in) {
    const CrossEntropy r = cross_entropy(
        in[0], in[1].value(),
        {.ignore_index = ignore_index, .reduction = reduction, .count = in[2].value()});
    return std::vector{r.loss, Var(r.token_loss), Var(r.lse)};
  };
  c.reference = [=](std::span<const Tensor> in) {
    const reference::Loss r =
        reference::cross_entropy(in[0], in[1], ignore_index, divisor(reduction, in[2]));
    return std::vector{reduction == Reduction::none ? r.token_loss : r.loss, r.token_loss, r.lse};
  };
  return c;
}

OpRow cross_entropy_row(Draw& draw) {
  OpRow row{.op = "cross_entropy", .cases = {}, .errors = {}};
  const auto mean = Reduction::mean, sum = Reduction::sum, none = Reduction::none;
  const auto all_ignored = [](const Shape& s) { return Tensor::full(s, -100, DType::i64); };
  Tensor hidden = draw.normal({4, 9});  // classes that are ruled out
  for (int64_t i = 0; i < 4; ++i) hidden.data<double>()[i * 9 + (i + 5) % 9] = -INFINITY;
  OpCase ruled_out =
      loss("minus_infinity", hidden, Tensor::from(std::vector<int64_t>{0, 1, 2, 3}, {4}), mean);
  ruled_out.gradients = false;  // values and f32, bf16 agreement; differences meet inf − inf
  row.cases = {
      loss("small", draw.normal({4, 5}), labels_with(draw, {4}, 5, 0), mean),
      loss("v97", draw.normal({3, 11, 97}), labels_with(draw, {3, 11}, 97, 4), mean),
      loss("v512", draw.normal({20, 512}, 2), labels_with(draw, {20}, 512, 7), mean),
      loss("v5003", draw.normal({6, 5003}), labels_with(draw, {6}, 5003, 4), mean),
      loss("sum", draw.normal({13, 33}), labels_with(draw, {13}, 33, 3), sum),
      loss("none", draw.normal({2, 7, 33}), labels_with(draw, {2, 7}, 33, 3), none),
      loss("i32", draw.normal({5, 8}), labels_with(draw, {5}, 8, 2).to(DType::i32), mean),
      loss("one_class", draw.normal({5, 1}), Tensor::zeros({5}, DType::i64), sum),
      loss("two_classes", draw.normal({9, 2}, 3), labels_with(draw, {9}, 2, 0), mean),
      loss("one_row", draw.normal({17}), Tensor::full({}, 4, DType::i64), none),
      loss("no_rows", draw.normal({0, 6}), Tensor::zeros({0}, DType::i64), mean),
      loss("all_ignored", draw.normal({5, 8}), all_ignored({5}), mean),
      loss("all_ignored_sum", draw.normal({5, 8}), all_ignored({5}), sum),
      loss("all_ignored_none", draw.normal({5, 8}), all_ignored({5}), none),
      loss("ignored_class", draw.normal({12, 6}), labels_with(draw, {12}, 6, 2, 3), mean, 3),
      loss("extreme", draw.uniform({9, 97}, -1e4, 1e4), labels_with(draw, {9}, 97, 5), mean),
      loss("extreme_shift", draw.normal({9, 97}, 1, 1e4), labels_with(draw, {9}, 97, 5), mean),
      loss("count_i64", draw.normal({6, 20}), labels_with(draw, {6}, 20, 3), mean, -100,
           Tensor::full({}, 100, DType::i64)),
      loss("count_float", draw.normal({6, 20}), labels_with(draw, {6}, 20, 3), mean, -100,
           Tensor::full({1}, 12.5, DType::f64)),
      loss("count_zero", draw.normal({6, 20}), labels_with(draw, {6}, 20, 3), mean, -100,
           Tensor::full({}, 0, DType::i64)),
      ruled_out,
  };
  row.cases = with_statistics(std::move(row.cases));
  const Tensor z = Tensor::zeros({3, 4});
  const auto ids = [](int64_t v, const Shape& s = {3}) {
    return Tensor::full(s, double(v), DType::i64);
  };
  row.errors = {
      {"label_above", [=] { cross_entropy(z, ids(4)); },
       "^cross_entropy: label 4 at position 0 is neither in \\[0, 4\\) nor ignore_index -100"},
      {"label_below", [=] { cross_entropy(z, ids(-1)); }, "^cross_entropy: label -1 at position 0"},
      {"labels", [=] { cross_entropy(z, ids(0, {4})); },
       "^cross_entropy: labels is \\[4\\], want \\[3\\]"},
      {"labels_dtype", [=] { cross_entropy(z, Tensor::zeros({3})); },
       "^cross_entropy: labels \\[3\\] are f32"},
      {"no_classes",
       [=] {
         cross_entropy(Tensor::zeros({3, 0}), ids(0));
       },
       "^cross_entropy: logits are \\[3,0\\]"},
      {"count", [=] { cross_entropy(z, ids(0), {.count = Tensor::zeros({2})}); },
       "^cross_entropy: count is \\[2\\], want one number"},
  };
  return row;
}

struct Head {
  const char* name;
  Shape x;
  int64_t v;
  LinearCrossEntropyOptions options = {};
  int64_t period = 3;  // of ignored labels
  bool weights = false;
};

OpCase head(Draw& draw, const Head& h) {
  OpCase c;
  c.name = h.name;
  const Shape lead = h.x.first(h.x.size() - 1);
  c.inputs = {
      {"x", draw.normal(h.x)},
      {"w", draw.normal({h.v, h.x.back()}, 0.4)},
      {"labels", labels_with(draw, lead, h.v, h.period)},
      {.name = "weights",
       .value = h.weights ? draw.uniform(lead, 0, 2) : Tensor(),
       .differentiable = false,
       .parameter = true},
      {.name = "count", .value = h.options.count, .differentiable = false, .parameter = true}};
  c.run = [o = h.options](std::span<const Var> in) {
    LinearCrossEntropyOptions options = o;
    options.token_weights = in[3].value();
    options.count = in[4].value();
    const CrossEntropy r = linear_cross_entropy(in[0], in[1], in[2].value(), options);
    return std::vector{r.loss, Var(r.token_loss), Var(r.lse)};
  };
  c.reference = [reduction = h.options.reduction](std::span<const Tensor> in) {
    const reference::Loss r = reference::cross_entropy(reference::linear(in[0], in[1], {}), in[2],
                                                       -100, divisor(reduction, in[4]), in[3]);
    return std::vector{r.loss, r.token_loss, r.lse};
  };
  c.jacobian = h.x.numel() + h.v * h.x.back() <= 60;
  return c;
}

OpRow linear_cross_entropy_row(Draw& draw) {
  OpRow row{.op = "linear_cross_entropy", .cases = {}, .errors = {}};
  const Reduction sum = Reduction::sum;
  row.cases = {
      head(draw, {"small", {4, 3}, 5}),
      head(draw, {"v97_chunks", {3, 11, 24}, 97, {.chunk_rows = 8}}),
      head(draw, {"v97_chunk_of_one", {5, 16}, 97, {.chunk_rows = 1}}),
      head(draw, {"v97_chunk_exact", {32, 16}, 97, {.chunk_rows = 16}}),
      head(draw, {"v512", {2, 40, 32}, 512, {.chunk_rows = 33}}),
      head(draw, {"v512_auto", {300, 16}, 512}),
      head(draw, {"v5000", {7, 8}, 5000, {.chunk_rows = 3}}),
      head(draw, {"sum", {21, 12}, 64, {.reduction = sum, .chunk_rows = 5}}),
      head(draw, {.name = "weights",
                  .x = {21, 12},
                  .v = 64,
                  .options = {.chunk_rows = 5},
                  .weights = true}),
      head(draw, {.name = "weights_sum",
                  .x = {21, 12},
                  .v = 64,
                  .options = {.reduction = sum, .chunk_rows = 5},
                  .weights = true}),
      head(draw,
           {"count", {21, 12}, 64, {.count = Tensor::full({}, 100, DType::i64), .chunk_rows = 5}}),
      head(draw, {"all_ignored", {6, 4}, 10, {.chunk_rows = 4}, 1}),
      head(draw, {"none_ignored", {6, 4}, 10, {.chunk_rows = 4}, 0}),
      head(draw, {"no_rows", {0, 4}, 10}),
      head(draw, {"one_class", {5, 4}, 1, {.reduction = sum}}),
      head(draw, {"one_input", {9, 1}, 33, {.chunk_rows = 2}}),
      head(draw, {"one_row", {8}, 17, {}, 0}),
  };
  row.cases = with_statistics(std::move(row.cases));
  const Tensor x = Tensor::zeros({3, 4}), w = Tensor::zeros({6, 4});
  const Tensor labels = Tensor::zeros({3}, DType::i64);
  row.errors = {
      {"width",
       [=] {
         linear_cross_entropy(x, Tensor::zeros({6, 5}), labels);
       },
       "^linear_cross_entropy: x is \\[3,4\\], w is \\[6,5\\]"},
      {"dtype", [=] { linear_cross_entropy(x, w.to(DType::f64), labels); },
       "^linear_cross_entropy: x \\[3,4\\] is f32, w \\[6,4\\] is f64"},
      {"labels", [=] { linear_cross_entropy(x, w, Tensor::zeros({2}, DType::i64)); },
       "^linear_cross_entropy: labels is \\[2\\], want \\[3\\]"},
      {"label", [=] { linear_cross_entropy(x, w, Tensor::full({3}, 6, DType::i64)); },
       "^linear_cross_entropy: label 6 at position 0"},
      {"weights",
       [=] { linear_cross_entropy(x, w, labels, {.token_weights = Tensor::zeros({2})}); },
       "^linear_cross_entropy: token_weights is \\[2\\], want \\[3\\]"},
      {"reduction", [=] { linear_cross_entropy(x, w, labels, {.reduction = Reduction::none}); },
       "^linear_cross_entropy: no reduction 'none'"},
      {"chunk", [=] { linear_cross_entropy(x, w, labels, {.chunk_rows = -1}); },
       "^linear_cross_entropy: chunk_rows is -1"},
  };
  return row;
}

}  // namespace

std::vector<OpRow> loss_rows(Draw& draw) {
  return {embedding_row(draw), cross_entropy_row(draw), linear_cross_entropy_row(draw)};
}

}  // namespace ebb::testing
