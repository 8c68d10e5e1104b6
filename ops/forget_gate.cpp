#include "ops/forget_gate.h"

#include <cmath>

#include "ops/cpu_math.h"
#include "ops/gate_rows_cpu.h"

namespace ebb {

namespace cpu {
namespace {

template <class T>
T value_or_zero(const Tensor& t, int64_t c) {
  return t ? t.data<T>()[c] : T(0);
}

// log f.
template <class T>
T log_forget(T y, T lower) {
  if (lower == 0) return y > 0 ? -std::log1p(vexp(-y)) : y - std::log1p(vexp(y));
  const T rest = (1 - lower) * sigmoid(-y);  // 1 − f
  return rest < T(0.5) ? std::log1p(-rest) : std::log(lower + (1 - lower) * sigmoid(y));
}

// Of log f: by y and by the lower bound.
template <class T>
std::pair<T, T> slopes(T y, T lower) {
  const T down = sigmoid(-y), up = sigmoid(y);
  if (lower == 0) return {down, down / up};
  const T f = lower + (1 - lower) * up;
  return {(1 - lower) * down * up / f, down / f};
}

}  // namespace

void forget_gate_fwd(const ForgetGateArgs& in, const Tensor& g) {
  visit_gate(g.dtype(), [&]<class T>() {
    const T factor = T(1 / in.divisor);
    gate_rows<T>(in.z, g, [&](T z, int64_t c) {
      return factor * log_forget(z + value_or_zero<T>(in.bias, c), value_or_zero<T>(in.lower, c));
    });
  });
}

void forget_gate_bwd(const ForgetGateArgs& in, const Tensor& dg, const ForgetGateGrads& out) {
  visit_gate(dg.dtype(), [&]<class T>() {
    const T factor = T(1 / in.divisor);
    const std::vector<double> sum =
        gate_row_gradients<T>(in.z, dg, out.dz, [&](T z, T d, int64_t c) {
          const auto [by_y, by_lower] =
              slopes(z + value_or_zero<T>(in.bias, c), value_or_zero<T>(in.lower, c));
          return std::pair(factor * d * by_y, factor * d * by_lower);
        });
    for (int64_t c = 0; c < in.z.width; ++c) {
      if (out.dbias) out.dbias.data<T>()[c] = T(sum[size_t(c)]);
      if (out.dlower) out.dlower.data<T>()[c] = T(sum[size_t(in.z.width + c)]);
    }
  });
}

}  // namespace cpu

namespace {

constexpr const char* kOp = "forget_gate";

// C values as [C], or undefined.
Tensor per_channel(const char* what, const Tensor& t, const Tensor& z, int64_t channels) {
  if (!t) return {};
  check(t.numel() == channels, "{}: {} is {}, z {}; want {} values", kOp, what, t.shape(),
        z.shape(), channels);
  return gate_parameter(kOp, what, t, z).view({channels});
}

void backward(BackwardContext& ctx, int inner, double divisor, const Shape& bias_shape,
              const Shape& lower_shape) {
  const Tensor& z = ctx.saved(0);
  const ForgetGateArgs in{as_rows(z, inner), ctx.saved(1), ctx.saved(2), divisor};
  const ForgetGateGrads out{
      .dz = ctx.needs(0) ? Tensor::empty(z.shape(), z.dtype(), z.device()) : Tensor(),
      .dbias = ctx.needs(1) ? Tensor::empty_like(in.bias) : Tensor(),
      .dlower = ctx.needs(2) ? Tensor::empty_like(in.lower) : Tensor()};
  const Tensor dg = ctx.dy(0).contiguous();
  if (kWithCuda && z.on_cuda())
    gpu::forget_gate_bwd(in, dg, out);
  else
    cpu::forget_gate_bwd(in, dg, out);
  if (out.dz) ctx.grad(0, out.dz);
  if (out.dbias) ctx.grad(1, out.dbias.view(bias_shape));
  if (out.dlower) ctx.grad(2, out.dlower.view(lower_shape));
}

}  // namespace

Var forget_gate(const Var& zv, const ForgetGateOptions& options) {
  const OpScope scope(kOp);
  const Tensor &z = zv.value(), &bias = options.bias.value(), &lower = options.lower_bound.value();
  check_defined(kOp, "z", z);
  check_compute_dtype(kOp, "z", z);
  check(z.dim() >= 1, "{}: z is a scalar, want [...,C]", kOp);
  check_same_device(kOp, z, {&bias, &lower});
  check(options.divisor > 0, "{}: divisor is {}, want > 0", kOp, options.divisor);
  // Channels: the last dimension, or the last two where the parameters say so.
  const Tensor& given = bias ? bias : lower;
  const bool heads = given && z.dim() >= 2 && given.numel() != z.size(-1);
  const int inner = heads ? 2 : 1;
  const int64_t channels = heads ? z.size(-2) * z.size(-1) : z.size(-1);
  const ForgetGateArgs in{as_rows(z, inner), per_channel("bias", bias, z, channels),
                          per_channel("lower_bound", lower, z, channels), options.divisor};
  const Tensor g = Tensor::empty(z.shape(), accumulate_type(z.dtype()), z.device());
  if (kWithCuda && z.on_cuda())
    gpu::forget_gate_fwd(in, g);
  else
    cpu::forget_gate_fwd(in, g);
  const Shape bias_shape = bias ? bias.shape() : Shape{},
              lower_shape = lower ? lower.shape() : Shape{};
  return record(kOp, {zv, options.bias, options.lower_bound}, {in.z.t, in.bias, in.lower}, {g},
                [inner, divisor = options.divisor, bias_shape, lower_shape](BackwardContext& ctx) {
                  backward(ctx, inner, divisor, bias_shape, lower_shape);
                })[0];
}

Cost forget_gate_cost(Pass pass, int64_t elements, DType dtype) {
  const double n = double(elements), size = double(item_size(dtype));
  const double wide = double(item_size(accumulate_type(dtype)));
  if (pass == Pass::forward) return {n * (size + wide), n * 6};
  return {n * (2 * size + wide), n * 14};
}

}  // namespace ebb
