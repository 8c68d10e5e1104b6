// Shape: up to 8 sizes or strides, stored in place.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace ebb {

inline constexpr int kMaxDims = 8;

class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const int64_t> dims);

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t& operator[](int i) { return dims_[i]; }
  int64_t operator[](int i) const { return dims_[i]; }
  int64_t back() const { return dims_[size_ - 1]; }
  int64_t* begin() { return dims_; }
  int64_t* end() { return dims_ + size_; }
  const int64_t* begin() const { return dims_; }
  const int64_t* end() const { return dims_ + size_; }

  void push_back(int64_t n);
  void insert(int at, int64_t n);
  void erase(int at);
  // The first n / all after the first n sizes.
  Shape first(int n) const { return Shape(std::span(dims_, size_t(n))); }
  Shape from(int n) const { return Shape(std::span(dims_ + n, size_t(size_ - n))); }

  int64_t numel() const {
    int64_t n = 1;
    for (int64_t d : *this) n *= d;
    return n;
  }
  bool operator==(const Shape& o) const {
    if (size_ != o.size_) return false;
    for (int i = 0; i < size_; ++i)
      if (dims_[i] != o.dims_[i]) return false;
    return true;
  }
  std::string str() const;  // "[2,3]"

 private:
  int64_t dims_[kMaxDims] = {};
  int size_ = 0;
};

// Number of elements; throws naming `what` when a size is negative or the product overflows.
int64_t checked_numel(const char* what, const Shape& shape);
// Row-major strides of a dense tensor.
Shape dense_strides(const Shape& shape);
// The shape a and b broadcast to (numpy rules); throws naming op when they do not.
Shape broadcast_shapes(const char* op, const Shape& a, const Shape& b);

}  // namespace ebb
