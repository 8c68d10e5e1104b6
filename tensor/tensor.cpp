#include "tensor/tensor.h"

#include <algorithm>
#include <cstring>

#include "tensor/check.h"

namespace ebb {

Tensor Tensor::empty(const Shape& shape, DType dtype, Device device) {
  int64_t bytes = 0;
  check(!__builtin_mul_overflow(checked_numel("tensor", shape), item_size(dtype), &bytes),
        "tensor: shape {} of {} overflows 64-bit sizes", shape, dtype);
  Tensor t;
  t.storage_ = allocate(size_t(bytes), device);
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
  check(storage != nullptr, "tensor: a view of no storage");
  check(shape.size() == strides.size(), "tensor: {} sizes, {} strides", shape.size(),
        strides.size());
  const int64_t numel = checked_numel("tensor", shape);
  int64_t end = offset;  // one past the last element
  bool overflow = numel > 0 && __builtin_add_overflow(end, int64_t(1), &end);
  for (int i = 0; i < shape.size(); ++i) {
    check(strides[i] >= 0, "tensor: negative stride in {}", strides);
    int64_t reach = 0;
    if (numel > 0)
      overflow |= __builtin_mul_overflow(shape[i] - 1, strides[i], &reach) ||
                  __builtin_add_overflow(end, reach, &end);
  }
  overflow |= __builtin_mul_overflow(end, item_size(dtype), &end);
  check(offset >= 0 && !overflow && end <= int64_t(storage->bytes),
        "tensor: view {} of {} with strides {} and offset {} reaches outside its {} bytes", shape,
        dtype, strides, offset, storage->bytes);
  Tensor t;
  t.storage_ = std::move(storage);
  t.shape_ = shape;
  t.strides_ = strides;
  t.offset_ = offset;
  t.dtype_ = dtype;
  return t;
}

Device Tensor::device() const {
  check(defined(), "device() of an undefined tensor");
  return storage_->device;
}

bool Tensor::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t step = 1;
  for (int i = dim() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != step) return false;
    step *= shape_[i];
  }
  return true;
}

// Exact for views of dense tensors: by rising stride, each dimension must step over what the
// smaller ones reach.
bool Tensor::may_overlap_itself() const {
  if (numel() == 0) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int i = 0; i < dim(); ++i)
    if (shape_[i] > 1) dims.emplace_back(strides_[i], shape_[i]);
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

void* Tensor::raw() const {
  check(defined(), "{}: an undefined tensor where values are needed", current_op());
  if (!storage_->data) return nullptr;
  return static_cast<char*>(storage_->data) + offset_ * item_size(dtype_);
}

void Tensor::expect_dtype(DType t) const {
  check(t == dtype_, "{}: tensor {} is {}, accessed as {}", current_op(), shape_, dtype_, t);
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
  check(defined(), "{}: in-place change of an undefined tensor", current_op());
  check(src.defined(), "{}: copy of an undefined tensor", current_op());
  copy(*this, src.shape() == shape_ ? src : src.expand(shape_));
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
  cpu::fill(*this, value);
  return *this;
}

void Tensor::bump_version() const {
  check(defined(), "{}: in-place change of an undefined tensor", current_op());
  check(!storage_->owner,
        "{}: in-place change of read-only memory (a mapped file), tensor {}; clone() it first",
        current_op(), shape_);
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

}  // namespace ebb
