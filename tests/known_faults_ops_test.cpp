// Faults other implementations were reported to have that concern several operators at once, on
// every device there is: batches and lengths beyond 16 bits, padding, reused states, views as
// upstream gradients, optional inputs. (The delta rule's own are in delta_rule_cases.h, those of
// the convolution and the gates in known_faults_conv_test.cpp.)
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "autograd/gradcheck.h"
#include "ops/causal_conv1d.h"
#include "ops/cumsum.h"
#include "ops/decay_gate.h"
#include "ops/elementwise.h"
#include "ops/gated_rms_norm.h"
#include "ops/l2_norm.h"
#include "ops/layer_norm.h"
#include "ops/matmul.h"
#include "ops/reduce.h"
#include "ops/rms_norm.h"
#include "ops/sigmoid_gate.h"
#include "ops/softmax.h"
#include "ops/swiglu.h"
#include "ops/token_shift.h"
#include "tensor/random.h"
#include "tests/delta_rule_inputs.h"

namespace ebb::testing {
namespace {

class KnownFaultsOps : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (GetParam().is_cuda() && cuda_device_count() == 0)
      GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  Tensor normal(const Shape& shape, uint64_t seed, double scale = 1) const {
    Tensor t = Tensor::empty(shape, DType::f32);
    fill_normal(t, {seed, 0}, 0, scale);
    return t.to(GetParam());
  }
  Tensor unit(const Shape& shape, uint64_t seed) const {
    return l2_norm(normal(shape, seed)).value();
  }
  Tensor zeros(const Shape& shape) const { return Tensor::zeros(shape, DType::f32, GetParam()); }
  Tensor full(const Shape& shape, double v) const {
    return Tensor::full(shape, v, DType::f32, GetParam());
  }
  SeqLayout packed(const std::vector<int64_t>& cu) const {
    return SeqLayout::packed(cu, GetParam());
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, KnownFaultsOps, ::testing::Values(Device::cpu(), Device::cuda()),
                         [](const auto& info) { return info.param.is_cuda() ? "cuda" : "cpu"; });

using Op = std::function<Var(const Var&)>;

// Operators on x [B,T,D] whose sequences do not see each other, D a multiple of 4.
struct NamedOp {
  const char* name;
  Op run;
};
std::vector<NamedOp> sequence_ops(const KnownFaultsOps&, const Tensor& w, const Tensor& d_vector) {
  return {{"causal_conv1d", [=](const Var& x) { return causal_conv1d(x, w).y; }},
          {"token_shift", [](const Var& x) { return token_shift(x).delta; }},
          {"decay_gate", [=](const Var& x) { return decay_gate(x, d_vector, d_vector); }},
          {"sigmoid_gate", [](const Var& x) { return sigmoid_gate(x); }},
          {"swiglu", [](const Var& x) { return swiglu(x, x); }},
          {"cumsum", [](const Var& x) { return cumsum(x, 1); }},
          {"softmax", [](const Var& x) { return softmax(x); }},
          {"sum", [](const Var& x) { return sum(x, -1, KeepDim::yes); }},
          {"max", [](const Var& x) { return max(x, 1, KeepDim::yes); }},
          {"rms_norm", [=](const Var& x) { return rms_norm(x, d_vector, 1e-5f); }},
          {"layer_norm", [=](const Var& x) { return layer_norm(x, d_vector, d_vector, 1e-5f); }},
          {"gated_rms_norm", [=](const Var& x) { return gated_rms_norm(x, x, d_vector, {}); }}};
}

// B08: a batch beyond the 65,535 blocks that two of a grid's dimensions take.
TEST_P(KnownFaultsOps, B08_BatchesBeyond16Bits) {
  const int64_t B = 65'600, T = 3, D = 4, half = 32'800;
  const Tensor x = normal({B, T, D}, 1), w = normal({D, 4}, 2), v = normal({D}, 3);
  for (const auto& [name, op] : sequence_ops(*this, w, v)) {
    const auto run = [&, &op = op](int64_t begin, int64_t end) {
      const Var in = Var::leaf(x.slice(0, begin, end));
      const Var y = op(in);
      backward(y, normal(y.shape(), 4).slice(0, 0, 1).expand(y.shape()));
      return std::pair(y.value(), in.grad());
    };
    const auto whole = run(0, B), first = run(0, half), second = run(half, B);
    EXPECT_TRUE(bitwise_equal(whole.first.slice(0, 0, half), first.first)) << name;
    EXPECT_TRUE(bitwise_equal(whole.first.slice(0, half, B), second.first)) << name;
    EXPECT_TRUE(bitwise_equal(whole.second.slice(0, 0, half), first.second)) << name;
    EXPECT_TRUE(bitwise_equal(whole.second.slice(0, half, B), second.second)) << name;
  }
}

// B12: sequences beyond 65,536 tokens; the last token against the reference.
TEST_P(KnownFaultsOps, B12_SequencesBeyond16Bits) {
  for (const int64_t T : {65'536, 65'537, 131'073}) {
    // k of length 1, v constant, no decay: S = k vᵀ from the first token on, o = scale (q·k) v.
    const Tensor k = full({1, T, 1, 4}, 0.5), v = full({1, T, 1, 3}, 1);
    const Tensor ones = full({1, T, 1}, 1), no_decay = zeros({1, T, 1});
    const Var vv = Var::leaf(v);
    const DeltaRuleOutput r =
        gated_delta_rule(k, k, vv, no_decay, ones, {}, {.want_final_state = true});
    EXPECT_LE(relative_error(r.o.value().cpu(), v.cpu()), 1e-5) << T;
    EXPECT_LE(relative_error(r.ht.value().cpu(), full({1, 1, 4, 3}, 0.5).cpu()), 1e-5) << T;
    // Each token erases what the one before wrote: only its own output depends on it.
    backward(r.o, v);
    EXPECT_LE(relative_error(vv.grad().slice(1, 0, T - 1).cpu(), v.slice(1, 0, T - 1).cpu()), 1e-5)
        << T;
    // Along the length: the window, the shift, the scan and the reductions.
    const Tensor x = normal({1, T, 4}, 1), w = normal({4, 4}, 2);
    const Tensor tail = x.slice(1, T - 9, T);
    const auto last = [](const Var& y) { return y.value().slice(1, y.size(1) - 1, y.size(1)); };
    EXPECT_TRUE(bitwise_equal(last(causal_conv1d(x, w).y), last(causal_conv1d(tail, w).y))) << T;
    EXPECT_TRUE(bitwise_equal(last(token_shift(x).delta), last(token_shift(tail).delta))) << T;
    const Tensor count = full({1, T, 4}, 1);
    EXPECT_EQ(last(cumsum(count, 1)).cpu().to_vector<float>(), std::vector<float>(4, float(T)));
    EXPECT_EQ(sum(count, 1).value().cpu().to_vector<float>(), std::vector<float>(4, float(T)));
  }
}

// B20: what pads a ragged last chunk must not pass through bias and softplus into the scan.
TEST_P(KnownFaultsOps, B20_RaggedChunksBehindASoftplusGate) {
  const int64_t T = 64 + 3, H = 2, K = 6, V = 5;
  const Tensor q = unit({1, T, H, K}, 1), k = unit({1, T, H, K}, 2), v = normal({1, T, H, V}, 3);
  const Tensor a = normal({1, T, H}, 4), beta = full({1, T, H}, 0.6);
  const Tensor A_log = full({H}, -3), dt_bias = full({H}, 5);  // decays about e^-0.25
  const auto model = [&](std::span<const Var> in, DType t, Device d) {
    const auto as = [&](const Tensor& x) { return Var(x.to(t, d)); };
    const Var g = decay_gate(in[0], in[1], in[2]);
    return gated_delta_rule(as(q), in[3], as(v), g, as(beta), {},
                            {.scale = 0.4, .want_final_state = true});
  };
  const auto gradients = [&](DType t, Device d) {
    std::vector<Var> in;
    for (const Tensor& x : {a, A_log, dt_bias, k}) in.push_back(Var::leaf(x.to(t, d)));
    const DeltaRuleOutput r = model(in, t, d);
    backward(std::vector{r.o, r.ht},
             std::vector{normal(r.o.shape(), 5).to(t, d), normal(r.ht.shape(), 6).to(t, d)});
    std::vector<Tensor> out;
    for (const Var& x : in) out.push_back(x.grad().to(DType::f64, {}));
    return out;
  };
  const auto want = gradients(DType::f64, {}), got = gradients(DType::f32, GetParam());
  for (size_t i = 0; i < want.size(); ++i) EXPECT_LE(relative_error(got[i], want[i]), 2e-5) << i;
  if (GetParam().is_cuda()) return;
  const std::vector<Tensor> inputs{a.to(DType::f64), A_log.to(DType::f64), dt_bias.to(DType::f64),
                                   k.to(DType::f64)};
  const GradcheckResult r = gradcheck(
      [&](std::span<const Var> in) {
        const DeltaRuleOutput y = model(in, DType::f64, {});
        return std::vector{y.o, y.ht};
      },
      inputs);
  EXPECT_TRUE(r.ok) << r.message;
}

// B22, B26: prompts of 1 to 3 tokens and decoding, in a slot that still holds another's state.
TEST_P(KnownFaultsOps, B26_StatesOfReusedSlots) {
  const int64_t T = 8, H = 2, K = 4, V = 3;
  const auto draw = [&](uint64_t seed) {
    return std::array{unit({1, T, H, K}, seed), unit({1, T, H, K}, seed + 1),
                      normal({1, T, H, V}, seed + 2),
                      neg(sigmoid_gate(normal({1, T, H}, seed + 3))).value(),
                      sigmoid_gate(normal({1, T, H}, seed + 4)).value()};
  };
  const auto first = draw(10), second = draw(20);
  const Tensor pool = full({3, H, K, V}, NAN);
  const Tensor slot = pool.slice(0, 1, 2);
  for (const auto& in : {first, second, first})
    for (const int64_t prompt : {1, 2, 3}) {
      const auto part = [&](size_t i, int64_t begin, int64_t end) {
        return in[i].slice(1, begin, end);
      };
      const Tensor whole = gated_delta_rule(in[0], in[1], in[2], in[3], in[4], {}).o.value();
      const DeltaRuleOutput head =
          gated_delta_rule(part(0, 0, prompt), part(1, 0, prompt), part(2, 0, prompt),
                           part(3, 0, prompt), part(4, 0, prompt), {}, {.want_final_state = true});
      slot.copy_(head.ht.value());
      for (int64_t t = prompt; t < prompt + 5; ++t) {
        const Tensor o =
            gated_delta_rule_step(in[0].select(1, t), in[1].select(1, t), in[2].select(1, t),
                                  in[3].select(1, t), in[4].select(1, t), slot);
        EXPECT_LE(relative_error(o.cpu(), whole.select(1, t).cpu()), 1e-5) << prompt << " " << t;
      }
    }
  for (const int64_t row : {0, 2})
    EXPECT_TRUE(std::isnan(pool.select(0, row).select(0, 0).select(0, 0).select(0, 0).item()));
}

// B14, B28: what stands before a sequence, padding say, does not leak, whatever the batch size.
TEST_P(KnownFaultsOps, B28_NothingLeaksIntoPackedSequences) {
  const int64_t T = 12, pad = 5, H = 1, K = 4, V = 3;
  const auto run = [&](std::array<Tensor, 5> in, const SeqLayout& layout) {
    std::array<Var, 5> leaf;
    for (size_t i = 0; i < 5; ++i) leaf[i] = Var::leaf(in[i]);
    const Var o =
        gated_delta_rule(leaf[0], leaf[1], leaf[2], leaf[3], leaf[4], {}, {.layout = layout}).o;
    backward(o, o.value());
    std::vector<Tensor> out{o.value()};
    for (const Var& v : leaf) out.push_back(v.grad());
    return out;
  };
  for (const int64_t batch : {1, 3}) {
    const auto draw = [&](int64_t length, uint64_t seed, double size) {
      return std::array{normal({batch, length, H, K}, seed, size),
                        unit({batch, length, H, K}, seed + 1),
                        normal({batch, length, H, V}, seed + 2, size),
                        neg(sigmoid_gate(normal({batch, length, H}, seed + 3))).value(),
                        sigmoid_gate(normal({batch, length, H}, seed + 4)).value()};
    };
    const auto tokens = draw(T - pad, 1, 1);
    auto padded = draw(T, 10, 1e6);
    for (size_t i = 0; i < 5; ++i) padded[i].slice(1, pad, T).copy_(tokens[i]);
    std::vector<int64_t> cu{0};
    for (int64_t b = 0; b < batch; ++b) {
      cu.push_back(T * b + pad);
      cu.push_back(T * (b + 1));
    }
    const auto want = run(tokens, {}), got = run(padded, packed(cu));
    for (size_t i = 0; i < want.size(); ++i)
      EXPECT_TRUE(bitwise_equal(got[i].slice(1, pad, T).contiguous(), want[i].contiguous()))
          << batch << " " << i;
    for (const Op& op : std::vector<Op>{
             [&](const Var& x) { return cumsum(x, packed(cu)); },
             [&](const Var& x) { return token_shift(x, {}, {.layout = packed(cu)}).delta; }}) {
      const Tensor x = padded[4], other = x.clone();
      other.slice(1, 0, pad).copy_(zeros({batch, pad, H}));
      EXPECT_TRUE(bitwise_equal(op(x).value().slice(1, pad, T).contiguous(),
                                op(other).value().slice(1, pad, T).contiguous()))
          << batch;
    }
  }
}

// B30: gradients for head sizes on both sides of every tile a launcher can pick.
TEST_P(KnownFaultsOps, B30_EveryTileSize) {
  const std::vector<int64_t> sizes = {1, 2, 8, 15, 16, 17, 31, 32, 33, 64, 65, 96, 128, 129, 256};
  for (size_t i = 0; i < sizes.size(); ++i)
    for (const int64_t V : {sizes[i], sizes[(i * 7 + 3) % sizes.size()]}) {
      const GdnInputs in = gdn_inputs({.time = 70, .key_dim = sizes[i], .value_dim = V});
      const std::string what = fmt::format("K {} V {}", sizes[i], V);
      expect_parity(run(in, DType::f32, GetParam()), exact(in, DType::f32), 2e-5, 2e-5, what);
    }
}

// B36: the state is [K,V], and a decay is a log: one token from a state that is not symmetric.
TEST_P(KnownFaultsOps, B36_StateLayoutAndDecaySign) {
  const int64_t K = 3, V = 5;
  const Tensor q = normal({1, 1, 1, K}, 1), k = unit({1, 1, 1, K}, 2), v = normal({1, 1, 1, V}, 3);
  const Tensor h0 = normal({1, 1, K, V}, 4), g = full({1, 1, 1}, -0.7), beta = full({1, 1, 1}, 0.3);
  const auto q_ = q.to_vector<double>(), k_ = k.to_vector<double>(), v_ = v.to_vector<double>();
  auto state = h0.to_vector<double>();
  for (double& s : state) s *= std::exp(-0.7);
  std::vector<double> o(size_t(V), 0.);
  for (int64_t j = 0; j < V; ++j) {
    double read = 0;
    for (int64_t i = 0; i < K; ++i) read += state[size_t(i * V + j)] * k_[size_t(i)];
    for (int64_t i = 0; i < K; ++i) {
      state[size_t(i * V + j)] += k_[size_t(i)] * 0.3 * (v_[size_t(j)] - read);
      o[size_t(j)] += 2 * q_[size_t(i)] * state[size_t(i * V + j)];
    }
  }
  const DeltaRuleOutput r =
      gated_delta_rule(q, k, v, g, beta, h0, {.scale = 2, .want_final_state = true});
  const Tensor moved = h0.clone();
  const Tensor step = gated_delta_rule_step(q.select(1, 0), k.select(1, 0), v.select(1, 0),
                                            g.select(1, 0), beta.select(1, 0), moved, {.scale = 2});
  for (const Tensor& y : {r.o.value(), step})
    EXPECT_LE(relative_error(y.reshape({V}).cpu(), Tensor::from(o, {V})), 1e-6);
  for (const Tensor& s : {r.ht.value(), moved})
    EXPECT_LE(relative_error(s.reshape({K * V}).cpu(), Tensor::from(state, {K * V})), 1e-6);
}

// B38: upstream gradients that are views, in every recurrence input's gradient.
TEST_P(KnownFaultsOps, B38_UpstreamViewsOfTheDeltaRule) {
  const int64_t T = 70, H = 2, K = 5, V = 6;
  const std::vector<Tensor> views = {
      normal({T, H, V, 1}, 7).permute({3, 0, 1, 2}), normal({1, H, V, T}, 8).permute({0, 3, 1, 2}),
      normal({1, T, H, 3 * V}, 9).slice(3, V, 2 * V), normal({1}, 10).expand({1, T, H, V}),
      normal({V}, 11).expand({1, T, H, V})};
  for (size_t i = 0; i < views.size(); ++i) {
    std::vector<std::vector<Tensor>> results;
    for (const Tensor& dy : {views[i], views[i].contiguous()}) {
      std::vector<Var> in;
      for (const Tensor& t : {unit({1, T, H, K}, 1), unit({1, T, H, K}, 2), normal({1, T, H, V}, 3),
                              full({1, T, H}, -0.1), full({1, T, H}, 0.7), normal({1, H, K, V}, 4)})
        in.push_back(Var::leaf(t));
      backward(gated_delta_rule(in[0], in[1], in[2], in[3], in[4], in[5]).o, dy);
      results.emplace_back();
      for (const Var& x : in) results.back().push_back(x.grad());
    }
    for (size_t j = 0; j < results[0].size(); ++j)
      EXPECT_TRUE(bitwise_equal(results[0][j], results[1][j]))
          << "upstream " << i << " input " << j;
  }
}

// B58: every combination of present and wanted inputs; gradients where wanted, the same values.
TEST_P(KnownFaultsOps, B58_OptionalInputsInAnyCombination) {
  const auto var = [](const Tensor& t, bool present, bool wanted) {
    return !present ? Var() : wanted ? Var::leaf(t) : Var(t);
  };
  const int64_t T = 5, H = 2, K = 3, V = 4;
  for (int bits = 0; bits < 512; ++bits) {
    const auto bit = [bits](int i) { return bool(bits >> i & 1); };
    const std::array in{
        var(unit({1, T, 1, K}, 1), true, bit(0)),   var(unit({1, T, 1, K}, 2), true, bit(1)),
        var(normal({1, T, H, V}, 3), true, bit(2)), var(full({1, T, H}, -0.2), true, bit(3)),
        var(full({1, T, H}, 0.5), true, bit(4)),    var(normal({1, H, K, V}, 5), bit(5), bit(6))};
    const DeltaRuleOutput r =
        gated_delta_rule(in[0], in[1], in[2], in[3], in[4], in[5], {.want_final_state = bit(7)});
    ASSERT_EQ(r.ht.defined(), bit(7));
    std::vector<Var> roots;
    if (r.o.requires_grad() && !(bit(7) && bit(8))) roots.push_back(r.o);
    if (bit(7) && r.ht.requires_grad()) roots.push_back(r.ht);
    std::vector<Tensor> dy;
    for (const Var& y : roots) dy.push_back(full(y.shape(), 1));
    if (!roots.empty()) backward(roots, dy);
    for (const Var& v : in) EXPECT_EQ(v.grad().defined(), v.requires_grad()) << bits;
  }
  const Tensor x = normal({3, 8}, 1), w = normal({8}, 2), m = normal({6, 8}, 3);
  for (int bits = 0; bits < 64; ++bits) {
    const auto bit = [bits](int i) { return bool(bits >> i & 1); };
    const Var vx = var(x, true, bit(0)), vw = var(w, bit(1), bit(2)), vb = var(w, bit(3), bit(4));
    const Var z = var(x, true, bit(5));
    const Var bias = var(normal({6}, 4), bit(3), bit(4)), matrix = var(m, true, bit(2));
    const std::vector<std::pair<Var, std::vector<Var>>> runs = {
        {rms_norm(vx, vw, 1e-5f), {vx, vw}},
        {layer_norm(vx, vw, vb, 1e-5f), {vx, vw, vb}},
        {group_norm(vx, vw, vb, 2, 1e-5f), {vx, vw, vb}},
        {add_rms_norm(vx, z, vw, 1e-5f).y, {vx, z, vw}},
        {gated_rms_norm(vx, z, vw, {}), {vx, z, vw}},
        {linear(vx, matrix, bias), {vx, matrix, bias}}};
    for (size_t i = 0; i < runs.size(); ++i) {
      const auto& [y, inputs] = runs[i];
      for (const Var& v : inputs) v.zero_grad();
      if (y.requires_grad()) backward(y, full(y.shape(), 1));
      for (const Var& v : inputs)
        EXPECT_EQ(v.grad().defined(), v.requires_grad()) << "op " << i << " bits " << bits;
    }
  }
}

}  // namespace
}  // namespace ebb::testing
