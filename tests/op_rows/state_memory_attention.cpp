// Rows of state-memory attention.
#include "ops/state_memory_attention.h"

#include <cmath>

#include "tests/op_table.h"
#include "tests/reference/state_memory_attention.h"

namespace ebb::testing {
namespace {

struct Case {
  std::string name = {};
  int64_t batch = 1, time = 1, heads = 1, n = 8, p = 8, chunk = 4;
  int64_t q_heads = 1, e_heads = 1, c_heads = 1, gate_heads = 1;  // gate_heads 0: no gate
  bool base = false, normalize = true, zero_row = false;
  double eps_row = 1e-12, scale = 0, size = 1;  // size of the memories' entries
  bool all_results = false;                     // r and lse too, which pass no gradient on
  std::vector<int64_t> cu = {};

  SeqLayout layout(Device device) const {
    return cu.empty() ? SeqLayout() : SeqLayout::packed(cu, device);
  }
  double logit_scale() const { return scale > 0 ? scale : 1 / std::sqrt(double(n)); }
};

std::vector<Case> cases() {
  return {
      {.name = "tiny", .time = 5, .n = 2, .p = 2, .chunk = 2, .gate_heads = 0},
      {.name = "tiny_gated", .time = 4, .n = 2, .p = 3, .chunk = 1, .base = true},
      {.name = "nothing_visible", .batch = 2, .time = 4, .heads = 2, .base = true},
      {.name = "first_token_after", .time = 5, .heads = 2, .base = true},
      {.name = "shared", .batch = 2, .time = 40, .heads = 4, .n = 16, .p = 8, .chunk = 8},
      {.name = "shared_base",
       .batch = 2,
       .time = 39,
       .heads = 2,
       .n = 16,
       .p = 8,
       .chunk = 7,
       .base = true},
      {.name = "per_head",
       .time = 75,
       .heads = 3,
       .n = 16,
       .p = 12,
       .chunk = 16,
       .q_heads = 3,
       .e_heads = 3,
       .c_heads = 3,
       .gate_heads = 3},
      {.name = "grouped",
       .time = 50,
       .heads = 4,
       .n = 5,
       .p = 7,
       .chunk = 6,
       .q_heads = 2,
       .e_heads = 4,
       .c_heads = 2,
       .gate_heads = 4,
       .base = true},
      {.name = "own_read_vector",
       .time = 50,
       .heads = 4,
       .n = 16,
       .chunk = 12,
       .c_heads = 4,
       .gate_heads = 1},
      {.name = "ungated", .time = 30, .heads = 2, .gate_heads = 0, .base = true},
      {.name = "unnormalized",
       .time = 40,
       .heads = 2,
       .n = 8,
       .chunk = 8,
       .normalize = false,
       .size = 0.3},
      {.name = "zero_row", .time = 24, .heads = 2, .chunk = 6, .zero_row = true, .eps_row = 1e-2},
      {.name = "small_memories",
       .time = 40,
       .heads = 2,
       .n = 16,
       .p = 16,
       .chunk = 8,
       .size = 1e-3},
      {.name = "sharp", .time = 60, .heads = 2, .n = 16, .p = 16, .chunk = 5, .scale = 2},
      {.name = "chunk1", .time = 70, .n = 4, .p = 4, .chunk = 1},
      {.name = "chunk100", .time = 330, .heads = 2, .n = 16, .p = 8, .chunk = 100},
      {.name = "chunk_longer", .time = 20, .heads = 2, .chunk = 64, .base = true},
      {.name = "packed",
       .time = 120,
       .heads = 2,
       .n = 8,
       .p = 12,
       .chunk = 8,
       .base = true,
       .cu = {0, 0, 1, 9, 42, 42, 50, 119, 120, 120}},
      {.name = "packed_rows",
       .batch = 2,
       .time = 60,
       .heads = 2,
       .n = 7,
       .p = 5,
       .chunk = 13,
       .q_heads = 2,
       .cu = {0, 65, 65, 120}},
      {.name = "model", .time = 140, .heads = 4, .n = 128, .p = 64, .chunk = 32, .base = true},
      // What the tensor-core kernels take: N <= 128 and P <= 64 in steps of 8; tokens of several
      // runs in one tile, several memories in one block, heads that share vectors or do not.
      {.name = "tiles_many_runs",
       .batch = 2,
       .time = 200,
       .heads = 4,
       .n = 64,
       .p = 64,
       .chunk = 16,
       .base = true},
      {.name = "tiles_padded",
       .time = 170,
       .heads = 2,
       .n = 80,
       .p = 48,
       .chunk = 48,
       .scale = 0.02,
       .size = 30},
      {.name = "tiles_per_head",
       .time = 150,
       .heads = 3,
       .n = 72,
       .p = 40,
       .chunk = 32,
       .q_heads = 3,
       .e_heads = 3,
       .c_heads = 3,
       .gate_heads = 3},
      {.name = "tiles_grouped",
       .batch = 2,
       .time = 150,
       .heads = 4,
       .n = 32,
       .p = 64,
       .chunk = 16,
       .q_heads = 2,
       .e_heads = 4,
       .gate_heads = 0,
       .base = true},
      {.name = "tiles_unnormalized",
       .time = 150,
       .heads = 2,
       .n = 128,
       .p = 64,
       .chunk = 32,
       .normalize = false,
       .scale = 0.3,
       .size = 0.03},
      {.name = "tiles_zero_row",
       .time = 150,
       .heads = 2,
       .n = 64,
       .p = 32,
       .chunk = 24,
       .zero_row = true,
       .eps_row = 1e-2},
      {.name = "tiles_packed",
       .batch = 2,
       .time = 200,
       .heads = 2,
       .n = 128,
       .p = 64,
       .chunk = 16,
       .q_heads = 2,
       .base = true,
       .cu = {0, 0, 1, 65, 193, 193, 250, 400}},
      {.name = "n256_p256", .time = 90, .n = 256, .p = 256, .chunk = 21, .scale = 1.0 / 256},
      {.name = "odd_slabs",
       .time = 200,
       .heads = 2,
       .n = 100,
       .p = 130,
       .chunk = 70,
       .q_heads = 2,
       .base = true,
       .scale = 0.02},
      {.name = "results",
       .batch = 2,
       .time = 61,
       .heads = 2,
       .n = 12,
       .chunk = 9,
       .base = true,
       .all_results = true},
      {.name = "results_packed",
       .time = 61,
       .heads = 2,
       .chunk = 5,
       .gate_heads = 0,
       .all_results = true,
       .cu = {0, 3, 3, 40, 61}},
      {.name = "empty", .batch = 2, .time = 0, .heads = 2, .base = true},
      {.name = "no_batch", .batch = 0, .time = 9, .heads = 2},
  };
}

OpCase attention_case(Draw& draw, const Case& s) {
  OpCase c;
  c.name = s.name;
  const auto rows = [&](int64_t heads, int64_t width) {
    return draw.normal({s.batch, s.time, heads, width});
  };
  const int64_t M = s.layout({}).chunk_count(s.batch, s.time, s.chunk);
  Tensor memories = draw.normal({M, s.heads, s.n, s.p}, s.size);
  if (s.zero_row) memories.select(0, 1).select(0, 0).select(0, 2).fill_(0);
  c.inputs = {{"q", rows(s.q_heads, s.n)},
              {"e", rows(s.e_heads, s.p)},
              {"c", rows(s.c_heads, s.n)},
              // Differences of 1e-4 mean nothing beside entries of 1e-3.
              {.name = "contributions", .value = memories, .differentiable = s.size > 1e-2},
              {"gate", s.gate_heads ? draw.normal({s.batch, s.time, s.gate_heads}) : Tensor()},
              {"base", s.base ? rows(s.heads, s.p) : Tensor()}};
  c.run = [s](std::span<const Var> in) {
    const StateMemoryAttention r = state_memory_attention(in[0], in[1], in[2], in[3], s.chunk,
                                                          {.gate = in[4],
                                                           .base = in[5],
                                                           .scale = s.scale,
                                                           .eps_row = s.eps_row,
                                                           .normalize = s.normalize,
                                                           .layout = s.layout(in[0].device())});
    return s.all_results ? std::vector<Var>{r.o, r.r, r.lse} : std::vector<Var>{r.o};
  };
  c.reference = [s](std::span<const Tensor> in) {
    const reference::StateMemory r({.q = in[0],
                                    .e = in[1],
                                    .c = in[2],
                                    .memories = in[3],
                                    .gate = in[4],
                                    .base = in[5],
                                    .eps_row = s.eps_row,
                                    .scale = s.logit_scale(),
                                    .normalize = s.normalize,
                                    .memory_chunk = s.chunk,
                                    .cu = s.cu});
    return s.all_results ? std::vector{r.o, r.r, r.lse} : std::vector{r.o};
  };
  c.gradients = !s.all_results;
  c.jacobian = s.batch * s.time * s.heads * s.p <= 12;
  return c;
}

// One valid call with one thing changed.
struct Call {
  Tensor q = Tensor::zeros({1, 8, 1, 6}), e = Tensor::zeros({1, 8, 1, 5});
  Tensor c = Tensor::zeros({1, 8, 2, 6}), memories = Tensor::zeros({2, 4, 6, 5});
  int64_t chunk = 4;
  StateMemoryOptions options = {};
  void operator()() const { state_memory_attention(q, e, c, memories, chunk, options); }
};

OpError error(const char* name, const std::string& pattern, std::function<void(Call&)> change) {
  return {name,
          [change] {
            Call call;
            change(call);
            call();
          },
          "^state_memory_attention: " + pattern};
}

std::vector<OpError> errors() {
  return {
      error("undefined", "contributions is undefined", [](Call& c) { c.memories = {}; }),
      error("q", "q is \\[1,8,6\\], want \\[B,T,\\*,N\\]",
            [](Call& c) {
              c.q = Tensor::zeros({1, 8, 6});
            }),
      error("width", "q is \\[1,8,1,7\\], want \\[1,8,\\*,6\\] with a divisor of 4 heads as \\*",
            [](Call& c) {
              c.q = Tensor::zeros({1, 8, 1, 7});
            }),
      error("e", "e is \\[1,8,1,6\\], want \\[1,8,\\*,5\\]",
            [](Call& c) {
              c.e = Tensor::zeros({1, 8, 1, 6});
            }),
      error("heads", "c is \\[1,8,3,6\\], want .* with a divisor of 4 heads",
            [](Call& c) {
              c.c = Tensor::zeros({1, 8, 3, 6});
            }),
      error("time", "c is \\[1,7,1,6\\], want \\[1,8,\\*,6\\]",
            [](Call& c) {
              c.c = Tensor::zeros({1, 7, 1, 6});
            }),
      error("runs", "contributions is \\[2,4,6,5\\], want \\[3,H,N,P\\]: a run of 3 tokens each",
            [](Call& c) { c.chunk = 3; }),
      error("size", "size N is 257, want 1\\.\\.\\.256",
            [](Call& c) {
              c.memories = Tensor::zeros({2, 4, 257, 5});
            }),
      error("dtype", "e is f64, q f32; want one dtype",
            [](Call& c) {
              c.e = Tensor::zeros({1, 8, 1, 5}, DType::f64);
            }),
      error("memory_dtype", "contributions is f64, q f32; want one dtype, or f32 beside bf16",
            [](Call& c) {
              c.memories = Tensor::zeros({2, 4, 6, 5}, DType::f64);
            }),
      error("gate", "gate is \\[1,8\\], want \\[1,8,\\*\\]",
            [](Call& c) {
              c.options.gate = Tensor::zeros({1, 8});
            }),
      error("base", "base is \\[1,8,4,6\\], want \\[1,8,4,5\\]",
            [](Call& c) {
              c.options.base = Tensor::zeros({1, 8, 4, 6});
            }),
      error("chunk", "memory_chunk is 0, want 1\\.\\.\\.2\\^30", [](Call& c) { c.chunk = 0; }),
      error("eps", "eps is 0, eps_row 1e-12; want more than 0", [](Call& c) { c.options.eps = 0; }),
      error("scale", "scale is -1, want more than 0", [](Call& c) { c.options.scale = -1; }),
      error("layout", "cu_seqlens ends at 7, the input has 1x8 tokens",
            [](Call& c) {
              c.options.layout = SeqLayout::packed({0, 7});
            }),
  };
}

}  // namespace

std::vector<OpRow> state_memory_attention_rows(Draw& draw) {
  OpRow row{.op = "state_memory_attention"};
  for (const Case& s : cases()) row.cases.push_back(attention_case(draw, s));
  row.errors = errors();
  return {row};
}

}  // namespace ebb::testing
