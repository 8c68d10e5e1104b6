#include "models/mamba2.h"

#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "models/language_model.h"
#include "ops/causal_conv1d.h"
#include "ops/elementwise.h"
#include "ops/gated_rms_norm.h"
#include "ops/matmul.h"
#include "ops/movement.h"
#include "ops/rms_norm.h"
#include "ops/ssd.h"
#include "ops/swiglu.h"
#include "tensor/check.h"

namespace ebb {

Mamba2::Mamba2(const ModelConfig& c, int64_t reads)
    : heads_(c.num_heads),
      head_dim_(c.head_dim),
      groups_(c.n_groups),
      state_size_(c.state_size),
      reads_(reads),
      inner_(c.num_heads * c.head_dim),
      conv_width_(c.conv_size),
      eps_(c.norm_eps),
      dt_min_(c.dt_limit_low),
      dt_max_(c.dt_limit_high.value_or(std::numeric_limits<double>::infinity())),
      norm_first_(c.norm_before_gate) {
  const int64_t d = c.hidden_size;
  // Eight rows at a time, so that every row of the product starts at a 16-byte boundary.
  input_ = register_fused({{"in_proj.weight", {columns(), d}}}, 8);
  if (c.use_bias) {
    input_bias_ = register_fused({{"in_proj.bias", {columns()}}}, 8, WeightDecay::off);
    input_bias_.keep_f32();
  }
  conv_ = register_parameter("conv1d.weight", Tensor::zeros({channels(), 1, conv_width_}));
  conv_.keep_f32();
  if (c.use_conv_bias)
    conv_bias_ = register_parameter("conv1d.bias", Tensor::zeros({channels()}), WeightDecay::off);
  dt_bias_ = register_parameter("dt_bias", Tensor::zeros({heads_}), WeightDecay::off);
  A_log_ = register_parameter("A_log", Tensor::zeros({heads_}), WeightDecay::off);
  D_ = register_parameter("D", Tensor::full({heads_}, 1), WeightDecay::off);
  if (c.rmsnorm)
    norm_ = register_parameter("norm.weight", Tensor::full({inner_}, 1), WeightDecay::off);
  output_ = register_parameter("out_proj.weight", Tensor::zeros({d, inner_}));
  if (c.use_bias)
    output_bias_ = register_parameter("out_proj.bias", Tensor::zeros({d}), WeightDecay::off);
}

// The columns of the input product.
struct Mamba2::Projected {
  Var z;    // [...,inner]
  Var xbc;  // [...,channels]
  Var dt;   // [...,H]
};

Mamba2::Projected Mamba2::project(const Var& x) const {
  Var bias;
  if (input_bias_.defined()) bias = reshape(input_bias_.var(), {input_bias_.master().numel()});
  const Var all = linear(x, input_.var(), bias);
  std::vector<int64_t> sizes = {inner_, channels(), heads_};
  const int64_t rest = all.shape().back() - sizes[0] - sizes[1] - sizes[2];
  if (rest > 0) sizes.push_back(rest);
  const std::vector<Var> parts = split(all, -1, sizes);
  return {parts[0], parts[1], parts[2]};
}

// What the convolution gives, cut into heads and groups.
Mamba2::Inputs Mamba2::cut(const Projected& p, const Var& conv, const Shape& lead) const {
  const int64_t keys = groups_ * state_size_;
  std::vector<int64_t> sizes = {inner_, keys, keys};
  if (reads_ > 1) sizes.push_back(keys);
  const std::vector<Var> parts = split(conv, -1, sizes);
  const auto shaped = [&](const Var& t, int64_t n, int64_t width) {
    Shape shape = lead;
    shape.push_back(n);
    shape.push_back(width);
    return reshape(t, shape);
  };
  return {.x = shaped(parts[0], heads_, head_dim_),
          .dt = p.dt,
          .B = shaped(parts[1], groups_, state_size_),
          .C = shaped(parts[2], groups_, state_size_),
          .read = reads_ > 1 ? shaped(parts[3], groups_, state_size_) : Var(),
          .z = p.z};
}

Mamba2::Inputs Mamba2::inputs(const Var& x, const SeqLayout& layout, const Tensor& conv_state,
                              Tensor* final_conv_state) const {
  check(x.dim() == 3, "mamba2: x is {}, want [B,T,d]", x.shape());
  const Projected p = project(x);
  const CausalConv1d conv =
      causal_conv1d(p.xbc, conv_.var(), conv_bias_.defined() ? conv_bias_.var() : Var(),
                    conv_state ? Var(conv_state) : Var(),
                    {.final_state = final_conv_state != nullptr, .layout = layout});
  if (final_conv_state) *final_conv_state = conv.final_state.value();
  return cut(p, conv.y, x.shape().first(2));
}

Mamba2::Inputs Mamba2::step_inputs(const Var& x, const Tensor& conv_state) const {
  check(x.dim() == 2, "mamba2: x is {}, want [N,d]", x.shape());
  const Projected p = project(x);
  const Tensor conv = causal_conv1d_step(p.xbc.value(), conv_.master(),
                                         conv_bias_.defined() ? conv_bias_.master() : Tensor(),
                                         conv_state, ConvActivation::silu);
  return cut(p, conv, x.shape().first(1));
}

Var Mamba2::finish(const Var& y, const Inputs& in) const {
  const Var flat = reshape(y, in.z.shape());
  const Var bias = output_bias_.defined() ? output_bias_.var() : Var();
  if (!norm_.defined()) return linear(swiglu(in.z, flat), output_.var(), bias);
  if (!norm_first_)
    return linear(
        gated_rms_norm(flat, in.z, norm_.var(),
                       {.eps = float(eps_), .order = GateOrder::gate_first, .groups = groups_}),
        output_.var(), bias);
  // The norm's weight differs from group to group: times the gate it stands behind the norm.
  Shape grouped = in.z.shape();
  grouped[flat.dim() - 1] = groups_;
  grouped.push_back(inner_ / groups_);
  const Var normed = reshape(rms_norm(reshape(flat, grouped), {}, float(eps_)), in.z.shape());
  return linear(mul(swiglu(in.z, normed), cast(norm_.var(), normed.dtype())), output_.var(), bias);
}

SsdOptions Mamba2::ssd_options() const {
  return {.D = D_.var(),
          .dt_bias = dt_bias_.var(),
          .dt_min = dt_min_,
          .dt_max = dt_max_,
          .log_A = true};
}

Var Mamba2::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                    MixerState* final) {
  Tensor conv_state;
  const Inputs in =
      inputs(x, layout, initial ? initial->tensors.at(1) : Tensor(), final ? &conv_state : nullptr);
  SsdOptions options = ssd_options();
  options.want_final_state = final != nullptr;
  options.layout = layout;
  const SsdOutput r = ssd(in.x, in.dt, A_log_.var(), in.B, in.C,
                          initial ? Var(initial->tensors.at(0)) : Var(), options);
  if (final) final->tensors = {r.ht.value(), conv_state};
  return finish(r.y, in);
}

Var Mamba2::step(const Var& x, MixerState& state) {
  const NoGrad off;
  const Inputs in = step_inputs(x, state.tensors.at(1));
  const Tensor y = ssd_step(in.x.value(), in.dt.value(), A_log_.master(), in.B.value(),
                            in.C.value(), state.tensors.at(0), ssd_options());
  return finish(y, in);
}

MixerState Mamba2::zero_state(int64_t n, DType activations, Device device) const {
  return {{Tensor::zeros({n, heads_, state_size_, head_dim_}, accumulate_type(activations), device),
           Tensor::zeros({n, channels(), conv_width_}, activations, device)}};
}

std::optional<DecayGate> Mamba2::decay_gate_parameters() const {
  return DecayGate{A_log_, dt_bias_, heads_, 1};
}

Tensor Mamba2::gate_preactivations(const Tensor& h) const {
  const NoGrad off;
  const int64_t begin = inner_ + channels();
  const Tensor w = input_.master().slice(0, begin, begin + heads_);
  Var bias;
  if (input_bias_.defined())
    bias = input_bias_.master().slice(0, begin, begin + heads_).reshape({heads_});
  return linear(h.to(w.dtype()).reshape({-1, h.shape().back()}), w, bias).value();
}

Tensor Mamba2::log_decays(const Var& h) const {
  const NoGrad off;
  const Var raw = add(cast(project(h).dt, A_log_.master().dtype()), dt_bias_.var());
  return mul(neg(exp(A_log_.var())), clamp(softplus(raw), dt_min_, dt_max_)).value();
}

void init_mamba2_weights(LanguageModel& model, uint64_t seed) {
  const ModelConfig& c = model.config();
  const bool fla = c.weight_init == "fla";
  for (const NamedParameter& p : model.named_parameters()) {
    const auto is = [&](const char* end) { return p.name.ends_with(end); };
    const double inner = double(c.num_heads * c.head_dim);
    if (is("out_proj.weight") && (c.rescale_prenorm_residual || !fla))
      init_uniform(
          p, seed,
          1 / std::sqrt(inner * (c.rescale_prenorm_residual ? double(model.layers()) : 1)));
    else if (is("g_proj.weight"))
      p.value().fill_(0);
    else if ((is("in_proj.weight") || is("q_proj.weight") || is("e_proj.weight")) && !fla)
      init_uniform(p, seed, 1 / std::sqrt(double(c.hidden_size)));
    else if ((is("conv1d.weight") || is("conv1d.bias")) && !fla)
      init_uniform(p, seed, 1 / std::sqrt(double(c.conv_size)));
    else if (p.shape.size() == 1)
      p.value().fill_(is("bias") ? 0 : 1);
    else
      init_normal(p, seed, c.initializer_range);
    p.parameter.refresh_shadow();
  }
}

}  // namespace ebb
