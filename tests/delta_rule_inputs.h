// Inputs of the gated delta rule in f64, its runs on any device and dtype, and the recurrence to
// compare with.
#pragma once
#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "ops/delta_rule.h"
#include "tests/op_harness.h"
#include "tests/reference/delta_rule.h"
#include "tests/result_parity.h"

namespace ebb::testing {

// Inputs and upstream gradients in f64 on the CPU; run() converts them.
struct GdnInputs {
  Tensor q, k, v, g, beta, h0, d_o, dht;
  double scale = 1;
  std::vector<int64_t> cu = {};
  int64_t chunk = 64;
  bool recompute = false;
};
struct GdnShape {
  int64_t batch = 1, time = 1, heads = 1, value_heads = 1, key_dim = 16, value_dim = 16;
};
struct GdnResult {
  Tensor o, ht, dq, dk, dv, dg, dbeta, dh0;
};
inline const char* const kGdnNames[] = {"o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0"};
inline std::vector<Tensor> fields(const GdnResult& r) {
  return {r.o, r.ht, r.dq, r.dk, r.dv, r.dg, r.dbeta, r.dh0};
}

inline GdnInputs gdn_inputs(const GdnShape& s, uint64_t seed = 3, std::vector<int64_t> cu = {}) {
  Draw draw(seed);
  const Shape qk{s.batch, s.time, s.heads, s.key_dim};
  const Shape v{s.batch, s.time, s.value_heads, s.value_dim};
  const int64_t n = cu.empty() ? s.batch : int64_t(cu.size()) - 1;
  const Shape state{n, s.value_heads, s.key_dim, s.value_dim};
  GdnInputs in{draw.normal(qk),
               draw.normal(qk),
               draw.normal(v),
               draw.uniform(v.first(3), -1.5, 0),
               draw.uniform(v.first(3), 0, 1),
               draw.normal(state),
               draw.normal(v),
               draw.normal(state)};
  normalize_rows(in.q);
  normalize_rows(in.k);
  in.scale = 1 / std::sqrt(double(s.key_dim));
  in.cu = std::move(cu);
  return in;
}

inline GdnResult run(const GdnInputs& in, DType dtype, Device device) {
  const DType gate = accumulate_type(dtype);
  const auto leaf = [&](const Tensor& t, DType to) {
    return t.defined() ? Var::leaf(t.to(to, device)) : Var();
  };
  const Var q = leaf(in.q, dtype), k = leaf(in.k, dtype), v = leaf(in.v, dtype);
  const Var g = leaf(in.g, gate), beta = leaf(in.beta, gate), h0 = leaf(in.h0, gate);
  DeltaRuleOptions options{.scale = in.scale,
                           .want_final_state = in.dht.defined(),
                           .layout = {},
                           .chunk = in.chunk,
                           .recompute = in.recompute};
  if (!in.cu.empty()) options.layout = SeqLayout::packed(in.cu, device);
  const DeltaRuleOutput out = gated_delta_rule(q, k, v, g, beta, h0, options);
  std::vector<Var> roots{out.o};
  std::vector<Tensor> dy{in.d_o.to(dtype, device)};
  if (in.dht.defined()) roots.push_back(out.ht), dy.push_back(in.dht.to(gate, device));
  backward(roots, dy);
  const auto host = [](const Tensor& t) { return t.defined() ? t.to(DType::f64, {}) : Tensor(); };
  return {host(out.o.value()), host(out.ht.value()), host(q.grad()),    host(k.grad()),
          host(v.grad()),      host(g.grad()),       host(beta.grad()), host(h0.grad())};
}

// The recurrence on the inputs as `dtype` rounds them.
inline GdnResult exact(const GdnInputs& in, DType dtype = DType::f64) {
  const DType gate = accumulate_type(dtype);
  const auto round = [](const Tensor& t, DType to) {
    return t.defined() ? t.to(to).to(DType::f64) : Tensor();
  };
  reference::GatedDeltaRule r(round(in.q, dtype), round(in.k, dtype), round(in.v, dtype),
                              round(in.g, gate), round(in.beta, gate), round(in.h0, gate), in.scale,
                              in.cu);
  r.backward(round(in.d_o, dtype), round(in.dht, gate));
  return {r.o,     in.dht.defined() ? r.ht : Tensor(), r.dq, r.dk, r.dv, r.dg,
          r.dbeta, in.h0.defined() ? r.dh0 : Tensor()};
}

inline void expect_parity(const GdnResult& got, const GdnResult& want, double outputs,
                          double gradients, const std::string& what = "") {
  expect_results_near(fields(got), fields(want), kGdnNames, 2, outputs, gradients, what);
}

inline bool finite(const GdnResult& r) { return all_values_finite(fields(r)); }

}  // namespace ebb::testing
