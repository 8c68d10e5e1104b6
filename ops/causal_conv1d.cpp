#include "ops/causal_conv1d.h"

#include "ops/common.h"

namespace ebb {

namespace {

// w as [D,W], in the accumulate type.
Tensor taps(const char* op, const Tensor& w, const Tensor& x, int64_t d) {
  check_defined(op, "weight", w);
  const bool rank = w.dim() == 2 || (w.dim() == 3 && w.size(1) == 1);
  check(rank && w.size(0) == d && w.size(-1) >= 1 && w.size(-1) <= kMaxConvWidth,
        "{}: weight is {}, x is {}; want [{},W] or [{},1,W] with W = 1..{}", op, w.shape(),
        x.shape(), d, d, kMaxConvWidth);
  return parameter_values(op, "weight", w, x).view({d, w.size(-1)});
}

Tensor bias_values(const char* op, const Tensor& bias, const Tensor& x, int64_t d) {
  if (!bias) return {};
  check_shape(op, "bias", bias, {d});
  return parameter_values(op, "bias", bias, x);
}

void check_state(const char* op, const Tensor& state, const Tensor& x, const Shape& want) {
  check_shape(op, "state", state, want);
  check(state.dtype() == x.dtype() || state.dtype() == DType::f32,
        "{}: state {} is {}, x is {}; want {} or f32", op, state.shape(), state.dtype(), x.dtype(),
        x.dtype());
}

void backward(BackwardContext& ctx, int64_t batch, int64_t time, bool silu, const Shape& w_shape) {
  const Tensor &x = ctx.saved(0), &w = ctx.saved(1);
  const ConvArgs a{.x = as_rows(x),
                   .w = w,
                   .bias = ctx.saved(2),
                   .state = ctx.saved(3),
                   .first = sequence_cursor(ctx.saved(4), batch, time),
                   .silu = silu};
  const DType wide = accumulate_type(x.dtype());
  const Shape state{a.first.count, w.size(0), w.size(1)};
  const auto wanted = [&](int i, const Shape& shape, DType t) {
    return ctx.needs(i) ? Tensor::empty(shape, t, x.device()) : Tensor();
  };
  // On the GPU the sums over tokens end in the leaf's own gradient, where it has one.
  const bool cuda = kWithCuda && x.on_cuda();
  const auto sum_of = [&](int i) { return cuda ? ctx.accumulator(i) : Tensor(); };
  const Tensor dw_sum = sum_of(1), dbias_sum = sum_of(2);
  const ConvGrads g{.dx = wanted(0, x.shape(), x.dtype()),
                    .dw = dw_sum ? dw_sum.view(w.shape()) : wanted(1, w.shape(), wide),
                    .dbias = dbias_sum ? dbias_sum : wanted(2, {w.size(0)}, wide),
                    .dstate = wanted(3, state, wide),
                    .add_dw = dw_sum.defined(),
                    .add_dbias = dbias_sum.defined()};
  const Tensor dfinal = ctx.has_dy(1) ? ctx.dy(1).to(wide).contiguous() : Tensor();
  const Rows dy = as_rows(ctx.dy(0));
  if (cuda)
    gpu::causal_conv1d_bwd(a, dy, dfinal, g);
  else
    cpu::causal_conv1d_bwd(a, dy, dfinal, g);
  if (g.dx) ctx.grad(0, g.dx);
  if (g.dw) g.add_dw ? ctx.grad_accumulated(1) : ctx.grad(1, g.dw.view(w_shape));
  if (g.dbias) g.add_dbias ? ctx.grad_accumulated(2) : ctx.grad(2, g.dbias);
  if (g.dstate) ctx.grad(3, g.dstate);
}

}  // namespace

CausalConv1d causal_conv1d(const Var& xv, const Var& weight, const Var& bias,
                           const Var& initial_state, const CausalConv1dOptions& options) {
  const char* op = "causal_conv1d";
  const OpScope scope(op);
  const Tensor& x = xv.value();
  check_defined(op, "x", x);
  check(x.dim() == 3, "{}: x is {}, want [B,T,D]", op, x.shape());
  check_compute_dtype(op, "x", x);
  check_same_device(op, x, {&weight.value(), &bias.value(), &initial_state.value()});
  const int64_t batch = x.size(0), time = x.size(1), d = x.size(2);
  options.layout.check_covers(op, batch, time, x.device());
  const Tensor offsets = options.layout.device_offsets();
  ConvArgs a{.x = as_rows(x),
             .w = taps(op, weight.value(), x, d),
             .bias = bias_values(op, bias.value(), x, d),
             .first = sequence_cursor(offsets, batch, time),
             .silu = options.activation == ConvActivation::silu};
  const DType wide = accumulate_type(x.dtype());
  const Shape states{a.first.count, d, a.w.size(1)};
  if (initial_state) {
    check_state(op, initial_state.value(), x, states);
    a.state = initial_state.value().to(wide).contiguous();
  }
  const Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  Tensor final_state = options.final_state ? Tensor::empty(states, wide, x.device()) : Tensor();
  if (kWithCuda && x.on_cuda()) {
    gpu::causal_conv1d_fwd(a, y);
    if (final_state) gpu::causal_conv1d_final(a, final_state);
  } else {
    cpu::causal_conv1d_fwd(a, y);
    if (final_state) cpu::causal_conv1d_final(a, final_state);
  }
  if (final_state) final_state = final_state.to(initial_state ? initial_state.dtype() : x.dtype());
  const std::vector<Var> out =
      record(op, {xv, weight, bias, initial_state}, {a.x.t, a.w, a.bias, a.state, offsets},
             {y, final_state},
             [batch, time, silu = a.silu, w_shape = weight.shape()](BackwardContext& ctx) {
               backward(ctx, batch, time, silu, w_shape);
             });
  return {out[0], out[1]};
}

Tensor causal_conv1d_step(const Tensor& x, const Tensor& weight, const Tensor& bias,
                          const Tensor& state, ConvActivation activation) {
  const char* op = "causal_conv1d_step";
  const OpScope scope(op);
  check_defined(op, "x", x);
  check(x.dim() == 2 || (x.dim() == 3 && x.size(1) == 1), "{}: x is {}, want [N,D] or [N,1,D]", op,
        x.shape());
  check_compute_dtype(op, "x", x);
  check_same_device(op, x, {&weight, &bias, &state});
  const int64_t d = x.size(-1);
  const Tensor w = taps(op, weight, x, d), b = bias_values(op, bias, x, d);
  check_state(op, state, x, {x.size(0), d, w.size(1)});
  const bool rows = state.numel() == 0 || state.select(0, 0).is_contiguous();
  check(rows, "{}: the state's rows [{},{}] must be dense, strides are {}", op, d, w.size(1),
        state.strides());
  check(!state.may_overlap_itself(), "{}: the state's rows overlap, strides are {}", op,
        state.strides());
  const Tensor token = x.contiguous(), y = Tensor::empty(x.shape(), x.dtype(), x.device());
  const bool silu = activation == ConvActivation::silu;
  state.bump_version();
  if (kWithCuda && x.on_cuda())
    gpu::causal_conv1d_step(token, w, b, silu, state, y);
  else
    cpu::causal_conv1d_step(token, w, b, silu, state, y);
  return y;
}

Cost causal_conv1d_cost(Pass pass, int64_t tokens, int64_t channels, int64_t width, DType dtype) {
  const double n = double(tokens) * double(channels), size = double(item_size(dtype));
  const double w = double(width), weights = double(channels) * (w + 1) * 4;
  if (pass == Pass::forward) return {2 * n * size + weights, n * (2 * w + 4)};
  return {3 * n * size + 2 * weights, n * (2 * w + 8 + 2 * w + 2 * w + 1)};
}

}  // namespace ebb
