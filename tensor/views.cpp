// Views of a tensor: the same storage under other sizes, strides and offsets.
#include "tensor/check.h"
#include "tensor/tensor.h"

namespace ebb {
namespace {

int wrap_dim(int d, int rank, const char* what) {
  check(d >= -rank && d < rank, "{}: dimension {} of a tensor of {} dimensions", what, d, rank);
  return d < 0 ? d + rank : d;
}

}  // namespace

int64_t Tensor::size(int d) const { return shape_[wrap_dim(d, dim(), "size")]; }
int64_t Tensor::stride(int d) const { return strides_[wrap_dim(d, dim(), "stride")]; }

Tensor Tensor::slice(int d, int64_t begin, int64_t end, int64_t step) const {
  d = wrap_dim(d, dim(), "slice");
  check(begin >= 0 && begin <= end && end <= shape_[d] && step >= 1,
        "slice: [{}:{}:{}] of dimension {} of {}", begin, end, step, d, shape_);
  Tensor t = *this;
  t.offset_ += begin < end ? begin * strides_[d] : 0;
  t.shape_[d] = begin < end ? (end - begin - 1) / step + 1 : 0;
  if (t.shape_[d] > 1) t.strides_[d] *= step;  // else any stride does, and this could overflow
  return t;
}

Tensor Tensor::select(int d, int64_t index) const {
  d = wrap_dim(d, dim(), "select");
  check(index >= 0 && index < shape_[d], "select: index {} of dimension {} of {}", index, d,
        shape_);
  Tensor t = *this;
  t.offset_ += index * strides_[d];
  t.shape_.erase(d);
  t.strides_.erase(d);
  return t;
}

Tensor Tensor::transpose(int a, int b) const {
  a = wrap_dim(a, dim(), "transpose");
  b = wrap_dim(b, dim(), "transpose");
  Tensor t = *this;
  std::swap(t.shape_[a], t.shape_[b]);
  std::swap(t.strides_[a], t.strides_[b]);
  return t;
}

Tensor Tensor::permute(std::span<const int> order) const {
  check(int(order.size()) == dim(), "permute: {} indices for shape {}", order.size(), shape_);
  Tensor t = *this;
  unsigned seen = 0;
  for (int i = 0; i < dim(); ++i) {
    const int from = wrap_dim(order[size_t(i)], dim(), "permute");
    check(!(seen >> from & 1u), "permute: dimension {} of {} named twice", from, shape_);
    seen |= 1u << from;
    t.shape_[i] = shape_[from];
    t.strides_[i] = strides_[from];
  }
  return t;
}

Tensor Tensor::unsqueeze(int d) const {
  d = wrap_dim(d, dim() + 1, "unsqueeze");
  Tensor t = *this;
  t.strides_.insert(d, d < dim() ? shape_[d] * strides_[d] : 1);
  t.shape_.insert(d, 1);
  return t;
}

Tensor Tensor::squeeze(int d) const {
  d = wrap_dim(d, dim(), "squeeze");
  check(shape_[d] == 1, "squeeze: dimension {} of {} is not 1", d, shape_);
  Tensor t = *this;
  t.shape_.erase(d);
  t.strides_.erase(d);
  return t;
}

Tensor Tensor::expand(const Shape& shape) const {
  check(shape.size() >= dim(), "expand: {} to {}", shape_, shape);
  checked_numel("expand", shape);
  Tensor t = *this;
  t.shape_ = shape;
  t.strides_ = shape;
  const int lead = shape.size() - dim();
  for (int i = 0; i < shape.size(); ++i) {
    const int64_t have = i < lead ? 1 : shape_[i - lead];
    check(have == shape[i] || have == 1, "expand: {} to {}", shape_, shape);
    t.strides_[i] = i < lead || (have == 1 && shape[i] != 1) ? 0 : strides_[i - lead];
  }
  return t;
}

namespace {

// Fills in a -1 and verifies the number of elements.
Shape resolve(const Shape& want, int64_t numel, const Shape& have) {
  Shape out = want;
  int infer = -1;
  int64_t known = 1;
  for (int i = 0; i < want.size(); ++i) {
    if (want[i] == -1) {
      check(infer < 0, "view: more than one -1 in {}", want);
      infer = i;
    } else {
      check(want[i] >= 0, "view: negative size in {}", want);
      check(!__builtin_mul_overflow(known, want[i], &known), "view: {} overflows 64-bit sizes",
            want);
    }
  }
  if (infer >= 0 && known > 0 && numel % known == 0) out[infer] = numel / known;
  const bool fits = infer < 0 ? known == numel : out[infer] >= 0;
  check(fits, "view: {} elements of {} do not fit {}", numel, have, want);
  checked_numel("view", out);
  return out;
}

// Strides that give `to` the elements of (shape, strides) in order, if any exist.
bool view_strides(const Shape& shape, const Shape& strides, const Shape& to, Shape* out) {
  *out = to;
  if (to.numel() == 0) {
    *out = dense_strides(to);
    return true;
  }
  // Merge the source into maximal runs that are dense within themselves; each run must be
  // consumed by whole target dimensions. (None is left unfinished: the numbers of elements agree.)
  int target = to.size() - 1;
  int64_t run = 1, step = 0;
  bool open = false;
  for (int i = shape.size() - 1; i >= -1; --i) {
    const bool one = i >= 0 && shape[i] == 1;
    if (one) continue;
    if (i >= 0 && open && strides[i] == step * run) {
      run *= shape[i];
      continue;
    }
    if (open) {
      int64_t left = run, s = step;
      while (target >= 0 && left > 1) {
        if (left % to[target] != 0) return false;
        (*out)[target] = s;
        s *= to[target];
        left /= to[target];
        --target;
      }
    }
    if (i >= 0) {
      open = true;
      run = shape[i];
      step = strides[i];
    }
  }
  for (; target >= 0; --target) {
    if (to[target] != 1) return false;
    (*out)[target] = 1;
  }
  return true;
}

}  // namespace

Tensor Tensor::view(const Shape& shape) const {
  Tensor t = *this;
  t.shape_ = resolve(shape, numel(), shape_);
  check(view_strides(shape_, strides_, t.shape_, &t.strides_),
        "view: {} with strides {} cannot be seen as {} without a copy; use reshape", shape_,
        strides_, shape);
  return t;
}

Tensor Tensor::reshape(const Shape& shape) const {
  Tensor t = *this;
  t.shape_ = resolve(shape, numel(), shape_);
  if (view_strides(shape_, strides_, t.shape_, &t.strides_)) return t;
  return contiguous().view(t.shape_);
}

Tensor Tensor::flatten(int first, int last) const {
  first = wrap_dim(first, dim(), "flatten");
  last = wrap_dim(last, dim(), "flatten");
  check(first <= last, "flatten: {} to {} of {}", first, last, shape_);
  Shape s = shape_.first(first);
  int64_t n = 1;
  for (int i = first; i <= last; ++i) n *= shape_[i];
  s.push_back(n);
  for (int i = last + 1; i < dim(); ++i) s.push_back(shape_[i]);
  return reshape(s);
}

}  // namespace ebb
