#include "tensor/shape.h"

#include "tensor/check.h"

namespace ebb {

Shape::Shape(std::span<const int64_t> dims) {
  check(dims.size() <= size_t(kMaxDims), "shape: {} dimensions, at most {} are supported",
        dims.size(), kMaxDims);
  for (int64_t d : dims) dims_[size_++] = d;
}

void Shape::push_back(int64_t n) { insert(size_, n); }

void Shape::insert(int at, int64_t n) {
  check(size_ < kMaxDims, "shape: more than {} dimensions", kMaxDims);
  for (int i = size_; i > at; --i) dims_[i] = dims_[i - 1];
  dims_[at] = n;
  ++size_;
}

void Shape::erase(int at) {
  for (int i = at; i + 1 < size_; ++i) dims_[i] = dims_[i + 1];
  --size_;
}

std::string Shape::str() const { return fmt::format("[{}]", fmt::join(begin(), end(), ",")); }

int64_t checked_numel(const char* what, const Shape& shape) {
  int64_t n = 1;
  bool empty = false;
  for (const int64_t d : shape) {
    check(d >= 0, "{}: negative size in shape {}", what, shape);
    // Sizes of 0 are left out, so that no order of the sizes overflows: strides are products too.
    empty |= d == 0;
    check(d == 0 || !__builtin_mul_overflow(n, d, &n), "{}: shape {} overflows 64-bit sizes", what,
          shape);
  }
  return empty ? 0 : n;
}

Shape dense_strides(const Shape& shape) {
  Shape strides = shape;
  int64_t step = 1;
  for (int i = shape.size() - 1; i >= 0; --i) {
    strides[i] = step;
    step *= shape[i] > 1 ? shape[i] : 1;
  }
  return strides;
}

Shape broadcast_shapes(const char* op, const Shape& a, const Shape& b) {
  Shape out = a.size() >= b.size() ? a : b;
  for (int i = 1; i <= out.size(); ++i) {
    const int64_t x = i <= a.size() ? a[a.size() - i] : 1, y = i <= b.size() ? b[b.size() - i] : 1;
    check(x == y || x == 1 || y == 1, "{}: shapes {} and {} do not broadcast", op, a, b);
    out[out.size() - i] = x == 1 ? y : x;
  }
  return out;
}

}  // namespace ebb
