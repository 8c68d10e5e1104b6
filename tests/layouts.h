// Random shapes and strides for tests of views and copies, and element access that uses none of
// the code under test: offset + sum of index·stride, straight from the storage.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "tensor/tensor.h"

namespace ebb::testing {

inline constexpr DType kAllTypes[] = {DType::f32, DType::f64, DType::bf16,
                                      DType::i32, DType::i64, DType::u8};

// Element number `logical` (row-major) of a CPU tensor.
template <class T>
T& element(const Tensor& t, int64_t logical) {
  int64_t at = t.offset();
  for (int d = t.dim() - 1; d >= 0; --d) {
    at += logical % t.shape()[d] * t.strides()[d];
    logical /= t.shape()[d];
  }
  return static_cast<T*>(t.storage()->data)[at];
}

class Layouts {
 public:
  explicit Layouts(uint64_t seed) : rng_(seed) {}
  int64_t integer(int64_t low, int64_t high) {  // both ends included
    return std::uniform_int_distribution<int64_t>(low, high)(rng_);
  }
  bool coin() { return integer(0, 1) == 1; }

  Shape shape(int max_dims, int64_t max_size, int64_t min_size = 1) {
    Shape s;
    const int64_t dims = integer(0, max_dims);
    for (int64_t d = 0; d < dims; ++d) s.push_back(integer(min_size, max_size));
    return s;
  }

  // Uninitialised tensor whose storage is permuted, stepped over and offset at random.
  Tensor strided(const Shape& shape, DType dtype, Device device = {}) {
    std::vector<int> order(size_t(shape.size()));
    std::iota(order.begin(), order.end(), 0);
    if (coin()) std::shuffle(order.begin(), order.end(), rng_);
    Shape stored;
    std::vector<int64_t> before, step;
    for (const int d : order) {
      before.push_back(integer(0, 3) ? 0 : integer(0, 2));
      step.push_back(integer(0, 3) ? 1 : integer(1, 3));
      const int64_t after = integer(0, 3) ? 0 : integer(0, 2);
      stored.push_back(before.back() + shape[d] * step.back() + after);
    }
    Tensor t = Tensor::zeros(stored, dtype, device);
    for (int i = 0; i < shape.size(); ++i) {
      const int64_t n = shape[order[size_t(i)]], b = before[size_t(i)], s = step[size_t(i)];
      t = t.slice(i, b, b + n * s, s);
    }
    std::vector<int> back(order.size());
    for (size_t i = 0; i < order.size(); ++i) back[size_t(order[i])] = int(i);
    return t.permute(back);
  }

  // The same with some dimensions of stride 0: for sources.
  Tensor strided_or_expanded(const Shape& shape, DType dtype, Device device = {}) {
    Shape small = shape;
    for (int64_t& n : small)
      if (n > 0 && integer(0, 3) == 0) n = 1;
    return strided(small, dtype, device).expand(shape);
  }

  // Values that try the corners of conversions.
  template <class T>
  T value() {
    static const double corners[] = {0.0,
                                     -0.0,
                                     0.5,
                                     -0.5,
                                     1.5,
                                     -1.5,
                                     254.9,
                                     255.5,
                                     256.0,
                                     -1.0,
                                     3e9,
                                     -3e9,
                                     1e19,
                                     -1e19,
                                     1e38,
                                     -3.4e38,
                                     1e-40,
                                     -1e-45,
                                     1e300,
                                     -1e300,
                                     2147483648.0,
                                     -2147483649.0,
                                     9223372036854775808.0};
    const int64_t kind = integer(0, 9);
    if constexpr (std::is_integral_v<T>) {
      if (kind == 0) return std::numeric_limits<T>::max();
      if (kind == 1) return std::numeric_limits<T>::min();
      if (kind < 6) return T(integer(-1000, 1000));
      return T(rng_());
    } else {
      if (kind == 0) return T(std::numeric_limits<float>::quiet_NaN());
      if (kind == 1) return T(coin() ? INFINITY : -INFINITY);
      if (kind < 5) return T(corners[size_t(integer(0, int64_t(std::size(corners)) - 1))]);
      return T(std::normal_distribution<double>(0, 100)(rng_));
    }
  }

  void fill(const Tensor& t) {  // CPU
    visit_any(t.dtype(), [&]<class T>() {
      for (int64_t i = 0; i < t.numel(); ++i) element<T>(t, i) = value<T>();
    });
  }

 private:
  std::mt19937_64 rng_;
};

// Equal bits, any NaN equal to any NaN.
template <class T>
bool same_value(T a, T b) {
  if constexpr (std::is_same_v<T, bf16>)
    return a.bits == b.bits || (std::isnan(float(a)) && std::isnan(float(b)));
  else if constexpr (std::is_floating_point_v<T>)
    return (a == b && std::signbit(a) == std::signbit(b)) || (a != a && b != b);
  else
    return a == b;
}

}  // namespace ebb::testing
