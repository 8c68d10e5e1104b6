#include "tensor/random.h"

#include <numbers>

#include "tensor/check.h"

namespace ebb {
namespace {

thread_local RandomState generator;
enum Kind { kUniform = 0, kNormal = 1, kWords = 2 };

// Box-Muller on the word pair that element i belongs to: even elements take the cosine.
double normal_at(RandomKey key, uint64_t i) {
  const Philox4 r = philox(key, i >> 2);
  const int pair = int(i & 2);
  const double u = uniform_open(r.v[pair]), v = uniform_open(r.v[pair + 1]);
  const double radius = std::sqrt(-2 * std::log(u)), angle = 2 * std::numbers::pi * v;
  return radius * ((i & 1) ? std::sin(angle) : std::cos(angle));
}

void fill(const Tensor& x, RandomKey key, Kind kind, double a, double b) {
  x.bump_version();
  if (x.numel() == 0) return;
  if constexpr (kWithCuda) {
    if (x.on_cuda()) {
      const Tensor dense = x.is_contiguous() ? x : Tensor::empty_like(x);
      gpu::fill_random(dense, key, kind, a, b);
      if (!x.is_contiguous()) copy(x, dense);
      return;
    }
  }
  const Tensor dense = x.is_contiguous() ? x : Tensor::empty_like(x);
  const int64_t n = x.numel();
  visit_any(x.dtype(), [&]<class T>() {
    T* out = dense.data<T>();
#pragma omp parallel for if (n > 65536)
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t u = uint64_t(i);
      if (kind == kUniform)
        // fma spelled out: left to the compiler, the devices would round differently.
        out[i] = T(float(std::fma(b - a, double(uniform_open(random_word(key, u))), a)));
      else if (kind == kNormal)
        out[i] = T(std::fma(b, normal_at(key, u), a));
      else
        out[i] = T(int64_t(random_word(key, u)));
    }
  });
  if (!x.is_contiguous()) copy(x, dense);
}

}  // namespace

void fill_uniform(const Tensor& x, RandomKey key, double low, double high) {
  check(is_float(x.dtype()), "fill_uniform: tensor is {}, want a float type", x.dtype());
  fill(x, key, kUniform, low, high);
}

void fill_normal(const Tensor& x, RandomKey key, double mean, double std) {
  check(is_float(x.dtype()), "fill_normal: tensor is {}, want a float type", x.dtype());
  fill(x, key, kNormal, mean, std);
}

Tensor random_normal(const Shape& shape, RandomKey key, DType dtype, Device device) {
  const Tensor x = Tensor::empty(shape, dtype, device);
  fill_normal(x, key);
  return x;
}

void fill_words(const Tensor& x, RandomKey key) {
  check(x.dtype() == DType::i64, "fill_words: tensor is {}, want i64", x.dtype());
  fill(x, key, kWords, 0, 0);
}

RandomState& random_state() { return generator; }

RandomKey next_random_key() { return {generator.seed, generator.next_purpose++}; }

}  // namespace ebb
