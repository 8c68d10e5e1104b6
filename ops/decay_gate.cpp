#include "ops/decay_gate.h"

#include "ops/cpu_math.h"
#include "ops/gate_rows_cpu.h"

namespace ebb {

namespace cpu {
namespace {

// Per channel: exp(A_log) of its head and dt_bias.
template <class T>
struct Channels {
  explicit Channels(const DecayGateArgs& in)
      : scale(size_t(in.a.width)), bias(size_t(in.a.width)), per_head(in.a.width) {
    const int64_t heads = in.A_log.numel();
    per_head = heads ? in.a.width / heads : 0;
    for (int64_t c = 0; c < in.a.width; ++c) {
      scale[size_t(c)] = std::exp(in.A_log.data<T>()[c / per_head]);
      bias[size_t(c)] = in.dt_bias ? in.dt_bias.data<T>()[c] : T(0);
    }
  }
  std::vector<T> scale, bias;
  int64_t per_head;
};

template <class T>
T gate(T y, T scale, T bound) {
  return bound < 0 ? bound * sigmoid(scale * y) : -scale * softplus(y);
}

// {da, the summand of dA_log}.
template <class T>
std::pair<T, T> slopes(T y, T scale, T bound, T dg) {
  if (bound < 0) {
    const T u = scale * y, du = bound * sigmoid(u) * sigmoid(-u) * dg;
    return {scale * du, du * u};
  }
  return {-scale * sigmoid(y) * dg, dg * gate(y, scale, bound)};
}

}  // namespace

void decay_gate_fwd(const DecayGateArgs& in, const Tensor& g) {
  visit_gate(g.dtype(), [&]<class T>() {
    const Channels<T> ch(in);
    gate_rows<T>(in.a, g, [&](T a, int64_t c) {
      return gate(a + ch.bias[size_t(c)], ch.scale[size_t(c)], T(in.lower_bound));
    });
  });
}

void decay_gate_bwd(const DecayGateArgs& in, const Tensor& dg, const DecayGateGrads& out) {
  visit_gate(dg.dtype(), [&]<class T>() {
    const Channels<T> ch(in);
    const std::vector<double> sum =
        gate_row_gradients<T>(in.a, dg, out.da, [&](T a, T d, int64_t c) {
          return slopes(a + ch.bias[size_t(c)], ch.scale[size_t(c)], T(in.lower_bound), d);
        });
    const int64_t width = in.a.width;
    if (out.ddt_bias)
      for (int64_t c = 0; c < width; ++c) out.ddt_bias.data<T>()[c] = T(sum[size_t(c)]);
    if (out.dA_log)
      for (int64_t h = 0; h < out.dA_log.numel(); ++h) {
        double head = 0;
        for (int64_t k = 0; k < ch.per_head; ++k) head += sum[size_t(width + h * ch.per_head + k)];
        out.dA_log.data<T>()[h] = T(head);
      }
  });
}

}  // namespace cpu

namespace {

constexpr const char* kOp = "decay_gate";

// How many trailing dimensions of a form the H·K channels.
int channel_dims(const Tensor& a, int64_t heads, int64_t channels) {
  if (a.dim() >= 1 && a.size(-1) == channels) return 1;
  if (a.dim() >= 2 && a.size(-2) == heads && heads * a.size(-1) == channels) return 2;
  return 0;
}

DecayGateArgs arguments(const Tensor& a, const Tensor& A_log, const Tensor& dt_bias, int inner,
                        double lower_bound) {
  return {as_rows(a, inner), A_log, dt_bias, lower_bound};
}

void backward(BackwardContext& ctx, int inner, double lower_bound, const Shape& bias_shape) {
  const Tensor &a = ctx.saved(0), &A_log = ctx.saved(1);
  const DecayGateArgs in = arguments(a, A_log, ctx.saved(2), inner, lower_bound);
  const DecayGateGrads out{
      .da = ctx.needs(0) ? Tensor::empty(a.shape(), a.dtype(), a.device()) : Tensor(),
      .dA_log = ctx.needs(1) ? Tensor::empty_like(A_log) : Tensor(),
      .ddt_bias = ctx.needs(2) ? Tensor::empty_like(in.dt_bias) : Tensor()};
  const Tensor dg = ctx.dy(0).contiguous();
  if (kWithCuda && a.on_cuda())
    gpu::decay_gate_bwd(in, dg, out);
  else
    cpu::decay_gate_bwd(in, dg, out);
  if (out.da) ctx.grad(0, out.da);
  if (out.dA_log) ctx.grad(1, out.dA_log);
  if (out.ddt_bias) ctx.grad(2, out.ddt_bias.view(bias_shape));
}

}  // namespace

Var decay_gate(const Var& av, const Var& A_log_var, const Var& bias_var,
               const DecayGateOptions& options) {
  const OpScope scope(kOp);
  const Tensor &a = av.value(), &A_log = A_log_var.value(), &bias = bias_var.value();
  check_defined(kOp, "a", a);
  check_defined(kOp, "A_log", A_log);
  check_compute_dtype(kOp, "a", a);
  check_same_device(kOp, a, {&A_log, &bias});
  check(options.lower_bound <= 0, "{}: lower_bound is {}; a log decay is negative, want < 0", kOp,
        options.lower_bound);
  check(A_log.dim() == 1, "{}: A_log is {}, want [H]", kOp, A_log.shape());
  const int64_t heads = A_log.numel();
  const int64_t channels = bias ? bias.numel() : heads * options.channels_per_head;
  const Shape bias_shape = bias ? bias.shape() : Shape{channels};
  const int inner = channel_dims(a, heads, channels);
  const bool bias_ok = bias_shape.size() == 1 || (bias_shape.size() == 2 && bias_shape[0] == heads);
  check(inner > 0 && bias_ok && heads > 0 && channels % heads == 0,
        "{}: a is {}, A_log {}, dt_bias {}; want a [...,H], dt_bias [H] or a [...,H,K], dt_bias "
        "[H,K]",
        kOp, a.shape(), A_log.shape(), bias_shape);
  const Tensor A = gate_parameter(kOp, "A_log", A_log, a);
  const Tensor b = bias ? gate_parameter(kOp, "dt_bias", bias, a).view({channels}) : Tensor();
  const DecayGateArgs in = arguments(a, A, b, inner, options.lower_bound);
  const Tensor g = Tensor::empty(a.shape(), accumulate_type(a.dtype()), a.device());
  if (kWithCuda && a.on_cuda())
    gpu::decay_gate_fwd(in, g);
  else
    cpu::decay_gate_fwd(in, g);
  return record(kOp, {av, A_log_var, bias_var}, {in.a.t, A, b}, {g},
                [inner, bound = options.lower_bound, bias_shape](BackwardContext& ctx) {
                  backward(ctx, inner, bound, bias_shape);
                })[0];
}

Cost decay_gate_cost(Pass pass, int64_t elements, DType dtype) {
  const double n = double(elements), size = double(item_size(dtype));
  const double wide = double(item_size(accumulate_type(dtype)));
  if (pass == Pass::forward) return {n * (size + wide), n * 5};
  return {n * (2 * size + wide), n * 14};
}

}  // namespace ebb
