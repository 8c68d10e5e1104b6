// Elementwise operators with broadcasting (numpy rules), one pass over operands of any strides.
//   Var y = mul(silu(gate), value);          // or  silu(gate) * value
//   Var z = where(le(pos, limit), y, 0.0 * y);
// Types: f32, f64 (CPU), bf16 mix freely. The result has the wider type (bf16 < f32 < f64), where
// an operand without dimensions does not widen one that has some; numbers never widen. Arithmetic
// is f32, or f64 if an operand is. A gradient comes back in its input's type; one that was summed
// over broadcast dimensions in f32 or f64, unrounded, in an order fixed by the shapes.
// NaN propagates, also through relu, clamp, maximum and their gradients.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb {

Var add(const Var& a, const Var& b);
Var sub(const Var& a, const Var& b);
Var mul(const Var& a, const Var& b);      // saves what the other's gradient needs
Var div(const Var& a, const Var& b);      // saves a, b
Var maximum(const Var& a, const Var& b);  // saves a, b; where they are equal, each gets dy/2
Var minimum(const Var& a, const Var& b);

Var add(const Var& x, double s);
Var sub(const Var& x, double s);
Var mul(const Var& x, double s);
Var div(const Var& x, double s);
Var sub(double s, const Var& x);
Var div(double s, const Var& x);  // saves x

Var neg(const Var& x);
Var abs(const Var& x);                   // saves x; gradient 0 at 0
Var exp(const Var& x);                   // saves y
Var log(const Var& x);                   // saves x
Var sqrt(const Var& x);                  // saves y
Var rsqrt(const Var& x);                 // 1/sqrt(x); saves y
Var square(const Var& x);                // saves x
Var pow(const Var& x, double exponent);  // saves x; exponent 0 has gradient 0
// x <= 0 ? 0 : x, and its square (the RWKV channel mix).
Var relu(const Var& x);      // saves y
Var relu2(const Var& x);     // saves x
Var sigmoid(const Var& x);   // saves x: 1 − σ of a rounded σ would lose digits
Var silu(const Var& x);      // x·σ(x); saves x
Var tanh(const Var& x);      // saves x
Var softplus(const Var& x);  // log(1 + eˣ), x itself above 20; saves x
// Into [low, high]; the gradient passes where low <= x <= high. Saves x.
Var clamp(const Var& x, double low, double high);

// mask: u8, nonzero picks a. Broadcasts over all three; saves the mask. What is masked out is
// selected, not multiplied by 0: infinities behind the mask do no harm.
Var where(const Tensor& mask, const Var& a, const Var& b);
Var masked_fill(const Var& x, const Tensor& mask, double value);

// u8, 1 where true, no gradient. Integers compare exactly; NaN is unequal to everything.
Tensor eq(const Var& a, const Var& b);
Tensor ne(const Var& a, const Var& b);
Tensor lt(const Var& a, const Var& b);
Tensor le(const Var& a, const Var& b);
Tensor gt(const Var& a, const Var& b);
Tensor ge(const Var& a, const Var& b);
Tensor eq(const Var& x, double s);
Tensor ne(const Var& x, double s);
Tensor lt(const Var& x, double s);
Tensor le(const Var& x, double s);
Tensor gt(const Var& x, double s);
Tensor ge(const Var& x, double s);

// Of a function of `inputs` tensors as large as the result; backward reads dy and one saved tensor.
Cost elementwise_cost(Pass pass, const Shape& result, DType dtype, int inputs);

inline Var operator+(const Var& a, const Var& b) { return add(a, b); }
inline Var operator-(const Var& a, const Var& b) { return sub(a, b); }
inline Var operator*(const Var& a, const Var& b) { return mul(a, b); }
inline Var operator/(const Var& a, const Var& b) { return div(a, b); }
inline Var operator+(const Var& x, double s) { return add(x, s); }
inline Var operator-(const Var& x, double s) { return sub(x, s); }
inline Var operator*(const Var& x, double s) { return mul(x, s); }
inline Var operator/(const Var& x, double s) { return div(x, s); }
inline Var operator+(double s, const Var& x) { return add(x, s); }
inline Var operator-(double s, const Var& x) { return sub(s, x); }
inline Var operator*(double s, const Var& x) { return mul(x, s); }
inline Var operator/(double s, const Var& x) { return div(s, x); }
inline Var operator-(const Var& x) { return neg(x); }

}  // namespace ebb
