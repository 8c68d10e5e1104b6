#include "ops/ssd.h"

#include <algorithm>
#include <cmath>

#include "ops/common.h"
#include "ops/delta_rule_checks.h"
#include "ops/recurrence_cpu.h"

namespace ebb {

namespace cpu {
namespace {

constexpr int64_t kRows = 512;  // tokens of a partial sum

template <class F>
void visit(DType t, F&& f) {
  t == DType::f64 ? f.template operator()<double>() : f.template operator()<float>();
}

template <class T>
struct Gate {
  explicit Gate(const SsdGateArgs& in)
      : softplus_(in.softplus), low(T(in.dt_min)), high(T(in.dt_max)) {
    for (int64_t h = 0; h < in.A.numel(); ++h) {
      const T a = in.A.data<T>()[h];
      A.push_back(in.log_A ? -std::exp(a) : a);
      bias.push_back(in.bias ? in.bias.data<T>()[h] : T(0));
    }
  }
  // Δ, and dΔ/ddt.
  std::pair<T, T> step(T dt, int64_t head) const {
    const T y = dt + bias[size_t(head)];
    const T raw = softplus_ ? softplus(y) : y;
    const bool inside = !(raw < low || raw > high);  // NaN stays NaN
    return {inside ? raw : std::clamp(raw, low, high),
            inside ? (softplus_ ? sigmoid(y) : T(1)) : T(0)};
  }
  bool softplus_;
  T low, high;
  std::vector<T> A, bias;
};

}  // namespace

void ssd_gate_fwd(const SsdGateArgs& in, const Tensor& step, const Tensor& decay) {
  visit(step.dtype(), [&]<class T>() {
    const Gate<T> gate(in);
    const int64_t heads = in.A.numel(), n = step.numel();
    const T* dt = in.dt.t.data<T>();
    T *p_step = step.data<T>(), *p_decay = decay.data<T>();
#pragma omp parallel for if (n > 4096)
    for (int64_t i = 0; i < n; ++i) {
      p_step[i] = gate.step(dt[i / heads * in.dt.stride + i % heads], i % heads).first;
      p_decay[i] = gate.A[size_t(i % heads)] * p_step[i];
    }
  });
}

void ssd_gate_bwd(const SsdGateArgs& in, const Tensor& dstep, const Tensor& ddecay,
                  const SsdGateGrads& out) {
  visit(dstep.dtype(), [&]<class T>() {
    const Gate<T> gate(in);
    const int64_t heads = in.A.numel(), tokens = in.dt.count;
    const int64_t blocks = (tokens + kRows - 1) / kRows;
    std::vector<double> partial(size_t(blocks * 2 * heads));  // Σ ddt, Σ Δ da
    const T *dt = in.dt.t.data<T>(), *ds = dstep.data<T>(), *da = ddecay.data<T>();
    T* ddt = out.ddt ? out.ddt.data<T>() : nullptr;
#pragma omp parallel for if (tokens * heads > 4096)
    for (int64_t b = 0; b < blocks; ++b) {
      double *bias = partial.data() + b * 2 * heads, *a = bias + heads;
      for (int64_t i = b * kRows * heads; i < std::min(tokens, (b + 1) * kRows) * heads; ++i) {
        const size_t h = size_t(i % heads);
        const auto [step, slope] = gate.step(dt[i / heads * in.dt.stride + i % heads], i % heads);
        const T d = slope * (ds[i] + gate.A[h] * da[i]);
        if (ddt) ddt[i] = d;
        bias[h] += double(d);
        a[h] += double(step * da[i]);
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      double bias = 0, a = 0;
      for (int64_t b = 0; b < blocks; ++b) {
        bias += partial[size_t(b * 2 * heads + h)];
        a += partial[size_t((b * 2 + 1) * heads + h)];
      }
      if (out.dbias) out.dbias.data<T>()[h] = T(bias);
      if (out.dA) out.dA.data<T>()[h] = T(in.log_A ? a * double(gate.A[size_t(h)]) : a);
    }
  });
}

}  // namespace cpu

namespace {

using delta_rule::check_gate;

// The checks of what belongs to Δ; the rest is checked by gated_linear_attention, in its names.
SsdGateArgs checked_gate(const char* op, const Tensor& x, const Tensor& dt, const Tensor& A,
                         const SsdOptions& options) {
  check_defined(op, "x", x);
  check_defined(op, "dt", dt);
  check_compute_dtype(op, "x", x);
  check(x.dim() >= 3, "{}: x is {}, want [B,T,H,P]", op, x.shape());
  const Shape gates = x.shape().first(x.dim() - 1);
  check(dt.shape() == gates, "{}: dt is {}, want {}", op, dt.shape(), gates);
  const DType wide = accumulate_type(x.dtype());
  check(dt.dtype() == x.dtype() || dt.dtype() == wide, "{}: dt is {}, want {} or {}", op,
        dt.dtype(), x.dtype(), wide);
  const int64_t heads = gates.back();
  check_gate(op, "A", A, {heads}, x);
  const Tensor &D = options.D.value(), &bias = options.dt_bias.value();
  if (D) check_gate(op, "D", D, {heads}, x);
  if (bias) check_gate(op, "dt_bias", bias, {heads}, x);
  check_same_device(op, x, {&dt, &A, &D, &bias});
  check(options.dt_min >= 0 && options.dt_min <= options.dt_max,
        "{}: dt_min is {}, dt_max {}; want 0 <= dt_min <= dt_max", op, options.dt_min,
        options.dt_max);
  if (!options.log_A && !x.on_cuda())
    cpu::recurrence::check_decays(op, A.contiguous(), "A", "A <= 0");
  return {as_rows(dt),      A.contiguous(), bias ? bias.contiguous() : Tensor(),
          options.softplus, options.log_A,  options.dt_min,
          options.dt_max};
}

void gate_forward(const SsdGateArgs& in, const Tensor& step, const Tensor& decay) {
  if (kWithCuda && step.on_cuda())
    gpu::ssd_gate_fwd(in, step, decay);
  else
    cpu::ssd_gate_fwd(in, step, decay);
}

// Saved: dt, A, dt_bias.
void gate_backward(BackwardContext& ctx, SsdGateArgs in) {
  const Tensor& dt = ctx.saved(0);
  in.dt = as_rows(dt), in.A = ctx.saved(1), in.bias = ctx.saved(2);
  const auto wanted = [&](int i, const Tensor& like) {
    return ctx.needs(i) ? Tensor::empty(like.shape(), like.dtype(), like.device()) : Tensor();
  };
  const SsdGateGrads grads{wanted(0, dt), wanted(1, in.A), wanted(2, in.bias)};
  const Tensor dstep = ctx.dy(0).contiguous(), ddecay = ctx.dy(1).contiguous();
  if (kWithCuda && dt.on_cuda())
    gpu::ssd_gate_bwd(in, dstep, ddecay, grads);
  else
    cpu::ssd_gate_bwd(in, dstep, ddecay, grads);
  if (grads.ddt) ctx.grad(0, grads.ddt);
  if (grads.dA) ctx.grad(1, grads.dA);
  if (grads.dbias) ctx.grad(2, grads.dbias);
}

// {Δ, A Δ}, recorded.
std::pair<Var, Var> gate(const Var& dt, const Var& A, const SsdOptions& options,
                         const SsdGateArgs& in) {
  const Tensor step = Tensor::empty(dt.shape(), in.A.dtype(), in.A.device());
  const Tensor decay = Tensor::empty_like(step);
  gate_forward(in, step, decay);
  SsdGateArgs rest = in;  // what backward captures: no tensors
  rest.dt = {}, rest.A = {}, rest.bias = {};
  const std::vector<Var> out =
      record("ssd_gate", {dt, A, options.dt_bias}, {in.dt.t, in.A, in.bias}, {step, decay},
             [rest](BackwardContext& ctx) { gate_backward(ctx, rest); });
  return {out[0], out[1]};
}

void check_states(const char* op, const Tensor& x, const Tensor& B, const Tensor& C) {
  check_defined(op, "B", B);
  check_defined(op, "C", C);
  const int dims = x.dim();
  for (const auto& [name, t] : {std::pair{"B", &B}, std::pair{"C", &C}}) {
    check(t->dim() == dims && t->shape().first(dims - 2) == x.shape().first(dims - 2),
          "{}: {} is {}, x is {}; want the same sizes before the heads", op, name, t->shape(),
          x.shape());
    check(t->dtype() == x.dtype(), "{}: {} is {}, x {}; want one dtype", op, name, t->dtype(),
          x.dtype());
  }
  check(B.shape() == C.shape(), "{}: B is {}, C {}; want the same", op, B.shape(), C.shape());
  const int64_t heads = x.size(-2), groups = B.size(-2);
  check(groups >= 1 && heads >= 1 && heads % groups == 0,
        "{}: {} heads over {} groups; want a multiple", op, heads, groups);
}

}  // namespace

SsdOutput ssd(const Var& x, const Var& dt, const Var& A, const Var& B, const Var& C, const Var& h0,
              const SsdOptions& options) {
  constexpr const char* op = "ssd";
  const OpScope scope(op);
  const SsdGateArgs in = checked_gate(op, x.value(), dt.value(), A.value(), options);
  check(x.dim() == 4, "{}: x is {}, want [B,T,H,P]", op, x.shape());
  check_states(op, x.value(), B.value(), C.value());
  LinearAttentionOptions rest{.want_final_state = options.want_final_state,
                              .layout = options.layout,
                              .chunk = options.chunk,
                              .memory_chunk = options.memory_chunk,
                              .wide_contributions = options.wide_contributions,
                              .skip = options.D};
  if (kWithCuda && x.value().on_cuda()) {
    const LinearAttentionOutput r =
        gated_linear_attention_by_steps(C, B, x, dt, A, options.dt_bias, in, h0, rest);
    return {r.o, r.ht, r.contributions};
  }
  const auto [step, decay] = gate(dt, A, options, in);
  rest.weight = step;
  const LinearAttentionOutput r = gated_linear_attention(C, B, x, decay, h0, rest);
  return {r.o, r.ht, r.contributions};
}

Tensor ssd_step(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                const Tensor& C, const Tensor& state, const SsdOptions& options) {
  constexpr const char* op = "ssd_step";
  const OpScope scope(op);
  const SsdGateArgs in = checked_gate(op, x, dt, A, options);
  check(x.dim() == 3, "{}: x is {}, want [B,H,P]", op, x.shape());
  check_states(op, x, B, C);
  if (kWithCuda && x.on_cuda()) {
    const Tensor& D = options.D.value();
    check_gate(op, "state", state, {x.size(0), x.size(1), B.size(2), x.size(2)}, x);
    check_same_device(op, x, {&B, &C, &state});
    check(state.is_contiguous(), "{}: the state {} is updated in place and must be dense", op,
          state.shape());
    check(B.size(2) <= 256 && x.size(2) <= 256, "{}: head sizes {} and {}; want at most 256", op,
          B.size(2), x.size(2));
    const Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
    state.bump_version();
    gpu::ssd_step(in, x.contiguous(), B.contiguous(), C.contiguous(), D ? D.contiguous() : D, state,
                  y);
    return y;
  }
  const Tensor step = Tensor::empty(dt.shape(), in.A.dtype());
  const Tensor decay = Tensor::empty_like(step);
  gate_forward(in, step, decay);
  return gated_linear_attention_step(C, B, x, decay, state,
                                     {.weight = step, .skip = options.D.value()});
}

Cost ssd_cost(Pass pass, const LinearAttentionSize& s, DType dtype, bool saves) {
  Cost c = gated_linear_attention_cost(pass, s, dtype, saves);
  const double gates = double(s.batch) * double(s.time) * double(s.heads);
  // dt instead of A Δ; per token softplus, its slope and the products with A.
  const double wide = double(item_size(accumulate_type(dtype))), item = double(item_size(dtype));
  const double passes = pass == Pass::forward ? 1 : 2;
  c.bytes += passes * gates * (item - wide);
  c.flops += gates * (pass == Pass::forward ? 6 : 12);
  return c;
}

Cost ssd_step_cost(const LinearAttentionSize& s, DType dtype) {
  Cost c = gated_linear_attention_step_cost(s, dtype);
  const double gates = double(s.batch) * double(s.heads);
  c.bytes += gates * double(item_size(dtype) - item_size(accumulate_type(dtype)));
  c.flops += gates * 6;
  return c;
}

}  // namespace ebb
