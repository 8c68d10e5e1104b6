// Rows of causal softmax attention and of rotary embedding.
#include "ops/attention.h"
#include "ops/rotary.h"
#include "tests/op_table.h"
#include "tests/reference/attention.h"

namespace ebb::testing {
namespace {

struct Case {
  std::string name = {};
  int64_t batch = 1, time = 1, heads = 1, key_heads = 1, width = 16;
  int64_t key_time = 0;  // 0: as time
  int64_t window = 0;
  double scale = 0;
  std::vector<int64_t> cu = {}, keys = {};
  double spread = 1;  // of q
};

std::vector<Case> cases() {
  return {
      {.name = "t1", .batch = 2, .heads = 4, .key_heads = 2, .width = 32},
      {.name = "tiny", .time = 3, .width = 2},
      {.name = "t17_odd", .time = 17, .heads = 2, .key_heads = 2, .width = 7},
      {.name = "t64", .batch = 2, .time = 64, .heads = 2, .width = 64},
      {.name = "t65", .time = 65, .heads = 2, .key_heads = 2, .width = 32},
      {.name = "t130_grouped", .batch = 2, .time = 130, .heads = 6, .key_heads = 2, .width = 16},
      {.name = "t200_p128", .time = 200, .width = 128},
      {.name = "t150_p256", .time = 150, .width = 256},
      {.name = "t100_p80", .time = 100, .heads = 2, .width = 80},
      {.name = "scale1", .time = 70, .width = 8, .scale = 1},
      {.name = "sharp", .time = 150, .width = 16, .spread = 30},
      {.name = "window1", .time = 70, .width = 16, .window = 1},
      {.name = "window24", .batch = 2, .time = 150, .heads = 2, .width = 16, .window = 24},
      {.name = "window64", .time = 200, .heads = 2, .width = 32, .window = 64},
      {.name = "window100", .time = 300, .heads = 2, .width = 64, .window = 100},
      {.name = "window_longer", .time = 50, .width = 16, .window = 1000},
      {.name = "extend", .batch = 2, .time = 5, .heads = 2, .width = 16, .key_time = 70},
      {.name = "extend_window",
       .time = 70,
       .heads = 2,
       .key_heads = 2,
       .width = 64,
       .key_time = 200,
       .window = 90},
      {.name = "decode", .batch = 3, .time = 1, .heads = 4, .width = 32, .key_time = 100},
      {.name = "packed",
       .time = 300,
       .heads = 2,
       .width = 16,
       .cu = {0, 0, 1, 66, 66, 130, 297, 300, 300}},
      {.name = "packed_window",
       .batch = 2,
       .time = 150,
       .heads = 4,
       .key_heads = 2,
       .width = 32,
       .window = 40,
       .cu = {0, 170, 171, 300}},
      {.name = "packed_extend",
       .time = 100,
       .heads = 2,
       .width = 64,
       .key_time = 250,
       .cu = {0, 0, 30, 30, 100},
       .keys = {0, 10, 110, 115, 250}},
      {.name = "empty", .batch = 2, .time = 0, .heads = 2},
      {.name = "no_batch", .batch = 0, .time = 5, .heads = 2},
  };
}

OpCase attention_case(Draw& draw, const Case& s) {
  OpCase c;
  c.name = s.name;
  const int64_t keys = s.key_time ? s.key_time : s.time;
  const Shape key_shape{s.batch, keys, s.key_heads, s.width};
  c.inputs = {{"q", draw.normal({s.batch, s.time, s.heads, s.width}, s.spread)},
              {"k", draw.normal(key_shape)},
              {"v", draw.normal(key_shape)}};
  c.run = [s](std::span<const Var> in) {
    AttentionOptions options{.scale = s.scale, .window = s.window};
    const Device device = in[0].device();
    if (!s.cu.empty()) options.layout = SeqLayout::packed(s.cu, device);
    if (!s.keys.empty()) options.key_layout = SeqLayout::packed(s.keys, device);
    const Attention r = attention(in[0], in[1], in[2], options);
    return std::vector<Var>{r.o};
  };
  c.reference = [s](std::span<const Tensor> in) {
    const double scale = s.scale != 0 ? s.scale : 1 / std::sqrt(double(s.width));
    const reference::CausalAttention r({in[0], in[1], in[2], scale, s.window, s.cu, s.keys});
    return std::vector<Tensor>{r.o};
  };
  c.jacobian = s.batch * s.time * s.heads * s.width <= 12;
  return c;
}

struct RotaryCase {
  std::string name = {};
  Shape shape = {};
  RotaryForm form = RotaryForm::rotate;
  double base = 10000;
  int64_t offset = 0;
  std::vector<int64_t> start = {}, cu = {};
};

std::vector<RotaryCase> rotary_cases() {
  return {
      {.name = "plain", .shape = {2, 40, 2, 32}},
      {.name = "tiny", .shape = {1, 3, 1, 2}, .offset = 4},
      {.name = "odd_pairs", .shape = {1, 37, 3, 6}, .offset = 7},
      {.name = "far", .shape = {1, 20, 2, 64}, .offset = 1000000},
      {.name = "base", .shape = {2, 33, 2, 16}, .base = 500000},
      {.name = "starts", .shape = {3, 5, 2, 16}, .start = {0, 100, 7}},
      {.name = "packed", .shape = {2, 30, 2, 16}, .cu = {0, 0, 17, 18, 60}},
      {.name = "packed_starts",
       .shape = {1, 50, 1, 128},
       .start = {5, 9, 0},
       .cu = {0, 20, 20, 50}},
      {.name = "cosine", .shape = {2, 40, 2, 32}, .form = RotaryForm::cosine},
      {.name = "cosine_odd",
       .shape = {1, 21, 3, 10},
       .form = RotaryForm::cosine,
       .offset = 3,
       .cu = {0, 9, 21}},
      {.name = "empty", .shape = {2, 0, 2, 8}},
      {.name = "no_heads", .shape = {2, 3, 0, 8}},
  };
}

OpCase rotary_case(Draw& draw, const RotaryCase& s) {
  OpCase c;
  c.name = s.name;
  c.inputs = {{"x", draw.normal(s.shape)}};
  c.run = [s](std::span<const Var> in) {
    RotaryOptions options{.base = s.base, .form = s.form, .offset = s.offset};
    const Device device = in[0].device();
    if (!s.start.empty()) options.start = Tensor::from(s.start, {int64_t(s.start.size())}, device);
    if (!s.cu.empty()) options.layout = SeqLayout::packed(s.cu, device);
    return std::vector<Var>{rotary(in[0], options)};
  };
  c.reference = [s](std::span<const Tensor> in) {
    return std::vector<Tensor>{
        reference::rotary(in[0], s.base, s.offset, s.form == RotaryForm::cosine, s.start, s.cu)};
  };
  c.jacobian = s.shape.numel() <= 12;
  return c;
}

// One valid call with one thing changed.
struct Call {
  Tensor q = Tensor::zeros({1, 4, 4, 8}), k = Tensor::zeros({1, 4, 2, 8}),
         v = Tensor::zeros({1, 4, 2, 8});
  AttentionOptions options = {};
};

std::vector<OpError> attention_errors() {
  const auto e = [](const char* name, const char* pattern, std::function<void(Call&)> change) {
    return OpError{name,
                   [change] {
                     Call c;
                     change(c);
                     attention(c.q, c.k, c.v, c.options);
                   },
                   std::string("^attention: ") + pattern};
  };
  return {
      e("undefined", "v is undefined", [](Call& c) { c.v = {}; }),
      e("batch", "k is \\[2,4,2,8\\], q is \\[1,4,4,8\\]; want the same batch and head size",
        [](Call& c) {
          c.k = Tensor::zeros({2, 4, 2, 8});
        }),
      e("v", "v is \\[1,4,2,7\\], want \\[1,4,2,8\\] as k",
        [](Call& c) {
          c.v = Tensor::zeros({1, 4, 2, 7});
        }),
      e("heads", "4 heads over 3 key/value heads; want a multiple",
        [](Call& c) {
          c.k = c.v = Tensor::zeros({1, 4, 3, 8});
        }),
      e("width", "head size is 257, want 1\\.\\.\\.256",
        [](Call& c) {
          c.q = Tensor::zeros({1, 4, 2, 257});
          c.k = c.v = c.q;
        }),
      e("keys", "sequence 0 has 4 queries and 3 keys; want at least as many keys",
        [](Call& c) {
          c.k = c.v = Tensor::zeros({1, 3, 2, 8});
        }),
      e("window", "window is -1, want at least 1, or 0 for none",
        [](Call& c) { c.options.window = -1; }),
      e("layout", "cu_seqlens ends at 3, the input has 1x4 tokens",
        [](Call& c) {
          c.options.layout = SeqLayout::packed({0, 3});
        }),
      e("layouts", "the keys are packed, the queries are not",
        [](Call& c) {
          c.options.key_layout = SeqLayout::packed({0, 4});
        }),
      e("counts", "2 sequences of queries, 1 of keys",
        [](Call& c) {
          c.options.layout = SeqLayout::packed({0, 1, 4});
          c.options.key_layout = SeqLayout::packed({0, 4});
        }),
      {"step_cache",
       [] {
         attention_step(Tensor::zeros({1, 4, 8}), Tensor::zeros({1, 2, 8}),
                        Tensor::zeros({1, 2, 8}), Tensor::zeros({1, 5, 2, 7}),
                        Tensor::zeros({1, 5, 2, 8}), Tensor::zeros({1}, DType::i64));
       },
       "^attention_step: k_cache is \\[1,5,2,7\\] f32, want \\[1,C,2,8\\] f32"},
      {"step_position",
       [] {
         attention_step(Tensor::zeros({1, 4, 8}), Tensor::zeros({1, 2, 8}),
                        Tensor::zeros({1, 2, 8}), Tensor::zeros({1, 5, 2, 8}),
                        Tensor::zeros({1, 5, 2, 8}), Tensor::zeros({1}));
       },
       "^attention_step: position is f32, want i64"},
  };
}

std::vector<OpError> rotary_errors() {
  const auto e = [](const char* name, const char* pattern, Shape shape, RotaryOptions options) {
    return OpError{name, [shape, options] { rotary(Tensor::zeros(shape), options); },
                   std::string("^rotary: ") + pattern};
  };
  return {
      e("shape", "x is \\[4,2,8\\], want \\[B,T,H,P\\]", {4, 2, 8}, {}),
      e("odd", "head size 7 of x \\[1,4,2,7\\]; want an even one, at most 512", {1, 4, 2, 7}, {}),
      e("start", "start is \\[2\\], want \\[1\\]", {1, 4, 2, 8},
        {.start = Tensor::zeros({2}, DType::i64)}),
      e("start_dtype", "start is f32, want i64", {1, 4, 2, 8}, {.start = Tensor::zeros({1})}),
      e("base", "base is 0, want > 0", {1, 4, 2, 8}, {.base = 0}),
  };
}

}  // namespace

std::vector<OpRow> attention_rows(Draw& draw) {
  OpRow row{.op = "attention", .errors = attention_errors()};
  for (const Case& s : cases()) row.cases.push_back(attention_case(draw, s));
  OpRow rotary_row{.op = "rotary", .errors = rotary_errors()};
  for (const RotaryCase& s : rotary_cases()) rotary_row.cases.push_back(rotary_case(draw, s));
  return {row, rotary_row};
}

}  // namespace ebb::testing
