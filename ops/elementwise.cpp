#include "ops/elementwise.h"

#include "ops/common.h"
#include "ops/map.h"
#include "ops/reduce.h"

namespace ebb {
namespace {

// ---- one operand ----

enum class Saves { nothing, x, y };

// gradient: a function of (dy, saved), or of dy alone when nothing is saved.
Var unary(const char* op, const Var& x, const MapFunction& f, const MapFunction& gradient,
          Saves saves) {
  const OpScope scope(op);
  check_float(op, "x", x.value());
  const Tensor y = map(f, x.dtype(), x.value());
  const Tensor kept = saves == Saves::x ? x.value() : saves == Saves::y ? y : Tensor();
  return record(op, {x}, {kept}, {y}, [gradient](BackwardContext& ctx) {
    const Tensor dy = ctx.dy(0);
    const bool passes = gradient.op == MapOp::identity;
    ctx.grad(0, passes ? dy : map(gradient, dy.dtype(), dy, ctx.saved(0)));
  })[0];
}

// ---- two and three operands ----

// bf16 < f32 < f64; tensors without dimensions give way to those with some.
DType result_type(std::initializer_list<const Tensor*> operands) {
  const auto rank = [](DType t) { return t == DType::f64 ? 2 : t == DType::f32 ? 1 : 0; };
  bool dimensioned = false;
  for (const Tensor* t : operands) dimensioned |= t->dim() > 0;
  DType out = DType::bf16;
  for (const Tensor* t : operands)
    if ((t->dim() > 0) == dimensioned && rank(t->dtype()) > rank(out)) out = t->dtype();
  return out;
}

// An input as its gradient has to look.
struct Meta {
  Shape shape;
  DType dtype;
};
Meta meta_of(const Var& v) { return {v.shape(), v.dtype()}; }

// Hands over the gradient f(dy, s, t) of an input that was broadcast to dy's shape.
void give(BackwardContext& ctx, int input, const Meta& m, const MapFunction& f,
          const Tensor& s = {}, const Tensor& t = {}) {
  const Tensor dy = ctx.dy(0);
  const bool whole = m.shape == dy.shape();
  if (whole && f.op == MapOp::identity) return ctx.grad(input, dy.to(m.dtype));
  if (whole) return ctx.grad(input, map(f, m.dtype, dy, s, t));
  Tensor sum;
  if (f.op == MapOp::identity)
    sum = sum_to(dy, m.shape);
  else if (f.op == MapOp::neg)
    sum = map({MapOp::neg}, accumulate_type(dy.dtype()), sum_to(dy, m.shape));
  else if (f.op == MapOp::mul && s.shape() == dy.shape())
    sum = sum_to(dy, m.shape, s);  // products and sums in one pass
  else
    sum = sum_to(map(f, accumulate_type(dy.dtype()), dy, s, t), m.shape);
  ctx.grad(input, sum.to(accumulate_type(m.dtype)));
}

void check_operands(const char* op, const Var& a, const Var& b) {
  check_float(op, "a", a.value());
  check_float(op, "b", b.value());
  check_same_device(op, a.value(), {&b.value()});
  broadcast_shapes(op, a.shape(), b.shape());
}

Tensor binary(const char* op, const Var& a, const Var& b, MapOp f) {
  check_operands(op, a, b);
  return map({f}, result_type({&a.value(), &b.value()}), a.value(), b.value());
}

Var extreme(const char* op, const Var& a, const Var& b, MapOp f) {
  const OpScope scope(op);
  const Tensor y = binary(op, a, b, f);
  const bool swap = f == MapOp::minimum;  // the gradient of min(a, b) in a is that of max in b
  return record(op, {a, b}, {a.value(), b.value()}, {y},
                [ma = meta_of(a), mb = meta_of(b), swap](BackwardContext& ctx) {
                  const Tensor &a = ctx.saved(0), &b = ctx.saved(1);
                  const MapFunction f{MapOp::maximum_grad};
                  if (ctx.needs(0)) give(ctx, 0, ma, f, swap ? b : a, swap ? a : b);
                  if (ctx.needs(1)) give(ctx, 1, mb, f, swap ? a : b, swap ? b : a);
                })[0];
}

void check_mask(const char* op, const Tensor& mask, const Tensor& x) {
  check_defined(op, "mask", mask);
  check(mask.dtype() == DType::u8, "{}: mask {} is {}, want u8", op, mask.shape(), mask.dtype());
  check_same_device(op, x, {&mask});
}

Tensor compare(const char* op, const Var& a, const Var& b, MapOp f) {
  const OpScope scope(op);
  check_defined(op, "a", a.value());
  check_defined(op, "b", b.value());
  check(is_float(a.dtype()) == is_float(b.dtype()),
        "{}: a is {}, b is {}; want two floats or two integers", op, a.dtype(), b.dtype());
  if (is_float(a.dtype()))
    check_operands(op, a, b);
  else
    check_same_device(op, a.value(), {&b.value()});
  return map({f}, DType::u8, a.value(), b.value());
}

// s as a tensor that compares with x without rounding where x's values are exact in f32 or i64.
Tensor compare(const char* op, const Var& x, double s, MapOp f) {
  check_defined(op, "x", x.value());
  const bool integer = !is_float(x.dtype());
  check(!integer || s == std::floor(s), "{}: x is {}, compared with {}", op, x.dtype(), s);
  const DType t = integer ? DType::i64 : accumulate_type(x.dtype());
  return compare(op, x, Tensor::full({}, s, t, x.device()), f);
}

}  // namespace

Var add(const Var& a, const Var& b) {
  const OpScope scope("add");
  const Tensor y = binary("add", a, b, MapOp::add);
  return record("add", {a, b}, {}, {y}, [ma = meta_of(a), mb = meta_of(b)](BackwardContext& ctx) {
    if (ctx.needs(0)) give(ctx, 0, ma, {});
    if (ctx.needs(1)) give(ctx, 1, mb, {});
  })[0];
}

Var sub(const Var& a, const Var& b) {
  const OpScope scope("sub");
  const Tensor y = binary("sub", a, b, MapOp::sub);
  return record("sub", {a, b}, {}, {y}, [ma = meta_of(a), mb = meta_of(b)](BackwardContext& ctx) {
    if (ctx.needs(0)) give(ctx, 0, ma, {});
    if (ctx.needs(1)) give(ctx, 1, mb, {MapOp::neg});
  })[0];
}

Var mul(const Var& a, const Var& b) {
  const OpScope scope("mul");
  const Tensor y = binary("mul", a, b, MapOp::mul);
  const Tensor keep_a = b.requires_grad() ? a.value() : Tensor();
  const Tensor keep_b = a.requires_grad() ? b.value() : Tensor();
  return record("mul", {a, b}, {keep_a, keep_b}, {y},
                [ma = meta_of(a), mb = meta_of(b)](BackwardContext& ctx) {
                  if (ctx.needs(0)) give(ctx, 0, ma, {MapOp::mul}, ctx.saved(1));
                  if (ctx.needs(1)) give(ctx, 1, mb, {MapOp::mul}, ctx.saved(0));
                })[0];
}

Var div(const Var& a, const Var& b) {
  const OpScope scope("div");
  const Tensor y = binary("div", a, b, MapOp::div);
  const Tensor keep_a = b.requires_grad() ? a.value() : Tensor();
  return record("div", {a, b}, {keep_a, b.value()}, {y},
                [ma = meta_of(a), mb = meta_of(b)](BackwardContext& ctx) {
                  if (ctx.needs(0)) give(ctx, 0, ma, {MapOp::div}, ctx.saved(1));
                  if (ctx.needs(1)) give(ctx, 1, mb, {MapOp::div_grad}, ctx.saved(0), ctx.saved(1));
                })[0];
}

Var maximum(const Var& a, const Var& b) { return extreme("maximum", a, b, MapOp::maximum); }
Var minimum(const Var& a, const Var& b) { return extreme("minimum", a, b, MapOp::minimum); }

Var add(const Var& x, double s) {
  return unary("add", x, {MapOp::add_scalar, s}, {}, Saves::nothing);
}
Var sub(const Var& x, double s) {
  return unary("sub", x, {MapOp::add_scalar, -s}, {}, Saves::nothing);
}
Var mul(const Var& x, double s) {
  return unary("mul", x, {MapOp::mul_scalar, s}, {MapOp::mul_scalar, s}, Saves::nothing);
}
Var div(const Var& x, double s) {
  return unary("div", x, {MapOp::div_scalar, s}, {MapOp::div_scalar, s}, Saves::nothing);
}
Var sub(double s, const Var& x) {
  return unary("sub", x, {MapOp::rsub_scalar, s}, {MapOp::neg}, Saves::nothing);
}
Var div(double s, const Var& x) {
  return unary("div", x, {MapOp::rdiv_scalar, s}, {MapOp::rdiv_grad, s}, Saves::x);
}

Var neg(const Var& x) { return unary("neg", x, {MapOp::neg}, {MapOp::neg}, Saves::nothing); }
Var abs(const Var& x) { return unary("abs", x, {MapOp::abs}, {MapOp::abs_grad}, Saves::x); }
Var exp(const Var& x) { return unary("exp", x, {MapOp::exp}, {MapOp::mul}, Saves::y); }
Var log(const Var& x) { return unary("log", x, {MapOp::log}, {MapOp::div}, Saves::x); }
Var sqrt(const Var& x) { return unary("sqrt", x, {MapOp::sqrt}, {MapOp::sqrt_grad}, Saves::y); }
Var rsqrt(const Var& x) { return unary("rsqrt", x, {MapOp::rsqrt}, {MapOp::rsqrt_grad}, Saves::y); }
Var square(const Var& x) {
  return unary("square", x, {MapOp::square}, {MapOp::square_grad}, Saves::x);
}
Var pow(const Var& x, double p) {
  return unary("pow", x, {MapOp::pow, p}, {MapOp::pow_grad, p}, Saves::x);
}
Var relu(const Var& x) { return unary("relu", x, {MapOp::relu}, {MapOp::relu_grad}, Saves::y); }
Var relu2(const Var& x) { return unary("relu2", x, {MapOp::relu2}, {MapOp::relu2_grad}, Saves::x); }
Var sigmoid(const Var& x) {
  return unary("sigmoid", x, {MapOp::sigmoid}, {MapOp::sigmoid_grad}, Saves::x);
}
Var silu(const Var& x) { return unary("silu", x, {MapOp::silu}, {MapOp::silu_grad}, Saves::x); }
Var tanh(const Var& x) { return unary("tanh", x, {MapOp::tanh}, {MapOp::tanh_grad}, Saves::x); }
Var softplus(const Var& x) {
  return unary("softplus", x, {MapOp::softplus}, {MapOp::softplus_grad}, Saves::x);
}
Var clamp(const Var& x, double low, double high) {
  check(low <= high, "clamp: the range [{}, {}] is empty", low, high);
  return unary("clamp", x, {MapOp::clamp, low, high}, {MapOp::clamp_grad, low, high}, Saves::x);
}

Var where(const Tensor& mask, const Var& a, const Var& b) {
  const OpScope scope("where");
  check_operands("where", a, b);
  check_mask("where", mask, a.value());
  const Tensor y =
      map({MapOp::where}, result_type({&a.value(), &b.value()}), mask, a.value(), b.value());
  return record("where", {a, b}, {mask}, {y},
                [ma = meta_of(a), mb = meta_of(b)](BackwardContext& ctx) {
                  if (ctx.needs(0)) give(ctx, 0, ma, {MapOp::masked_keep}, ctx.saved(0));
                  if (ctx.needs(1)) give(ctx, 1, mb, {MapOp::masked_fill}, ctx.saved(0));
                })[0];
}

Var masked_fill(const Var& x, const Tensor& mask, double value) {
  const OpScope scope("masked_fill");
  check_float("masked_fill", "x", x.value());
  check_mask("masked_fill", mask, x.value());
  const Tensor y = map({MapOp::masked_fill, value}, x.dtype(), x.value(), mask);
  return record("masked_fill", {x}, {mask}, {y}, [m = meta_of(x)](BackwardContext& ctx) {
    give(ctx, 0, m, {MapOp::masked_fill}, ctx.saved(0));
  })[0];
}

Tensor eq(const Var& a, const Var& b) { return compare("eq", a, b, MapOp::eq); }
Tensor ne(const Var& a, const Var& b) { return compare("ne", a, b, MapOp::ne); }
Tensor lt(const Var& a, const Var& b) { return compare("lt", a, b, MapOp::lt); }
Tensor le(const Var& a, const Var& b) { return compare("le", a, b, MapOp::le); }
Tensor gt(const Var& a, const Var& b) { return compare("gt", a, b, MapOp::gt); }
Tensor ge(const Var& a, const Var& b) { return compare("ge", a, b, MapOp::ge); }
Tensor eq(const Var& x, double s) { return compare("eq", x, s, MapOp::eq); }
Tensor ne(const Var& x, double s) { return compare("ne", x, s, MapOp::ne); }
Tensor lt(const Var& x, double s) { return compare("lt", x, s, MapOp::lt); }
Tensor le(const Var& x, double s) { return compare("le", x, s, MapOp::le); }
Tensor gt(const Var& x, double s) { return compare("gt", x, s, MapOp::gt); }
Tensor ge(const Var& x, double s) { return compare("ge", x, s, MapOp::ge); }

Cost elementwise_cost(Pass pass, const Shape& result, DType dtype, int inputs) {
  const double n = double(result.numel()), item = double(item_size(dtype));
  // Backward reads dy and a saved tensor (none is the exception) and writes every gradient.
  const double tensors = pass == Pass::forward ? inputs + 1 : 2 + inputs;
  return {tensors * n * item, n};
}

}  // namespace ebb
