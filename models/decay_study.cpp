#include "models/decay_study.h"

#include "autograd/tape.h"
#include "models/heads.h"
#include "ops/decay_gate.h"
#include "ops/delta_rule.h"
#include "ops/delta_rule_channel.h"
#include "ops/elementwise.h"
#include "ops/forget_gate.h"
#include "ops/gated_linear_attention.h"
#include "ops/gated_rms_norm.h"
#include "ops/l2_norm.h"
#include "ops/log_cumsum_exp.h"
#include "ops/matmul.h"
#include "ops/reduce.h"
#include "ops/rotary.h"
#include "ops/sigmoid_gate.h"
#include "ops/softmax.h"
#include "tensor/check.h"

namespace ebb {
namespace {

constexpr double kSlowest = -1e-6;  // a trained decay stays one

class DecayStudy : public Mixer {
 public:
  // lower_bounds [L,·], shared by the layers, of hgrn2.
  DecayStudy(const ModelConfig& config, int64_t layer, const Parameter& lower_bounds);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  Tensor log_decays(const Var& h) const override;

 private:
  struct Projected;
  struct Decayed;
  struct Core;
  Projected project(const Var& x) const;
  Decayed decay(const Projected& p, const Var& z0, const SeqLayout& layout, bool final) const;
  Var head_decays(const Shape& lead, DType activations, Device device) const;
  Core core(const Projected& p, const Decayed& d, const Tensor& position,
            const SeqLayout& layout) const;
  Var attend(const Core& c, const Var& h0, const SeqLayout& layout, Tensor* ht) const;
  Var attend_halves(const Core& c, const Var& h0, const SeqLayout& layout, Tensor* ht) const;
  Var finish(const Var& o, const Var& gate) const;

  bool running_sum() const;  // lightnet, lssp
  bool fixed() const;        // tnl, tnl_l

  DecayConfig decay_;
  bool delta_, rope_, cosine_;
  int64_t layer_, heads_, width_, rank_;
  double eps_;
  std::vector<double> fixed_;  // [H], of tnl
  Parameter lower_bounds_;
  Parameter input_;            // rows q | k | v | first of the gate | first of F, or F | Wβ
  Parameter gate_, logits_;    // second matrices
  Parameter A_log_, dt_bias_;  // one per channel or head
  Parameter offset_;           // δ of simple, the decay itself of tnl_l
  Parameter norm_, output_;
};

bool DecayStudy::running_sum() const { return decay_.type == "lightnet" || decay_.type == "lssp"; }
bool DecayStudy::fixed() const { return decay_.type == "tnl" || decay_.type == "tnl_l"; }

DecayStudy::DecayStudy(const ModelConfig& c, int64_t layer, const Parameter& lower_bounds)
    : decay_(c.decay),
      delta_(c.token_mixer == "dplr"),
      rope_(c.rpe == "rope"),
      cosine_(c.cosine_rope()),
      layer_(layer),
      heads_(c.num_heads),
      width_(c.hidden_size),
      rank_(c.hidden_size / c.num_heads),
      eps_(c.norm_eps),
      lower_bounds_(lower_bounds) {
  const int64_t d = width_, decays = decay_.by_channel ? d : heads_;
  const bool logits = !fixed() && !decay_.share;
  std::vector<FusedPart> parts = {{"q_proj.weight", {d, d}},
                                  {"k_proj.weight", {d, d}},
                                  {"v_proj.weight", {d, d}},
                                  {"g_proj.0.weight", {rank_, d}}};
  if (logits && decay_.by_channel) parts.push_back({"f_proj.0.weight", {rank_, d}});
  if (logits && !decay_.by_channel) parts.push_back({"f_proj.weight", {heads_, d}});
  if (delta_) parts.push_back({"b_proj.weight", {heads_, d}});
  input_ = register_fused(parts, 8);
  gate_ = register_parameter("g_proj.1.weight", Tensor::zeros({d, rank_}));
  if (logits && decay_.by_channel)
    logits_ = register_parameter("f_proj.1.weight", Tensor::zeros({d, rank_}));
  const auto vector = [&](const char* name, int64_t n) {
    return register_parameter(name, Tensor::zeros({n}), WeightDecay::off);
  };
  const std::string& type = decay_.type;
  if (type == "mamba2" || type == "mamba2_noDelta") A_log_ = vector("A_log", decays);
  if (type == "mamba2" || type == "mamba2_noA") dt_bias_ = vector("dt_bias", decays);
  if (type == "simple") offset_ = vector("delta", decays);
  if (type == "tnl_l") offset_ = vector("decay", heads_);
  if (fixed()) fixed_ = tnl_decays(layer, c.num_hidden_layers, heads_);
  norm_ = register_parameter("o_norm.weight", Tensor::full({d}, 1), WeightDecay::off);
  output_ = register_parameter("o_proj.weight", Tensor::zeros({d, d}));
}

struct DecayStudy::Projected {
  Var q, v;    // [...,H,P]
  Var k;       // [...,d], before its activation
  Var logits;  // u [...,d] or [...,H]; undefined: none
  Var gate;    // [...,d]
  Var beta;    // [...,H], raw; undefined: none
};

DecayStudy::Projected DecayStudy::project(const Var& x) const {
  std::vector<int64_t> widths = {width_, width_, width_, rank_};
  const bool own = !fixed() && !decay_.share;
  if (own) widths.push_back(decay_.by_channel ? rank_ : heads_);
  if (delta_) widths.push_back(heads_);
  const auto p = columns_of(linear(x, input_.var()), widths);
  Var logits;
  if (own) logits = decay_.by_channel ? linear(p[4], logits_.var()) : p[4];
  if (decay_.share) logits = p[1];
  return {in_heads(silu(p[0]), heads_), in_heads(p[2], heads_),         p[1], logits,
          linear(p[3], gate_.var()),    delta_ ? p[own ? 5 : 4] : Var()};
}

struct DecayStudy::Decayed {
  Var g;     // [...,H,P] or [...,H]
  Var k;     // [...,H,P]; undefined: 1 − e^g
  Tensor z;  // of a running sum
};

// [...,H]
Var DecayStudy::head_decays(const Shape& lead, DType activations, Device device) const {
  const DType wide = accumulate_type(activations);
  Var g = decay_.type == "tnl_l" ? clamp(offset_.var(), -1e30, kSlowest)
                                 : Var(Tensor::from(fixed_, {heads_}).to(wide, device));
  Shape ones, all = lead;
  for (int i = 0; i < lead.size(); ++i) ones.push_back(1);
  ones.push_back(heads_), all.push_back(heads_);
  return expand(reshape(g, ones), all);
}

DecayStudy::Decayed DecayStudy::decay(const Projected& p, const Var& z0, const SeqLayout& layout,
                                      bool final) const {
  const std::string& type = decay_.type;
  const Var& u = p.logits;
  Decayed d;
  if (!decay_.share) d.k = in_heads(silu(p.k), heads_);
  if (fixed()) {
    d.g = head_decays(p.gate.shape().first(p.gate.dim() - 1), p.gate.dtype(),
                      p.gate.value().device());
    return d;
  }
  const DType wide = accumulate_type(u.dtype());
  const int64_t decays = u.shape().back();
  if (type == "simple") {
    d.g = forget_gate(u, {.bias = offset_.var()});
  } else if (type == "gla") {
    d.g = decay_.scaled ? forget_gate(mul(u, 1.0 / 16)) : forget_gate(u, {.divisor = 16});
  } else if (type == "hgrn2") {
    Var bound;
    if (layer_ > 0)
      bound = sum(slice(softmax(transpose(lower_bounds_.var(), 0, 1)), 1, 1, layer_ + 1), {1});
    d.g = forget_gate(u, {.lower_bound = bound});
  } else if (running_sum()) {
    const Var v = type == "lssp" ? cast(log(softplus(cast(u, wide))), u.dtype()) : u;
    const LogCumsumExp r = log_cumsum_exp(v, z0, {.want_final = final, .layout = layout});
    d.g = r.g;
    if (decay_.share) d.k = in_heads(r.k, heads_);
    if (final) d.z = r.z.value();
  } else if (decay_.share) {  // mamba2: the step itself is the key, and g = −e^A times it
    d.g = decay_gate(u, A_log_.var(), dt_bias_.var());
    d.k = in_heads(cast(mul(d.g, neg(exp(neg(A_log_.var())))), u.dtype()), heads_);
  } else {
    const Var A_log =
        A_log_.defined() ? A_log_.var() : Var(Tensor::zeros({decays}, wide, u.value().device()));
    d.g = decay_gate(u, A_log, dt_bias_.defined() ? dt_bias_.var() : Var());
  }
  if (decay_.by_channel) d.g = in_heads(d.g, heads_);
  return d;
}

// What the recurrence is given.
struct DecayStudy::Core {
  Var q, k, v;  // [...,H,P]; of the cosine form q and k [...,H,2P]; k may be undefined
  Var g;        // [...,H,P] or [...,H]
  Var beta;     // [...,H], of the delta rule

  // g with as many channels as k.
  Var decays() const {
    const int axis = v.dim() - 1;
    const bool twice = g.dim() == v.dim() && q.shape().back() == 2 * g.shape().back();
    return twice ? concat({g, g}, axis) : g;
  }
};

// position: of the first token of every sequence; undefined: 0.
DecayStudy::Core DecayStudy::core(const Projected& p, const Decayed& d, const Tensor& position,
                                  const SeqLayout& layout) const {
  Core c{.q = p.q, .k = d.k, .v = p.v, .g = d.g, .beta = {}};
  if (rope_) {
    // A decay per channel commutes with no rotation; the cosine form keeps every channel apart.
    const RotaryOptions turn{.form = cosine_ ? RotaryForm::cosine : RotaryForm::rotate,
                             .start = position ? position.to(p.q.value().device()) : Tensor(),
                             .layout = layout};
    c.q = rotary(c.q, turn), c.k = rotary(c.k, turn);
  }
  if (delta_) c.k = l2_norm(c.k), c.beta = sigmoid_gate(p.beta, 2);
  return c;
}

// Twice the key channels, with the same decays: what each half reads adds up, and keys of P
// channels are what the fast kernels take.
Var DecayStudy::attend_halves(const Core& c, const Var& h0, const SeqLayout& layout,
                              Tensor* ht) const {
  const std::vector<Var> qs = split(c.q, 3, 2), ks = split(c.k, 3, 2);
  Var o;
  std::vector<Var> states;
  for (size_t i = 0; i < 2; ++i) {
    const int64_t begin = int64_t(i) * rank_;
    const LinearAttentionOutput r = gated_linear_attention(
        qs[i], ks[i], c.v, c.g, h0.defined() ? slice(h0, 2, begin, begin + rank_) : Var(),
        {.want_final_state = ht != nullptr, .layout = layout});
    o = i == 0 ? r.o : add(o, r.o);
    if (ht) states.push_back(r.ht);
  }
  if (ht) *ht = concat(states, 2).value();
  return o;
}

// o [B,T,H,P]; ht, where it is wanted, the state after.
Var DecayStudy::attend(const Core& c, const Var& h0, const SeqLayout& layout, Tensor* ht) const {
  if (delta_) {
    const DeltaRuleOptions options{.scale = 1, .want_final_state = ht != nullptr, .layout = layout};
    const auto rule = decay_.by_channel ? kda : gated_delta_rule;
    const DeltaRuleOutput r = rule(c.q, c.k, c.v, c.decays(), c.beta, h0, options);
    if (ht) *ht = r.ht.value();
    return r.o;
  }
  if (cosine_) return attend_halves(c, h0, layout, ht);
  const LinearAttentionOutput r = gated_linear_attention(
      c.q, c.k, c.v, c.g, h0, {.want_final_state = ht != nullptr, .layout = layout});
  if (ht) *ht = r.ht.value();
  return r.o;
}

Var DecayStudy::finish(const Var& o, const Var& gate) const {
  const Var y =
      gated_rms_norm(from_heads(o), gate, norm_.var(),
                     {.eps = float(eps_), .act = GateAct::sigmoid, .order = GateOrder::gate_first});
  return linear(y, output_.var());
}

Var DecayStudy::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                        MixerState* final) {
  check(x.dim() == 3, "decay_study: x is {}, want [B,T,d]", x.shape());
  const int64_t n = layout.count(x.size(0));
  MixerState before = initial ? *initial : MixerState();
  if (!initial && (running_sum() || final)) before = zero_state(n, x.dtype(), x.value().device());
  const bool has = !before.tensors.empty();
  const Projected p = project(x);
  const Decayed d =
      decay(p, running_sum() ? Var(before.tensors.at(1)) : Var(), layout, final != nullptr);
  Tensor ht;
  const Core c = core(p, d, rope_ && has ? before.tensors.back() : Tensor(), layout);
  const Var o =
      attend(c, initial ? Var(before.tensors.at(0)) : Var(), layout, final ? &ht : nullptr);
  if (final) {
    final->tensors = {ht};
    if (running_sum()) final->tensors.push_back(d.z);
    if (rope_)
      final->tensors.push_back(
          positions_after(before.tensors.back(), lengths_of(layout, x.size(0), x.size(1))));
  }
  return finish(o, p.gate);
}

Var DecayStudy::step(const Var& x, MixerState& state) {
  const NoGrad off;
  check(x.dim() == 2, "decay_study: x is {}, want [N,d]", x.shape());
  std::vector<Tensor>& before = state.tensors;
  const Projected p = project(unsqueeze(x, 1));
  const Decayed d = decay(p, running_sum() ? Var(before.at(1)) : Var(), {}, true);
  const Core c = core(p, d, rope_ ? before.back() : Tensor(), {});
  const auto token = [](const Var& t) { return t.defined() ? select(t, 1, 0).value() : Tensor(); };
  const Tensor q = token(c.q), k = token(c.k), v = token(c.v), g = token(c.decays());
  Tensor o;
  if (delta_) {
    const auto rule = decay_.by_channel ? kda_step : gated_delta_rule_step;
    o = rule(q, k, v, g, token(c.beta), before.at(0), {.scale = 1});
  } else {
    o = gated_linear_attention_step(q, k, v, g, before.at(0));
  }
  if (running_sum()) before[1] = d.z;
  if (rope_)
    before.back() = positions_after(before.back(), std::vector<int64_t>(size_t(x.size(0)), 1));
  return finish(Var(o), select(p.gate, 1, 0));
}

Tensor DecayStudy::log_decays(const Var& h) const {
  const NoGrad off;
  Var z;
  if (running_sum()) z = zero_state(h.size(0), h.dtype(), h.value().device()).tensors.at(1);
  return decay(project(h), z, {}, false).g.value();
}

MixerState DecayStudy::zero_state(int64_t n, DType activations, Device device) const {
  const DType wide = accumulate_type(activations);
  const int64_t keys = cosine_ ? 2 * rank_ : rank_;
  MixerState s{{Tensor::zeros({n, heads_, keys, rank_}, wide, device)}};
  if (running_sum())  // e^0 stands before the first token
    s.tensors.push_back(Tensor::zeros({n, decay_.by_channel ? width_ : heads_}, wide, device));
  if (rope_) s.tensors.push_back(Tensor::zeros({n}, DType::i64));
  return s;
}

}  // namespace

std::unique_ptr<Mixer> make_decay_study(const ModelConfig& config, int64_t layer,
                                        const Parameter& lower_bounds) {
  return std::make_unique<DecayStudy>(config, layer, lower_bounds);
}

}  // namespace ebb
