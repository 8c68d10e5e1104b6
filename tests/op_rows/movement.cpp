// Rows of views, joins and indexing.
#include "ops/movement.h"

#include "ops/indexing.h"
#include "tests/op_table.h"
#include "tests/reference/movement.h"

namespace ebb::testing {
namespace {

using Vars = std::span<const Var>;
using Tensors = std::span<const Tensor>;
using reference::Index;

OpCase make(const std::string& name, std::vector<OpInput> inputs, std::function<Var(Vars)> run,
            std::function<Tensor(Tensors)> formula) {
  OpCase c;
  c.name = name;
  c.inputs = std::move(inputs);
  c.jacobian = true;
  for (const OpInput& in : c.inputs) c.jacobian = c.jacobian && in.value.numel() <= 24;
  c.run = [run](Vars in) { return std::vector{run(in)}; };
  c.reference = [formula](Tensors in) { return std::vector{formula(in)}; };
  return c;
}

// One input, and a formula by index.
OpCase moved(const std::string& name, const Tensor& x, std::function<Var(const Var&)> run,
             const Shape& shape, std::function<Index(const Index&)> source) {
  return make(
      name, {{"x", x}}, [run](Vars in) { return run(in[0]); },
      [=](Tensors in) { return reference::move(in[0], shape, source); });
}

std::vector<OpCase> view_cases(Draw& draw) {
  const Tensor x = draw.normal({2, 3, 4});
  std::vector<OpCase> cases = {
      make(
          "reshape", {{"x", x}},
          [](Vars in) {
            return reshape(in[0], {6, -1});
          },
          [](Tensors in) {
            return reference::reshape(in[0], {6, 4});
          }),
      make(
          "reshape_copies", {{"x", x}},
          [](Vars in) {
            return reshape(transpose(in[0], 0, 2), {4, 6});
          },
          [](Tensors in) {
            return reference::reshape(reference::move(in[0], {4, 3, 2},
                                                      [](Index i) {
                                                        return Index{i[2], i[1], i[0]};
                                                      }),
                                      {4, 6});
          }),
      make(
          "flatten", {{"x", x}}, [](Vars in) { return flatten(in[0], -2, -1); },
          [](Tensors in) {
            return reference::reshape(in[0], {2, 12});
          }),
      moved(
          "transpose", x, [](const Var& v) { return transpose(v, 1, -1); }, {2, 4, 3},
          [](Index i) {
            return Index{i[0], i[2], i[1]};
          }),
      moved(
          "permute", x,
          [](const Var& v) {
            return permute(v, {2, 0, -2});
          },
          {4, 2, 3},
          [](Index i) {
            return Index{i[1], i[2], i[0]};
          }),
      moved(
          "unsqueeze", x, [](const Var& v) { return unsqueeze(v, -1); }, {2, 3, 4, 1},
          [](Index i) {
            return Index{i[0], i[1], i[2]};
          }),
      moved(
          "squeeze", draw.normal({2, 1, 3}), [](const Var& v) { return squeeze(v, 1); }, {2, 3},
          [](Index i) {
            return Index{i[0], 0, i[1]};
          }),
      moved(
          "select", x, [](const Var& v) { return select(v, -2, 1); }, {2, 4},
          [](Index i) {
            return Index{i[0], 1, i[1]};
          }),
      moved(
          "slice", x, [](const Var& v) { return slice(v, 2, 1, 3); }, {2, 3, 2},
          [](Index i) {
            return Index{i[0], i[1], i[2] + 1};
          }),
      moved(
          "slice_step", draw.normal({11, 2}), [](const Var& v) { return slice(v, 0, 1, 10, 4); },
          {3, 2},
          [](Index i) {
            return Index{1 + 4 * i[0], i[1]};
          }),
      moved(
          "slice_all", x, [](const Var& v) { return slice(v, 1, 0, 3); }, {2, 3, 4},
          [](Index i) { return i; }),
      moved(
          "slice_none", x, [](const Var& v) { return slice(v, 1, 2, 2); }, {2, 0, 4},
          [](Index i) { return i; }),
      moved(
          "expand", draw.normal({3, 1, 5}),
          [](const Var& v) {
            return expand(v, {2, 3, 4, 5});
          },
          {2, 3, 4, 5},
          [](Index i) {
            return Index{i[1], 0, i[3]};
          }),
      moved(
          "contiguous", x, [](const Var& v) { return contiguous(transpose(v, 0, 1)); }, {3, 2, 4},
          [](Index i) {
            return Index{i[1], i[0], i[2]};
          }),
      moved(
          "repeat_interleave", x, [](const Var& v) { return repeat_interleave(v, 1, 3); },
          {2, 9, 4},
          [](Index i) {
            return Index{i[0], i[1] / 3, i[2]};
          }),
  };
  // The second piece takes part in no result: its gradient is 0.
  OpCase split_case;
  split_case.name = "split";
  split_case.inputs = {{"x", draw.normal({3, 9})}};
  split_case.run = [](Vars in) {
    const std::vector<Var> parts = split(in[0], -1, {2, 3, 0, 4});
    return std::vector{parts[0], parts[2], parts[3]};
  };
  split_case.reference = [](Tensors in) {
    const auto piece = [&](int64_t begin, int64_t n) {
      return reference::move(in[0], {3, n}, [=](Index i) { return Index{i[0], begin + i[1]}; });
    };
    return std::vector{piece(0, 2), piece(5, 0), piece(5, 4)};
  };
  cases.push_back(split_case);
  split_case.name = "split_equal";
  split_case.run = [](Vars in) { return split(in[0], 1, 3); };
  split_case.reference = [](Tensors in) {
    std::vector<Tensor> out;
    for (int64_t p = 0; p < 3; ++p)
      out.push_back(reference::move(in[0], {3, 3}, [=](Index i) {
        return Index{i[0], 3 * p + i[1]};
      }));
    return out;
  };
  cases.push_back(split_case);
  return cases;
}

std::vector<OpCase> join_cases(Draw& draw) {
  const auto part = [&](const Shape& s) { return OpInput{"part", draw.normal(s)}; };
  const auto all = [](Vars in) { return std::vector<Var>(in.begin(), in.end()); };
  return {
      make(
          "concat_first", {part({2, 5}), part({0, 5}), part({1, 5})},
          [all](Vars in) { return concat(all(in), 0); },
          [](Tensors in) { return reference::concat(in, 0); }),
      make(
          "concat_last", {part({2, 3, 2}), part({2, 3, 1})},
          [all](Vars in) { return concat(all(in), -1); },
          [](Tensors in) { return reference::concat(in, 2); }),
      make(
          "stack", {part({2, 3}), part({2, 3}), part({2, 3})},
          [all](Vars in) { return stack(all(in), 1); },
          [](Tensors in) {
            return reference::build({2, 3, 3}, [&](const Index& i) {
              return reference::value_at(in[size_t(i[1])], {i[0], i[2]});
            });
          }),
      make(
          "pad", {part({2, 3, 2})}, [](Vars in) { return pad(in[0], 1, 2, 1, 0.5); },
          [](Tensors in) {
            return reference::build({2, 6, 2}, [&](const Index& i) {
              const bool inside = i[1] >= 2 && i[1] < 5;
              return inside ? reference::value_at(in[0], {i[0], i[1] - 2, i[2]}) : 0.5;
            });
          }),
  };
}

std::vector<OpCase> indexing_cases(Draw& draw) {
  std::vector<OpCase> cases;
  struct Pick {
    const char* name;
    Shape x;
    int dim;
    int64_t ids;
    DType type = DType::i64;
  };
  // "long" repeats its few rows so often that a run of equal indices spans several windows of the
  // GPU's backward pass; "table" mixes repeated and missing rows.
  for (const Pick& p :
       {Pick{"first", {5, 4}, 0, 7}, Pick{"middle", {2, 5, 3}, 1, 4, DType::i32},
        Pick{"last", {3, 6}, -1, 9}, Pick{"none", {4, 3}, 0, 0}, Pick{"long", {3, 24}, 0, 1500},
        Pick{"table", {311, 8}, 0, 1000}, Pick{"long_inner", {2, 2, 5}, 1, 700}}) {
    const int dim = p.dim < 0 ? p.dim + p.x.size() : p.dim;
    Shape shape = p.x;
    shape[dim] = p.ids;
    const int given = p.dim;
    cases.push_back(make(
        std::string("index_select_") + p.name,
        {{"x", draw.normal(p.x)}, {"ids", draw.integers({p.ids}, 0, p.x[dim]).to(p.type)}},
        [given](Vars in) { return index_select(in[0], given, in[1].value()); },
        [=](Tensors in) {
          return reference::move(in[0], shape, [&](Index i) {
            i[size_t(dim)] = int64_t(reference::value_at(in[1], {i[size_t(dim)]}));
            return i;
          });
        }));
  }
  // "long": few columns, so long that the GPU sorts.
  for (const Pick& p : {Pick{"last", {6, 5}, -1, 1}, Pick{"middle", {2, 5, 3}, 1, 4, DType::i32},
                        Pick{"none", {2, 3}, 0, 0}, Pick{"long", {2, 9, 3}, 1, 300},
                        Pick{"wide", {600, 3, 7}, 1, 70}}) {
    const int dim = p.dim < 0 ? p.dim + p.x.size() : p.dim;
    Shape shape = p.x;
    shape[dim] = p.ids;
    const int given = p.dim;
    cases.push_back(make(
        std::string("gather_") + p.name,
        {{"x", draw.normal(p.x)}, {"index", draw.integers(shape, 0, p.x[dim]).to(p.type)}},
        [given](Vars in) { return gather(in[0], given, in[1].value()); },
        [=](Tensors in) {
          return reference::move(in[0], shape, [&](Index i) {
            i[size_t(dim)] = int64_t(reference::value_at(in[1], i));
            return i;
          });
        }));
  }
  return cases;
}

std::vector<OpError> movement_errors() {
  const Tensor x = Tensor::zeros({2, 3}), y = Tensor::zeros({4, 3});
  const Tensor wide = Tensor::zeros({2, 3}, DType::f64);
  return {
      {"reshape",
       [=] {
         reshape(x, {4, 2});
       },
       "6 elements of \\[2,3\\] do not fit \\[4,2\\]"},
      {"undefined", [] { reshape(Var(), {1}); }, "^reshape: x is undefined"},
      {"transpose", [=] { transpose(x, 0, 2); }, "^transpose: dimension 2"},
      {"permute",
       [=] {
         permute(x, {0, 0});
       },
       "^permute: dimension 0 of \\[2,3\\] named twice"},
      {"squeeze", [=] { squeeze(x, 0); }, "^squeeze: dimension 0 of \\[2,3\\] is not 1"},
      {"select", [=] { select(x, 1, 3); }, "^select: index 3 of dimension 1 of \\[2,3\\]"},
      {"slice", [=] { slice(x, 0, 1, 3); }, "^slice: \\[1:3:1\\] of dimension 0 of \\[2,3\\]"},
      {"slice_dim", [=] { slice(x, 2, 0, 1); }, "^slice: dimension 2 of x \\[2,3\\]"},
      {"expand",
       [=] {
         expand(x, {4, 3});
       },
       "^expand: \\[2,3\\] to \\[4,3\\]"},
      {"split",
       [=] {
         split(x, 1, {1, 1});
       },
       "^split: parts \\[1,1\\] of dimension 1 of x \\[2,3\\]"},
      {"split_over",
       [=] {
         split(x, 1, {2, 2});
       },
       "^split: parts \\[2,2\\] of dimension 1"},
      {"split_equal", [=] { split(x, 1, 2); }, "^split: dimension 1 of x \\[2,3\\] into 2 parts"},
      {"concat",
       [=] {
         concat({x, y}, 1);
       },
       "^concat: parts \\[2,3\\] and \\[4,3\\] differ outside"},
      {"concat_dtype",
       [=] {
         concat({x, wide}, 0);
       },
       "^concat: parts are f32 and f64"},
      {"concat_none", [] { concat({}, 0); }, "^concat: nothing to join"},
      {"stack",
       [=] {
         stack({x, y}, 0);
       },
       "^stack: parts \\[2,3\\] and \\[4,3\\]"},
      {"pad", [=] { pad(x, 0, -1, 0); }, "^pad: -1 before and 0 after"},
      {"repeat", [=] { repeat_interleave(x, 0, 0); }, "^repeat_interleave: 0 repeats"},
      {"cast", [] { cast(Var(), DType::f32); }, "^cast: x is undefined"},
      {"to_device", [] { to_device(Var(), Device::cpu()); }, "^to_device: x is undefined"},
  };
}

std::vector<OpError> indexing_errors() {
  const Tensor x = Tensor::zeros({2, 3}), ids = Tensor::from(std::vector<int64_t>{0, 2}, {2});
  const Tensor minus = Tensor::from(std::vector<int64_t>{0, 0, -1}, {1, 3});
  return {
      {"range", [=] { index_select(x, 0, ids); },
       "^index_select: index 2 at position 1 lies outside \\[0,2\\)"},
      {"negative", [=] { gather(x, 0, minus); },
       "^gather: index -1 at position 2 lies outside \\[0,2\\)"},
      {"dtype", [=] { index_select(x, 0, x); }, "^index_select: index \\[2,3\\] is f32, want i64"},
      {"rank", [=] { index_select(x, 0, minus); }, "^index_select: ids is \\[1,3\\], want one"},
      {"shape", [=] { gather(x, 0, ids); },
       "^gather: index is \\[2\\], x is \\[2,3\\]; want the same"},
      {"dim", [=] { index_select(x, 2, ids); }, "^index_select: dimension 2 of x \\[2,3\\]"},
      {"undefined", [=] { gather(x, 0, {}); }, "^gather: index is undefined"},
  };
}

}  // namespace

std::vector<OpRow> movement_rows(Draw& draw) {
  OpRow movement{.op = "movement", .cases = view_cases(draw), .errors = movement_errors()};
  for (OpCase& c : join_cases(draw)) movement.cases.push_back(std::move(c));
  return {movement, {.op = "indexing", .cases = indexing_cases(draw), .errors = indexing_errors()}};
}

}  // namespace ebb::testing
