#include "ops/dplr.h"

#include <cmath>

#include "ops/delta_rule_checks.h"

namespace ebb {
namespace {

using delta_rule::check_gate;
using delta_rule::check_heads;

constexpr const char* kOp = "dplr";

// What does not depend on which dimensions lead: r is [...,H,K].
void check_inputs(const char* op, const Tensor& r, const Tensor& w, const Tensor& k,
                  const Tensor& v, const Tensor& a, const Tensor& b, int dims) {
  check_heads(op, r, k, v, dims, "r");
  check(v.size(-2) == r.size(-2), "{}: v is {}, r is {}; want as many heads", op, v.shape(),
        r.shape());
  for (const auto& [name, t] : {std::pair{"a", &a}, std::pair{"b", &b}}) {
    check_shape(op, name, *t, r.shape());
    check(t->dtype() == r.dtype(), "{}: {} is {}, want {} as r", op, name, t->dtype(), r.dtype());
  }
  check_gate(op, "w", w, r.shape(), v);
}

Tensor empty_state(const DplrProblem& p) {
  return Tensor::empty({p.sequences(), p.heads(), p.key_dim(), p.value_dim()}, p.w.dtype(),
                       p.w.device());
}

DplrProblem checked(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v,
                    const Tensor& a, const Tensor& b, const Tensor& h0,
                    const DplrOptions& options) {
  check_inputs(kOp, r, w, k, v, a, b, 4);
  check_same_device(kOp, r, {&w, &k, &v, &a, &b, &h0});
  const int64_t c = options.chunk;
  check(c == 16 || c == 32 || c == 64 || c == 128, "{}: chunk is {}, want 16, 32, 64 or 128", kOp,
        c);
  check(options.lower_bound <= 0, "{}: lower_bound is {}, want a log decay, or 0 for none", kOp,
        options.lower_bound);
  DplrProblem p{.r = r.contiguous(),
                .w = w.contiguous(),
                .k = k.contiguous(),
                .v = v.contiguous(),
                .a = a.contiguous(),
                .b = b.contiguous(),
                .scale = options.scale,
                .layout = options.layout,
                .chunk = c,
                .lower_bound = options.lower_bound};
  p.layout.check_covers(kOp, p.batch(), p.time(), r.device());
  if (h0) {
    check_gate(kOp, "h0", h0, {p.sequences(), p.heads(), p.key_dim(), p.value_dim()}, v);
    p.h0 = h0.contiguous();
  }
  return p;
}

DplrSaved forward_pass(const DplrProblem& p, const Tensor& o, const Tensor& ht) {
  if (kWithCuda && o.on_cuda()) return gpu::dplr_fwd(p, o, ht);
  return cpu::dplr_fwd(p, o, ht);
}

// Saved: r, w, k, v, a, b, inverse, states, values, scores, and h0 where backward starts over.
void backward_pass(BackwardContext& ctx, DplrProblem p, bool final_state, bool recompute) {
  p.r = ctx.saved(0), p.w = ctx.saved(1), p.k = ctx.saved(2);
  p.v = ctx.saved(3), p.a = ctx.saved(4), p.b = ctx.saved(5);
  DplrSaved saved{ctx.saved(6), ctx.saved(7), ctx.saved(8), ctx.saved(9)};
  if (recompute) {
    p.h0 = ctx.saved(10);
    saved = forward_pass(p, Tensor::empty_like(p.v), Tensor());
  }
  const auto wanted = [&](int i, const Tensor& like) {
    return ctx.needs(i) ? Tensor::empty_like(like) : Tensor();
  };
  const DplrGradients grads{wanted(0, p.r),
                            wanted(1, p.w),
                            wanted(2, p.k),
                            wanted(3, p.v),
                            wanted(4, p.a),
                            wanted(5, p.b),
                            ctx.needs(6) ? empty_state(p) : Tensor()};
  const Tensor d_o = ctx.dy(0).contiguous();
  const Tensor dht = final_state && ctx.has_dy(1) ? ctx.dy(1).contiguous() : Tensor();
  if (kWithCuda && d_o.on_cuda())
    gpu::dplr_bwd(p, saved, d_o, dht, grads);
  else
    cpu::dplr_bwd(p, saved, d_o, dht, grads);
  const Tensor* all[] = {&grads.dr, &grads.dw, &grads.dk, &grads.dv,
                         &grads.da, &grads.db, &grads.dh0};
  for (int i = 0; i < 7; ++i)
    if (*all[i]) ctx.grad(i, *all[i]);
}

}  // namespace

DplrOutput dplr(const Var& r, const Var& w, const Var& k, const Var& v, const Var& a, const Var& b,
                const Var& h0, const DplrOptions& options) {
  const OpScope scope(kOp);
  const DplrProblem p = checked(r.value(), w.value(), k.value(), v.value(), a.value(), b.value(),
                                h0.value(), options);
  const Tensor o = Tensor::empty_like(p.v);
  const Tensor ht = options.want_final_state ? empty_state(p) : Tensor();
  DplrSaved saved = forward_pass(p, o, ht);
  Tensor start;
  if (options.recompute) saved = {}, start = p.h0;
  DplrProblem sizes;  // what backward captures: the problem without its tensors
  sizes.scale = p.scale, sizes.layout = p.layout;
  sizes.chunk = p.chunk, sizes.lower_bound = p.lower_bound, sizes.zero_start = !p.h0;
  const std::vector<Var> out =
      record(kOp, {r, w, k, v, a, b, h0},
             {p.r, p.w, p.k, p.v, p.a, p.b, saved.inverse, saved.states, saved.values, saved.scores,
              start},
             {o, ht},
             [sizes, final_state = options.want_final_state, recompute = options.recompute](
                 BackwardContext& ctx) { backward_pass(ctx, sizes, final_state, recompute); });
  return {out[0], out[1]};
}

Tensor dplr_step(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v,
                 const Tensor& a, const Tensor& b, const Tensor& state, double scale) {
  constexpr const char* op = "dplr_step";
  const OpScope scope(op);
  check_inputs(op, r, w, k, v, a, b, 3);
  check_gate(op, "state", state, {v.size(0), v.size(1), r.size(2), v.size(2)}, v);
  check_same_device(op, r, {&w, &k, &v, &a, &b, &state});
  check(state.is_contiguous(), "{}: the state {} is updated in place and must be dense", op,
        state.shape());
  DplrProblem p;
  p.scale = scale;
  const auto token = [](const Tensor& t) { return t.contiguous().unsqueeze(1); };
  p.r = token(r), p.w = token(w), p.k = token(k), p.v = token(v), p.a = token(a), p.b = token(b);
  const Tensor o = Tensor::empty(v.shape(), v.dtype(), v.device());
  state.bump_version();  // before writing: read-only memory is refused here
  if (kWithCuda && o.on_cuda())
    gpu::dplr_step(p, state, o);
  else
    cpu::dplr_step(p, state, o);
  return o;
}

Cost dplr_cost(Pass pass, const DplrSize& s, DType dtype, bool saves) {
  const double item = double(item_size(dtype)), gate = double(item_size(accumulate_type(dtype)));
  const double heads = double(s.batch * s.heads), rows = heads * double(s.time);
  const double c = double(s.chunk), k = double(s.key_dim), v = double(s.value_dim);
  const double chunks = heads * std::ceil(double(s.time) / c);
  const double kept = saves ? chunks * (c * c + k * v) * item : 0;
  const double keys = rows * k * item, values = rows * v * item, gates = rows * k * gate;
  // Four scores and the inverse; Y, o and the next state from state and values.
  const double scores = 4 * c * c * k + c * c * c / 3, flows = 4 * c * c * v + 4 * c * k * v;
  if (pass == Pass::forward)
    return {4 * keys + 2 * values + gates + kept, 2 * chunks * (scores + flows)};
  return {8 * keys + 3 * values + 2 * gates + kept,
          2 * chunks * (4 * c * c * k + 8 * c * c * (k + v) + 12 * c * k * v)};
}

Cost dplr_step_cost(const DplrSize& s, DType dtype) {
  const double item = double(item_size(dtype)), gate = double(item_size(accumulate_type(dtype)));
  const double heads = double(s.batch * s.heads);
  const double k = double(s.key_dim), v = double(s.value_dim);
  return {heads * (2 * k * v * gate + (4 * k + 2 * v) * item + k * gate), heads * 8 * k * v};
}

}  // namespace ebb
