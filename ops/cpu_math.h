// Transcendentals for CPU loops that GCC is to vectorise: the library's expf is a call per element.
// vexp(float) is within 2 ulp, passes NaN on and reaches inf and 0 where exp does.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace ebb::cpu {

inline float vexp(float x) {
  x = x > 89.f ? 89.f : x;  // beyond: inf, by the two scalings below; NaN passes both
  x = x < -104.f ? -104.f : x;
  constexpr float kRound = 12582912.f;  // 1.5·2²³: adding it rounds to an integer
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // |r| <= ln(2)/2
  float p = 1.98756915e-4f;
  p = p * r + 1.39819995e-3f;
  p = p * r + 8.33345190e-3f;
  p = p * r + 4.16657956e-2f;
  p = p * r + 1.66666657e-1f;
  p = p * r + 5.00000000e-1f;
  p = p * (r * r) + r + 1.f;
  // 2ⁿ in two factors, so that subnormal results and overflow come out by themselves. n is taken
  // from the float's bits: a conversion of NaN would be undefined, the bits of NaN are not.
  const int32_t bits = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  const int32_t half = bits >> 1, rest = bits - half;
  const float low = std::bit_cast<float>(uint32_t(half + 127) << 23);
  const float high = std::bit_cast<float>(uint32_t(rest + 127) << 23);
  return p * low * high;
}
inline double vexp(double x) { return std::exp(x); }

template <class A>
inline A sigmoid(A x) {
  return A(1) / (A(1) + vexp(-x));
}

// log(1 + eˣ), linear above 20.
template <class A>
inline A softplus(A x) {
  return x > A(20) ? x : std::log1p(std::exp(x));
}

}  // namespace ebb::cpu
