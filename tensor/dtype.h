// Element types. bf16 is plain storage (round to nearest even on conversion); arithmetic happens
// in float or double. visit_* turn a run-time DType into a template parameter:
//   visit_float(x.dtype(), [&]<class T>() { kernel<T>(...); });   // T: float, double or bf16
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "tensor/error.h"

namespace ebb {

enum class DType : uint8_t { f32, f64, bf16, i32, i64, u8 };

struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  explicit bf16(float f) {
    const uint32_t u = std::bit_cast<uint32_t>(f);
    // NaN keeps its sign and becomes quiet: adding the rounding bias could turn it into infinity.
    bits = std::isnan(f) ? uint16_t((u >> 16) | 0x40u)
                         : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  template <class N>
  requires std::is_arithmetic_v<N>
  explicit bf16(N n) : bf16(float(n)) {}
  operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
};

// Truncates toward zero; out of range saturates, NaN becomes 0 (on both devices alike).
template <class To, class From>
constexpr To float_to_int(From v) {
  constexpr From top = From(uint64_t(1) << std::numeric_limits<To>::digits);  // exact, max + 1
  constexpr From bottom = From(std::numeric_limits<To>::min());
  if (v != v) return 0;
  if (v <= bottom) return std::numeric_limits<To>::min();
  if (v >= top) return std::numeric_limits<To>::max();
  return To(v);
}

constexpr int64_t item_size(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
      return 2;
    case DType::u8:
      return 1;
  }
  return 0;
}

constexpr const char* name(DType t) {
  switch (t) {
    case DType::f32:
      return "f32";
    case DType::f64:
      return "f64";
    case DType::bf16:
      return "bf16";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::u8:
      return "u8";
  }
  return "?";
}

constexpr bool is_float(DType t) { return t == DType::f32 || t == DType::f64 || t == DType::bf16; }

// The type sums over values of type t are kept in: f64 for f64, else f32.
constexpr DType accumulate_type(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct dtype_of<uint8_t> {
  static constexpr DType value = DType::u8;
};

// Accumulator of T: double for double, float for float and bf16.
template <class T>
struct acc_of {
  using type = float;
};
template <>
struct acc_of<double> {
  using type = double;
};
template <class T>
using acc_t = typename acc_of<T>::type;

template <class F>
decltype(auto) visit_float(DType t, F&& f) {
  switch (t) {
    case DType::f32:
      return f.template operator()<float>();
    case DType::f64:
      return f.template operator()<double>();
    case DType::bf16:
      return f.template operator()<bf16>();
    default:
      throw Error(std::string("expected a floating dtype, got ") + name(t));
  }
}

template <class F>
decltype(auto) visit_any(DType t, F&& f) {
  switch (t) {
    case DType::i32:
      return f.template operator()<int32_t>();
    case DType::i64:
      return f.template operator()<int64_t>();
    case DType::u8:
      return f.template operator()<uint8_t>();
    default:
      return visit_float(t, static_cast<F&&>(f));
  }
}

}  // namespace ebb
