// The same numbers, bit for bit, in 100 runs of every recurrence and of attention on the GPU, both
// passes: shapes with many chunks, segments and runs at once, so that an unordered sum, a missing
// barrier or unwritten memory gets its chance. The op suite reruns each of its own cases once.
#include <cmath>
#include <functional>

#include "autograd/tape.h"
#include "ops/attention.h"
#include "ops/delta_rule_channel.h"
#include "ops/dplr.h"
#include "ops/ssd.h"
#include "ops/state_memory_attention.h"
#include "tensor/random.h"
#include "tests/cuda_fixture.h"
#include "tests/op_harness.h"

namespace ebb::testing {
namespace {

constexpr int kRuns = 100;

using Inputs = std::span<const Var>;
struct RerunCase {
  std::string name;
  std::vector<OpInput> inputs;
  std::function<std::vector<Var>(Inputs)> run;
};
void PrintTo(const RerunCase& c, std::ostream* out) { *out << c.name; }

struct Size {
  int64_t batch = 1, time = 1, heads = 1, value_heads = 1, key_dim = 64, value_dim = 64;
  std::vector<int64_t> cu = {};

  int64_t sequences() const { return cu.empty() ? batch : int64_t(cu.size()) - 1; }
  SeqLayout layout(Device device) const {
    return cu.empty() ? SeqLayout() : SeqLayout::packed(cu, device);
  }
};

enum class Family { gdn, kda, gdn2 };

// Finished gates, or raw ones of which the operator makes decays and betas itself.
RerunCase delta(std::string name, Family family, Size s, bool raw = false) {
  Draw draw(11);
  const Shape qk{s.batch, s.time, s.heads, s.key_dim};
  const Shape per_head{s.batch, s.time, s.value_heads};
  const Shape per_key{s.batch, s.time, s.value_heads, s.key_dim};
  const Shape values{s.batch, s.time, s.value_heads, s.value_dim};
  const Shape decays = family == Family::gdn ? per_head : per_key;
  const auto gate = [&](const Shape& shape, double low, double high) {
    return raw ? OpInput{.name = "gate", .value = draw.normal(shape)}
               : OpInput{
                     .name = "gate", .value = draw.uniform(shape, low, high), .parameter = true};
  };
  RerunCase c{std::move(name), {}, {}};
  const double unit = 1 / std::sqrt(double(s.key_dim));
  c.inputs = {{"q", draw.normal(qk, unit)},
              {"k", draw.normal(qk, unit)},
              {"v", draw.normal(values)},
              gate(decays, -0.8, -0.001),
              gate(family == Family::gdn2 ? per_key : per_head, 0.05, 0.95)};
  if (family == Family::gdn2) c.inputs.push_back(gate(values, 0.05, 0.95));
  const size_t rest = c.inputs.size();
  c.inputs.push_back({.name = "h0",
                      .value = draw.normal({s.sequences(), s.value_heads, s.key_dim, s.value_dim}),
                      .parameter = true});
  if (raw) {
    const Shape bias =
        family == Family::gdn ? Shape{s.value_heads} : Shape{s.value_heads, s.key_dim};
    c.inputs.push_back(
        {.name = "A_log", .value = draw.uniform({s.value_heads}, 0, 1), .parameter = true});
    c.inputs.push_back({.name = "dt_bias", .value = draw.uniform(bias, -5, -2), .parameter = true});
  }
  c.run = [=](Inputs in) {
    DeltaRuleOptions options{
        .scale = unit, .want_final_state = true, .layout = s.layout(in[0].device())};
    options.normalize_qk = options.sigmoid = raw;
    if (raw) options.A_log = in[rest + 1], options.dt_bias = in[rest + 2];
    const Var& h0 = in[rest];
    const DeltaRuleOutput r =
        family == Family::gdn   ? gated_delta_rule(in[0], in[1], in[2], in[3], in[4], h0, options)
        : family == Family::kda ? kda(in[0], in[1], in[2], in[3], in[4], h0, options)
                                : gdn2(in[0], in[1], in[2], in[3], in[4], in[5], h0, options);
    return std::vector{r.o, r.ht};
  };
  return c;
}

RerunCase dplr_rerun(std::string name, Size s, double bound) {
  Draw draw(12);
  const Shape keys{s.batch, s.time, s.heads, s.key_dim};
  const double unit = 1 / std::sqrt(double(s.key_dim));
  const Shape state{s.sequences(), s.heads, s.key_dim, s.value_dim};
  return {
      std::move(name),
      {{"r", draw.normal(keys)},
       {.name = "w", .value = draw.uniform(keys, -0.6, -0.01), .parameter = true},
       {"k", draw.normal(keys, unit)},
       {"v", draw.normal({s.batch, s.time, s.heads, s.value_dim})},
       {"a", draw.normal(keys, unit)},
       {"b", draw.normal(keys, 0.5 * unit)},
       {.name = "h0", .value = draw.normal(state), .parameter = true}},
      [=](Inputs in) {
        const DplrOutput r = dplr(
            in[0], in[1], in[2], in[3], in[4], in[5], in[6],
            {.want_final_state = true, .layout = s.layout(in[0].device()), .lower_bound = bound});
        return std::vector{r.o, r.ht};
      }};
}

// heads: groups of q and k; value_heads: those of v.
RerunCase linear_attention(std::string name, Size s, bool by_channel) {
  Draw draw(13);
  const Shape keys{s.batch, s.time, s.heads, s.key_dim};
  const Shape decays = by_channel ? Shape{s.batch, s.time, s.value_heads, s.key_dim}
                                  : Shape{s.batch, s.time, s.value_heads};
  const Shape state{s.sequences(), s.value_heads, s.key_dim, s.value_dim};
  return {std::move(name),
          {{"q", draw.normal(keys)},
           {"k", draw.normal(keys)},
           {"v", draw.normal({s.batch, s.time, s.value_heads, s.value_dim})},
           {.name = "g", .value = draw.uniform(decays, -0.8, -0.001), .parameter = true},
           {.name = "h0", .value = draw.normal(state), .parameter = true}},
          [=](Inputs in) {
            const LinearAttentionOutput r =
                gated_linear_attention(in[0], in[1], in[2], in[3], in[4],
                                       {.scale = 1 / std::sqrt(double(s.key_dim)),
                                        .want_final_state = true,
                                        .layout = s.layout(in[0].device())});
            return std::vector{r.o, r.ht};
          }};
}

// memory_chunk 0: no contributions.
RerunCase ssd_rerun(std::string name, Size s, int64_t memory_chunk) {
  Draw draw(14);
  const Shape keys{s.batch, s.time, s.heads, s.key_dim}, heads{s.value_heads};
  const Shape state{s.sequences(), s.value_heads, s.key_dim, s.value_dim};
  return {std::move(name),
          {{"x", draw.normal({s.batch, s.time, s.value_heads, s.value_dim})},
           {"dt", draw.normal({s.batch, s.time, s.value_heads}, 1, -3)},
           {.name = "A_log", .value = draw.uniform(heads, 0, 2.7), .parameter = true},
           {"B", draw.normal(keys)},
           {"C", draw.normal(keys)},
           {.name = "h0", .value = draw.normal(state), .parameter = true},
           {.name = "D", .value = draw.normal(heads), .parameter = true},
           {.name = "dt_bias", .value = draw.normal(heads, 0.1), .parameter = true}},
          [=](Inputs in) {
            const SsdOutput r = ssd(in[0], in[1], in[2], in[3], in[4], in[5],
                                    {.D = in[6],
                                     .dt_bias = in[7],
                                     .log_A = true,
                                     .want_final_state = true,
                                     .layout = s.layout(in[0].device()),
                                     .memory_chunk = memory_chunk});
            return memory_chunk ? std::vector{r.y, r.ht, r.contributions} : std::vector{r.y, r.ht};
          }};
}

// key_dim: N, value_dim: P; `heads` of the vectors, value_heads of the memories.
RerunCase state_memory(std::string name, Size s, int64_t chunk) {
  Draw draw(15);
  const Shape wide{s.batch, s.time, s.heads, s.key_dim};
  const int64_t runs = s.layout({}).chunk_count(s.batch, s.time, chunk);
  return {
      std::move(name),
      {{"q", draw.normal(wide)},
       {"e", draw.normal({s.batch, s.time, s.heads, s.value_dim})},
       {"c", draw.normal(wide)},
       {.name = "memories",
        .value = draw.normal({runs, s.value_heads, s.key_dim, s.value_dim}, 0.05),
        .parameter = true},
       {"gate", draw.normal({s.batch, s.time, s.heads})},
       {"base", draw.normal({s.batch, s.time, s.value_heads, s.value_dim})}},
      [=](Inputs in) {
        return std::vector{state_memory_attention(
                               in[0], in[1], in[2], in[3], chunk,
                               {.gate = in[4], .base = in[5], .layout = s.layout(in[0].device())})
                               .o};
      }};
}

// key_dim: the head's width; value_heads: heads of the queries.
RerunCase softmax_attention(std::string name, Size s, int64_t window) {
  Draw draw(16);
  const Shape keys{s.batch, s.time, s.heads, s.key_dim};
  return {std::move(name),
          {{"q", draw.normal({s.batch, s.time, s.value_heads, s.key_dim})},
           {"k", draw.normal(keys)},
           {"v", draw.normal(keys)}},
          [=](Inputs in) {
            const Attention r = attention(in[0], in[1], in[2],
                                          {.window = window, .layout = s.layout(in[0].device())});
            return std::vector{r.o};
          }};
}

std::vector<RerunCase> cases() {
  const std::vector<int64_t> cu = {0, 65, 65, 66, 333, 666};
  const Size model{2, 333, 2, 4, 64, 128, {}}, packed{2, 333, 2, 4, 64, 128, cu};
  const Size wide{2, 333, 2, 2, 128, 128, {}}, odd{2, 150, 2, 4, 20, 36, {}};
  // So few heads that the sequence is cut into segments, which run side by side.
  const Size lone{1, 3000, 1, 1, 64, 64, {}};
  std::vector<RerunCase> out;
  for (const auto& [family, name] : {std::pair{Family::gdn, "gated_delta_rule_"},
                                     {Family::kda, "kda_"},
                                     {Family::gdn2, "gdn2_"}}) {
    const std::string op = name;
    out.push_back(delta(op + "model", family, model));
    out.push_back(delta(op + "raw", family, model, true));
    out.push_back(delta(op + "packed", family, packed));
    out.push_back(delta(op + "wide", family, wide));
    out.push_back(delta(op + "odd", family, odd));
    out.push_back(delta(op + "segments", family, lone));
  }
  const Size rwkv{2, 333, 3, 3, 64, 64, {}}, rwkv_packed{2, 333, 3, 3, 64, 64, cu};
  out.push_back(dplr_rerun("dplr_model", rwkv, -0.6066));
  out.push_back(dplr_rerun("dplr_packed", rwkv_packed, -0.6066));
  out.push_back(dplr_rerun("dplr_far_bound", rwkv, -4));
  out.push_back(dplr_rerun("dplr_unbounded", rwkv, 0));
  out.push_back(dplr_rerun("dplr_segments", lone, -0.6066));
  const Size rwkv_wide{2, 333, 2, 2, 128, 128, {}};
  out.push_back(dplr_rerun("dplr_wide", rwkv_wide, -0.6066));
  out.push_back(dplr_rerun("dplr_wide_packed", {2, 333, 2, 2, 72, 200, cu}, -0.6066));
  out.push_back(dplr_rerun("dplr_wide_far_bound", rwkv_wide, -4));
  out.push_back(dplr_rerun("dplr_wide_unbounded", rwkv_wide, 0));
  out.push_back(dplr_rerun("dplr_wide_segments", {1, 3000, 1, 1, 128, 64, {}}, -0.6066));
  const Size rwkv_widest{2, 333, 2, 2, 256, 128, {}}, lone_widest{1, 3000, 1, 1, 200, 64, {}};
  out.push_back(dplr_rerun("dplr_widest", rwkv_widest, -0.6066));
  out.push_back(dplr_rerun("dplr_widest_unbounded", rwkv_widest, 0));
  out.push_back(dplr_rerun("dplr_widest_segments", lone_widest, -0.6066));
  for (const bool by_channel : {false, true}) {
    const std::string op = by_channel ? "gla_by_channel_" : "gla_";
    const Size one{2, 333, 3, 3, 64, 64, {}};
    out.push_back(linear_attention(op + "model", one, by_channel));
    out.push_back(linear_attention(op + "packed", {2, 333, 3, 3, 64, 64, cu}, by_channel));
    out.push_back(linear_attention(op + "k128", {2, 333, 2, 2, 128, 64, {}}, by_channel));
    out.push_back(linear_attention(op + "odd", {2, 150, 2, 2, 20, 36, {}}, by_channel));
    out.push_back(linear_attention(op + "segments", lone, by_channel));
  }
  const Size mamba{2, 333, 1, 4, 128, 64, {}}, mamba_packed{2, 333, 2, 4, 128, 64, cu};
  out.push_back(ssd_rerun("ssd_model", mamba, 0));
  out.push_back(ssd_rerun("ssd_packed_groups", mamba_packed, 0));
  out.push_back(ssd_rerun("ssd_contributions", mamba, 32));
  out.push_back(ssd_rerun("ssd_long_contributions", {1, 1100, 1, 2, 128, 64, {}}, 256));
  out.push_back(ssd_rerun("ssd_segments", {1, 3000, 1, 1, 128, 64, {}}, 0));
  out.push_back(state_memory("state_memory_model", mamba, 32));
  out.push_back(state_memory("state_memory_packed", mamba_packed, 16));
  out.push_back(state_memory("state_memory_short_runs", {2, 333, 1, 4, 64, 64, {}}, 16));
  out.push_back(state_memory("state_memory_odd", {2, 150, 1, 3, 20, 36, {}}, 7));
  out.push_back(softmax_attention("attention_model", {2, 333, 4, 4, 64, 64, {}}, 0));
  out.push_back(softmax_attention("attention_grouped_packed", {2, 333, 2, 4, 64, 64, cu}, 0));
  out.push_back(softmax_attention("attention_window", {2, 333, 2, 2, 128, 128, {}}, 100));
  return out;
}

class RerunCuda : public CudaTest, public ::testing::WithParamInterface<RerunCase> {
 protected:
  // Results and gradients, on the CPU.
  std::vector<Tensor> run(const std::vector<Tensor>& values, std::vector<Tensor>& upstream) {
    std::vector<Var> in;
    for (const Tensor& t : values) in.push_back(Var::leaf(t));
    const std::vector<Var> out = GetParam().run(in);
    for (size_t i = upstream.size(); i < out.size(); ++i) {
      Tensor dy = Tensor::empty(out[i].shape(), DType::f64);
      fill_normal(dy, {99, i});
      upstream.push_back(dy.to(out[i].dtype(), gpu_));
    }
    backward(out, upstream);
    std::vector<Tensor> all;
    for (const Var& y : out) all.push_back(y.value().cpu());
    for (const Var& x : in) all.push_back(x.grad().cpu());
    return all;
  }
};

TEST_P(RerunCuda, BitwiseEqualOver100Runs) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    std::vector<Tensor> values, upstream;
    for (const OpInput& in : GetParam().inputs)
      values.push_back(in.value.to(in.parameter ? DType::f32 : dtype, gpu_));
    const std::vector<Tensor> first = run(values, upstream);
    for (const Tensor& t : first) ASSERT_TRUE(all_finite(t));
    for (int r = 1; r < kRuns; ++r) {
      // What unwritten memory holds, and where blocks lie, changes from run to run.
      set_poison(r % 2 == 1);
      const Tensor moved = Tensor::empty({(r % 7 + 1) * 40000}, DType::f32, gpu_);
      const std::vector<Tensor> again = run(values, upstream);
      set_poison(false);
      for (size_t i = 0; i < first.size(); ++i)
        ASSERT_TRUE(bitwise_equal(first[i], again[i]))
            << name(dtype) << ", run " << r << ": result " << i << " (of results, then gradients)";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, RerunCuda, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ebb::testing
