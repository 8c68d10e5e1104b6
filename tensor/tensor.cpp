#include "tensor/tensor.h"

#include <algorithm>
#include <cstring>

#include "tensor/check.h"

namespace ebb {
namespace {

int wrap_dim(int d, int rank, const char* what) {
  check(d >= -rank && d < rank, "{}: dimension {} of a tensor of {} dimensions", what, d, rank);
  return d < 0 ? d + rank : d;
}

}  // namespace

Tensor Tensor::empty(const Shape& shape, DType dtype, Device device) {
  size_t bytes = size_t(item_size(dtype));
  for (int64_t d : shape) {
    check(d >= 0, "tensor: negative size in shape {}", shape);
    check(!__builtin_mul_overflow(bytes, size_t(d), &bytes) && bytes <= size_t(INT64_MAX),
          "tensor: shape {} of {} overflows 64-bit sizes", shape, dtype);
  }
  Tensor t;
  t.storage_ = allocate(bytes, device);
  t.shape_ = shape;
  t.strides_ = dense_strides(shape);
  t.dtype_ = dtype;
  return t;
}

Tensor Tensor::zeros(const Shape& shape, DType dtype, Device device) {
  Tensor t = empty(shape, dtype, device);
  zero_bytes(t.storage_->data, device, t.storage_->bytes);
  return t;
}

Tensor Tensor::full(const Shape& shape, double value, DType dtype, Device device) {
  Tensor t = empty(shape, dtype, device);
  t.fill_(value);
  return t;
}

Tensor Tensor::arange(int64_t n, DType dtype, Device device) {
  Tensor t = empty({n}, dtype);
  visit_any(dtype, [&]<class T>() {
    for (int64_t i = 0; i < n; ++i) t.data<T>()[i] = T(i);
  });
  return t.to(device);
}

Tensor Tensor::from_host(const void* values, int64_t count, DType dtype, const Shape& shape,
                         Device device) {
  Tensor t = empty(shape, dtype, Device::cpu());
  check(t.numel() == count, "tensor: {} values for shape {}", count, shape);
  if (count) std::memcpy(t.raw(), values, size_t(t.nbytes()));
  return t.to(device);
}

Tensor Tensor::wrap(std::shared_ptr<Storage> storage, DType dtype, const Shape& shape,
                    const Shape& strides, int64_t offset) {
  check(storage && shape.size() == strides.size(), "tensor: {} sizes, {} strides", shape.size(),
        strides.size());
  int64_t last = offset;
  bool is_empty = false;
  for (int i = 0; i < shape.size(); ++i) {
    check(shape[i] >= 0 && strides[i] >= 0, "tensor: negative size or stride in {} / {}", shape,
          strides);
    is_empty |= shape[i] == 0;
    last += (shape[i] - 1) * strides[i];
  }
  check(offset >= 0 && (is_empty || (last + 1) * item_size(dtype) <= int64_t(storage->bytes)),
        "tensor: view {} with strides {} and offset {} reaches outside its {} bytes", shape,
        strides, offset, storage->bytes);
  Tensor t;
  t.storage_ = std::move(storage);
  t.shape_ = shape;
  t.strides_ = strides;
  t.offset_ = offset;
  t.dtype_ = dtype;
  return t;
}

int64_t Tensor::size(int d) const { return shape_[wrap_dim(d, dim(), "size")]; }
int64_t Tensor::stride(int d) const { return strides_[wrap_dim(d, dim(), "stride")]; }

Device Tensor::device() const {
  check(defined(), "device() of an undefined tensor");
  return storage_->device;
}

bool Tensor::is_contiguous() const {
  int64_t step = 1;
  for (int i = dim() - 1; i >= 0; --i) {
    if (shape_[i] == 0) return true;
    if (shape_[i] != 1 && strides_[i] != step) return false;
    step *= shape_[i];
  }
  return true;
}

void* Tensor::raw() const {
  check(defined(), "{}: an undefined tensor where values are needed", current_op());
  if (!storage_->data) return nullptr;
  return static_cast<char*>(storage_->data) + offset_ * item_size(dtype_);
}

void Tensor::expect_dtype(DType t) const {
  check(t == dtype_, "{}: tensor {} is {}, accessed as {}", current_op(), shape_, dtype_, t);
}

Tensor Tensor::slice(int d, int64_t begin, int64_t end, int64_t step) const {
  d = wrap_dim(d, dim(), "slice");
  check(begin >= 0 && begin <= end && end <= shape_[d] && step >= 1,
        "slice: [{}:{}:{}] of dimension {} of {}", begin, end, step, d, shape_);
  Tensor t = *this;
  t.offset_ += begin < end ? begin * strides_[d] : 0;
  t.shape_[d] = (end - begin + step - 1) / step;
  t.strides_[d] *= step;
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
  Tensor t = *this;
  t.shape_ = shape;
  t.strides_ = shape;
  const int lead = shape.size() - dim();
  for (int i = 0; i < shape.size(); ++i) {
    const int64_t have = i < lead ? 1 : shape_[i - lead];
    check(have == shape[i] || (have == 1 && shape[i] >= 0), "expand: {} to {}", shape_, shape);
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
      known *= want[i];
    }
  }
  if (infer >= 0 && known > 0 && numel % known == 0) out[infer] = numel / known;
  check(out.numel() == numel && (infer < 0 || out[infer] >= 0), "view: {} to {}", have, want);
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
  // consumed by whole target dimensions.
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
      if (left != 1) return false;
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

Tensor Tensor::contiguous() const { return is_contiguous() ? *this : clone(); }

Tensor Tensor::clone() const {
  Tensor t = empty(shape_, dtype_, device());
  copy(t, *this);
  return t;
}

Tensor Tensor::to(DType dtype) const { return to(dtype, device()); }
Tensor Tensor::to(Device device) const { return to(dtype_, device); }

Tensor Tensor::to(DType dtype, Device device) const {
  if (dtype == dtype_ && device == this->device()) return *this;
  Tensor t = empty(shape_, dtype, device);
  copy(t, *this);
  return t;
}

const Tensor& Tensor::copy_(const Tensor& src) const {
  copy(*this, src.shape() == shape_ ? src : src.expand(shape_));
  bump_version();
  return *this;
}

const Tensor& Tensor::fill_(double value) const {
  bump_version();
  if (numel() == 0) return *this;
  if constexpr (kWithCuda) {
    if (on_cuda()) {
      gpu::fill(*this, value);
      return *this;
    }
  }
  if (value == 0 && is_contiguous()) {
    std::memset(raw(), 0, size_t(nbytes()));
    return *this;
  }
  const Tensor one = empty({}, dtype_);
  visit_any(dtype_, [&]<class T>() { *one.data<T>() = T(value); });
  copy(*this, one.expand(shape_));
  return *this;
}

void Tensor::bump_version() const {
  check(defined(), "in-place change of an undefined tensor");
  ++storage_->version;
}

void Tensor::record_stream(Stream stream) const {
  check(defined(), "record_stream: undefined tensor");
  check(stream.device == device(), "record_stream: stream of {}, tensor on {}", stream.device,
        device());
  if constexpr (kWithCuda)
    if (on_cuda() && storage_->data) gpu::record_stream(*storage_, stream);
}

double Tensor::item() const {
  check(numel() == 1, "item: tensor of shape {} does not have one element", shape_);
  const Tensor t = cpu();
  return visit_any(dtype_, [&]<class T>() { return double(*t.data<T>()); });
}

namespace {

void print_block(std::string& s, const Tensor& t, int64_t max_items) {
  if (t.dim() == 0) {
    s += is_float(t.dtype()) ? fmt::format("{:.6g}", t.item())
                             : fmt::format("{}", int64_t(t.item()));
    return;
  }
  s += '[';
  const int64_t n = t.size(0), edge = max_items / 2;
  for (int64_t i = 0; i < n; ++i) {
    if (i) s += ", ";
    if (n > max_items && i == edge) {
      s += "...";
      i = n - edge - 1;
      continue;
    }
    print_block(s, t.select(0, i), max_items);
  }
  s += ']';
}

}  // namespace

std::string Tensor::str(int64_t max_items) const {
  if (!defined()) return "undefined";
  std::string s;
  const Tensor host = cpu();
  print_block(s, host, max_items < 2 ? 2 : max_items);
  return fmt::format("{} {} {} {}", s, shape_, dtype_, device());
}

}  // namespace ebb
