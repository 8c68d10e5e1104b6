// Inputs of gated linear attention in f64, its runs on any device and dtype, and the recurrence to
// compare with. SSD is run through the same with Δ as the weight.
#pragma once
#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "ops/gated_linear_attention.h"
#include "tests/op_harness.h"
#include "tests/reference/linear_attention.h"
#include "tests/result_parity.h"

namespace ebb::testing {

// Inputs and upstream gradients in f64 on the CPU; run() converts them. h0, weight, skip, dht and
// dcontributions may be undefined, and k where g is a decay per channel: the key is then shared.
struct GlaInputs {
  Tensor q, k, v, g, h0, weight, skip, d_o, dht, dcontributions;
  double scale = 1;
  std::vector<int64_t> cu = {};
  int64_t chunk = 64, memory = 0;
  bool wide = false;  // contributions in f32 beside bf16
};
struct GlaShape {
  int64_t batch = 1, time = 1, groups = 1, heads = 1, key_dim = 16, value_dim = 16;
  bool by_channel = false;  // g [B,T,H,K]; no weight and no skip
};
struct GlaResult {
  Tensor o, ht, contributions, dq, dk, dv, dg, dh0, dweight, dskip;
};
inline const char* const kGlaNames[] = {"o",  "ht", "contributions", "dq",      "dk",
                                        "dv", "dg", "dh0",           "dweight", "dskip"};
inline std::vector<Tensor> fields(const GlaResult& r) {
  return {r.o, r.ht, r.contributions, r.dq, r.dk, r.dv, r.dg, r.dh0, r.dweight, r.dskip};
}

inline GlaInputs gla_inputs(const GlaShape& s, uint64_t seed = 3, std::vector<int64_t> cu = {},
                            int64_t memory = 0) {
  Draw draw(seed);
  const Shape qk{s.batch, s.time, s.groups, s.key_dim};
  const Shape v{s.batch, s.time, s.heads, s.value_dim};
  const SeqLayout layout = cu.empty() ? SeqLayout() : SeqLayout::packed(cu);
  const Shape state{layout.count(s.batch), s.heads, s.key_dim, s.value_dim};
  GlaInputs in{draw.normal(qk),        draw.normal(qk),
               draw.normal(v),         draw.uniform(v.first(3), -1.5, 0),
               draw.normal(state),     draw.uniform(v.first(3), 0.1, 1),
               draw.normal({s.heads}), draw.normal(v),
               draw.normal(state),     {}};
  if (memory)
    in.dcontributions =
        draw.normal({layout.chunk_count(s.batch, s.time, memory), s.heads, s.key_dim, s.value_dim});
  if (s.by_channel) {
    in.weight = in.skip = {};
    in.g = draw.uniform({s.batch, s.time, s.heads, s.key_dim}, -1.5, 0);
  }
  in.scale = 1 / std::sqrt(double(s.key_dim));
  in.cu = std::move(cu);
  in.memory = memory;
  return in;
}

inline GlaResult run(const GlaInputs& in, DType dtype, Device device) {
  const DType gate = accumulate_type(dtype);
  const auto leaf = [&](const Tensor& t, DType to) {
    return t ? Var::leaf(t.to(to, device)) : Var();
  };
  const Var q = leaf(in.q, dtype), k = leaf(in.k, dtype), v = leaf(in.v, dtype);
  const Var g = leaf(in.g, gate), h0 = leaf(in.h0, gate);
  LinearAttentionOptions options{.scale = in.scale,
                                 .want_final_state = in.dht.defined(),
                                 .chunk = in.chunk,
                                 .memory_chunk = in.memory,
                                 .wide_contributions = in.wide,
                                 .weight = leaf(in.weight, gate),
                                 .skip = leaf(in.skip, gate)};
  if (!in.cu.empty()) options.layout = SeqLayout::packed(in.cu, device);
  const LinearAttentionOutput out = gated_linear_attention(q, k, v, g, h0, options);
  std::vector<Var> roots{out.o};
  std::vector<Tensor> dy{in.d_o.to(dtype, device)};
  if (in.dht) roots.push_back(out.ht), dy.push_back(in.dht.to(gate, device));
  if (in.dcontributions) {
    roots.push_back(out.contributions);
    dy.push_back(in.dcontributions.to(out.contributions.value().dtype(), device));
  }
  backward(roots, dy);
  const auto host = [](const Tensor& t) { return t ? t.to(DType::f64, {}) : Tensor(); };
  return {host(out.o.value()),      host(out.ht.value()), host(out.contributions.value()),
          host(q.grad()),           host(k.grad()),       host(v.grad()),
          host(g.grad()),           host(h0.grad()),      host(options.weight.grad()),
          host(options.skip.grad())};
}

// The recurrence on the inputs as `dtype` rounds them.
inline GlaResult exact(const GlaInputs& in, DType dtype = DType::f64) {
  const DType gate = accumulate_type(dtype);
  const auto round = [](const Tensor& t, DType to) { return t ? t.to(to).to(DType::f64) : t; };
  const Tensor g = round(in.g, gate), k = in.k ? round(in.k, dtype) : reference::shared_key(g);
  reference::LinearAttention r({round(in.q, dtype), k, round(in.v, dtype), g, round(in.h0, gate),
                                round(in.weight, gate), round(in.skip, gate), in.scale, in.cu,
                                in.memory});
  r.backward(round(in.d_o, dtype), round(in.dht, gate), round(in.dcontributions, dtype));
  if (!in.k) reference::add_shared_key_gradient(g, r.dk, r.dg);
  const auto when = [](bool on, const Tensor& t) { return on ? t : Tensor(); };
  return {r.o,
          when(in.dht.defined(), r.ht),
          when(in.memory > 0, r.contributions),
          r.dq,
          when(in.k.defined(), r.dk),
          r.dv,
          r.dg,
          when(in.h0.defined(), r.dh0),
          when(in.weight.defined(), r.dw),
          when(in.skip.defined(), r.dskip)};
}

inline void expect_parity(const GlaResult& got, const GlaResult& want, double outputs,
                          double gradients, const std::string& what = "") {
  expect_results_near(fields(got), fields(want), kGlaNames, 3, outputs, gradients, what);
}

inline bool finite(const GlaResult& r) { return all_values_finite(fields(r)); }

}  // namespace ebb::testing
