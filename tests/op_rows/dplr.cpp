// Rows of dplr: RWKV-7's inputs and a general low rank.
#include "ops/dplr.h"

#include "tests/op_rows/delta_inputs.h"
#include "tests/reference/dplr.h"

namespace ebb::testing {
namespace {

// RWKV-7: a = −k̂ and b = k̂∘rate for unit k̂. Else a and b are unrelated and short enough that the
// state stays bounded.
void low_rank(Draw& draw, const Shape& shape, bool rwkv, OpCase& c) {
  Tensor a = unit_rows(draw.normal(shape)), b = unit_rows(draw.normal(shape));
  if (rwkv) {
    const Tensor rate = draw.uniform(shape, 0.05, 0.95);
    for (int64_t i = 0; i < a.numel(); ++i) {
      b.data<double>()[i] = a.data<double>()[i] * rate.data<double>()[i];
      a.data<double>()[i] *= -1;
    }
  } else {
    for (int64_t i = 0; i < a.numel(); ++i) b.data<double>()[i] *= 0.5;
  }
  c.inputs.push_back({"a", a});
  c.inputs.push_back({"b", b});
}

OpCase dplr_case(Draw& draw, const DeltaCase& s, bool rwkv, double bound = 0) {
  OpCase c;
  c.name = (rwkv ? "rwkv_" : "general_") + s.name + (bound < 0 ? "_bounded" : "");
  const Shape keys{s.batch, s.time, s.heads, s.key_dim};
  const Shape values{s.batch, s.time, s.heads, s.value_dim};
  const int64_t n = s.cu.empty() ? s.batch : int64_t(s.cu.size()) - 1;
  const Shape state{n, s.heads, s.key_dim, s.value_dim};
  const double unit = 1 / std::sqrt(double(s.key_dim));
  Tensor w;
  if (s.decay != Decay::none)
    w = bound < 0 ? draw.uniform(keys, bound, -0.01) : log_decays(draw, keys, s.decay);
  c.inputs = {{"r", draw.normal(keys)},
              {.name = "w", .value = w, .parameter = true},
              {"k", draw.normal(keys, unit)},
              {"v", draw.normal(values)}};
  low_rank(draw, keys, rwkv, c);
  c.inputs.push_back(
      {.name = "h0", .value = s.h0 ? draw.normal(state) : Tensor(), .parameter = true});
  const double scale = rwkv ? 1 : unit;
  c.run = [s, scale, keys, bound](std::span<const Var> in) {
    // A decay of exactly 1 is a constant here: finite differences would make w positive.
    const DType gate = accumulate_type(in[0].dtype());
    const Var w = in[1].defined() ? in[1] : Var(Tensor::zeros(keys, gate, in[0].device()));
    // Rounding may carry a decay a little below the bound that it was drawn above.
    DplrOptions options{.scale = scale,
                        .want_final_state = s.final_state,
                        .chunk = s.chunk,
                        .lower_bound = bound * 1.01};
    if (!s.cu.empty()) options.layout = SeqLayout::packed(s.cu, in[0].device());
    const DplrOutput y = dplr(in[0], w, in[2], in[3], in[4], in[5], in[6], options);
    return s.final_state ? std::vector{y.o, y.ht} : std::vector{y.o};
  };
  c.reference = [s, scale, keys](std::span<const Tensor> in) {
    const Tensor w = in[1].defined() ? in[1] : Tensor::zeros(keys, DType::f64);
    const reference::Dplr y({in[0], w, in[2], in[3], in[4], in[5], in[6], scale, s.cu});
    return s.final_state ? std::vector{y.o, y.ht} : std::vector{y.o};
  };
  c.jacobian = s.batch * s.time * s.heads * s.value_dim <= 12;
  return c;
}

// One valid call with one thing changed.
struct Call {
  Tensor r = Tensor::zeros({1, 4, 2, 8}), w = Tensor::zeros({1, 4, 2, 8});
  Tensor k = Tensor::zeros({1, 4, 2, 8}), v = Tensor::zeros({1, 4, 2, 6});
  Tensor a = Tensor::zeros({1, 4, 2, 8}), b = Tensor::zeros({1, 4, 2, 8}), h0 = {};
  DplrOptions options = {};
};

template <class F>
OpError call_error(const char* name, const char* pattern, F&& change) {
  return {name,
          [change] {
            Call c;
            change(c);
            dplr(c.r, c.w, c.k, c.v, c.a, c.b, c.h0, c.options);
          },
          std::string("^dplr: ") + pattern};
}

template <class F>
OpError step_error(const char* name, const char* pattern, F&& change) {
  return {name,
          [change] {
            Tensor t[] = {Tensor::zeros({1, 2, 8}),   Tensor::zeros({1, 2, 8}),
                          Tensor::zeros({1, 2, 8}),   Tensor::zeros({1, 2, 6}),
                          Tensor::zeros({1, 2, 8}),   Tensor::zeros({1, 2, 8}),
                          Tensor::zeros({1, 2, 8, 6})};
            change(t);
            dplr_step(t[0], t[1], t[2], t[3], t[4], t[5], t[6]);
          },
          std::string("^dplr_step: ") + pattern};
}

std::vector<OpError> dplr_errors() {
  return {
      call_error("undefined", "a is undefined", [](Call& c) { c.a = {}; }),
      call_error("keys", "k is \\[1,4,2,6\\], want \\[1,4,2,8\\] as r",
                 [](Call& c) {
                   c.k = Tensor::zeros({1, 4, 2, 6});
                 }),
      call_error("heads", "v is \\[1,4,4,6\\], r is \\[1,4,2,8\\]; want as many heads",
                 [](Call& c) {
                   c.v = Tensor::zeros({1, 4, 4, 6});
                 }),
      call_error("low_rank", "b is \\[1,4,2,6\\], want \\[1,4,2,8\\]",
                 [](Call& c) {
                   c.b = Tensor::zeros({1, 4, 2, 6});
                 }),
      call_error("low_rank_dtype", "a is bf16, want f32 as r",
                 [](Call& c) { c.a = c.a.to(DType::bf16); }),
      call_error("decay_dtype", "w is bf16, want f32 beside f32 values",
                 [](Call& c) { c.w = c.w.to(DType::bf16); }),
      call_error("head_size", "head size V is 257, want 1...256",
                 [](Call& c) {
                   c.v = Tensor::zeros({1, 4, 2, 257});
                 }),
      call_error("state", "h0 is \\[1,2,6,8\\], want \\[1,2,8,6\\]",
                 [](Call& c) {
                   c.h0 = Tensor::zeros({1, 2, 6, 8});
                 }),
      call_error("positive", "w\\[0,2,1,5\\] = 0.5 is positive; want log decays <= 0",
                 [](Call& c) { c.w.select(1, 2).select(1, 1).select(1, 5).fill_(0.5); }),
      call_error("bound_sign", "lower_bound is 1, want a log decay",
                 [](Call& c) { c.options.lower_bound = 1; }),
      call_error("below_bound", "w.* is -3, below the declared lower_bound -2",
                 [](Call& c) {
                   c.options.lower_bound = -2;
                   c.w.select(1, 3).fill_(-3);
                 }),
      call_error("chunk", "chunk is 50, want 16, 32, 64 or 128",
                 [](Call& c) { c.options.chunk = 50; }),
      call_error("layout", "cu_seqlens ends at 3, the input has 1x4 tokens",
                 [](Call& c) {
                   c.options.layout = SeqLayout::packed({0, 3});
                 }),
      step_error("step_state", "state is \\[1,2,6,8\\], want \\[1,2,8,6\\]",
                 [](Tensor* t) {
                   t[6] = Tensor::zeros({1, 2, 6, 8});
                 }),
      step_error("step_positive", "w\\[0,0,0\\] = 0.5 is positive",
                 [](Tensor* t) { t[1].fill_(0.5); }),
  };
}

}  // namespace

std::vector<OpRow> dplr_rows(Draw& draw) {
  OpRow row{.op = "dplr"};
  for (DeltaCase s : delta_cases()) {
    if (s.erase_max > 1 || s.name.find("gva") != std::string::npos)
      continue;  // has no meaning here
    if (s.name == "t1") s.heads = 3;
    row.cases.push_back(dplr_case(draw, s, true));
    if (s.name == "t65" || s.name == "packed" || s.name == "t200_k64_v128" || s.name == "tiny" ||
        s.name == "extreme")
      row.cases.push_back(dplr_case(draw, s, false));
  }
  // In bf16 on the GPU by tensor cores, here and above where sizes are multiples of 8.
  // With a bound:
  for (const DeltaCase& s :
       {DeltaCase{.name = "t1", .batch = 2, .key_dim = 64, .value_dim = 64},
        DeltaCase{
            .name = "t65_k40", .time = 65, .heads = 2, .key_dim = 40, .value_dim = 24, .h0 = false},
        DeltaCase{.name = "packed",
        .time = 200,
        .heads = 2,
        .key_dim = 64,
        .value_dim = 32,
        .cu = {0, 0, 1, 66, 66, 130, 197, 200, 200}},
        DeltaCase{.name = "t130_nofinal",
        .time = 130,
        .key_dim = 16,
        .value_dim = 64,
        .final_state = false}})
    row.cases.push_back(dplr_case(draw, s, true, -0.60653066));
  const DeltaCase bounded{
      .name = "t150_k64", .time = 150, .heads = 2, .key_dim = 64, .value_dim = 64};
  for (const double bound : {-0.60653066, -4.0, -9.0}) {
    row.cases.push_back(dplr_case(draw, bounded, true, bound));
    row.cases.back().name += bound < -4 ? "_steep" : bound < -1 ? "_wide" : "";
  }
  // Without one:
  row.cases.push_back(dplr_case(draw, bounded, true));
  row.cases.push_back(dplr_case(draw,
                                {.name = "t150_k64_extreme",
                                 .time = 150,
                                 .heads = 2,
                                 .key_dim = 64,
                                 .value_dim = 64,
                                 .decay = Decay::extreme},
                                true));
  // In panels of 64 channels and columns, the last of them not whole:
  const DeltaCase wide{
      .name = "t150_k128_v128", .time = 150, .heads = 2, .key_dim = 128, .value_dim = 128};
  for (const double bound : {-0.60653066, -4.0, 0.0}) {
    row.cases.push_back(dplr_case(draw, wide, true, bound));
    row.cases.back().name += bound < -1 ? "_wide" : "";
  }
  row.cases.push_back(dplr_case(draw, wide, false));
  DeltaCase extreme = wide;
  extreme.name += "_extreme", extreme.decay = Decay::extreme;
  row.cases.push_back(dplr_case(draw, extreme, true));
  const std::vector<int64_t> cu = {0, 0, 1, 66, 66, 130, 197, 200, 200};
  for (const DeltaCase& s :
       {DeltaCase{.name = "t1_k128_v128", .batch = 2, .key_dim = 128, .value_dim = 128},
        DeltaCase{.name = "t70_k72_v80", .batch = 2, .time = 70, .key_dim = 72, .value_dim = 80},
        DeltaCase{.name = "t65_k128_v32",
        .time = 65,
        .heads = 2,
        .key_dim = 128,
        .value_dim = 32,
        .h0 = false},
        DeltaCase{.name = "t130_k40_v256",
        .time = 130,
        .key_dim = 40,
        .value_dim = 256,
        .final_state = false},
        DeltaCase{.name = "t130_k256_v128", .time = 130, .key_dim = 256, .value_dim = 128},
        DeltaCase{.name = "packed_k136_v72",
        .time = 200,
        .heads = 2,
        .key_dim = 136,
        .value_dim = 72,
        .cu = cu},
        DeltaCase{.name = "packed_k96_v200",
        .time = 200,
        .heads = 2,
        .key_dim = 96,
        .value_dim = 200,
        .cu = cu}})
    for (const double bound : {-0.60653066, 0.0})
      row.cases.push_back(dplr_case(draw, s, true, bound));
  row.errors = dplr_errors();
  return {row};
}

}  // namespace ebb::testing
