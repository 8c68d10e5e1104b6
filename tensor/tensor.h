// Tensor: a value handle over shared storage. Views (slice, transpose, expand, ...) share storage.
//   Tensor x = Tensor::zeros({2, 3}, DType::f32, Device::cuda());
//   Tensor row = x.select(0, 1);          // [3], same memory
// Tensors compute without recording; autograd/var.h wraps them in Var, which records.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tensor/device.h"
#include "tensor/dtype.h"
#include "tensor/memory.h"
#include "tensor/shape.h"

namespace ebb {

class Tensor {
 public:
  Tensor() = default;  // undefined: "absent" where an argument is optional
  bool defined() const { return storage_ != nullptr; }
  explicit operator bool() const { return defined(); }

  // Creation. empty() is uninitialised.
  static Tensor empty(const Shape& shape, DType dtype = DType::f32, Device device = {});
  static Tensor zeros(const Shape& shape, DType dtype = DType::f32, Device device = {});
  static Tensor full(const Shape& shape, double value, DType dtype = DType::f32,
                     Device device = {});
  static Tensor arange(int64_t n, DType dtype = DType::i64, Device device = {});  // 0, 1, ... n-1
  static Tensor empty_like(const Tensor& t) { return empty(t.shape(), t.dtype(), t.device()); }
  static Tensor zeros_like(const Tensor& t) { return zeros(t.shape(), t.dtype(), t.device()); }
  // Copies host values; the number of values must match the shape.
  template <class T>
  static Tensor from(std::span<const T> values, const Shape& shape, Device device = {}) {
    return from_host(values.data(), int64_t(values.size()), dtype_of<T>::value, shape, device);
  }
  template <class T>
  static Tensor from(const std::vector<T>& values, const Shape& shape, Device device = {}) {
    return from(std::span<const T>(values), shape, device);
  }
  // A view onto existing storage. Throws when the elements reach outside it.
  static Tensor wrap(std::shared_ptr<Storage> storage, DType dtype, const Shape& shape,
                     const Shape& strides, int64_t offset);

  const Shape& shape() const { return shape_; }
  const Shape& strides() const { return strides_; }  // in elements
  int64_t offset() const { return offset_; }         // in elements
  int dim() const { return shape_.size(); }
  int64_t size(int d) const;  // negative d counts from the end
  int64_t stride(int d) const;
  int64_t numel() const { return shape_.numel(); }
  int64_t nbytes() const { return numel() * item_size(dtype_); }
  DType dtype() const { return dtype_; }
  Device device() const;
  bool on_cuda() const { return defined() && storage_->device.is_cuda(); }
  bool is_contiguous() const;  // row-major and dense
  // Whether two indices may name the same element (an expanded view).
  bool may_overlap_itself() const;
  bool same_storage(const Tensor& o) const { return storage_ == o.storage_; }
  const std::shared_ptr<Storage>& storage() const { return storage_; }

  // Address of the first element. data<T>() throws when T is not the dtype.
  void* raw() const;
  template <class T>
  T* data() const {
    expect_dtype(dtype_of<T>::value);
    return static_cast<T*>(raw());
  }

  // Views.
  Tensor slice(int d, int64_t begin, int64_t end, int64_t step = 1) const;  // step >= 1
  Tensor select(int d, int64_t index) const;                                // drops dimension d
  Tensor transpose(int a, int b) const;
  Tensor permute(std::span<const int> order) const;
  Tensor permute(std::initializer_list<int> order) const {
    return permute(std::span(order.begin(), order.size()));
  }
  Tensor unsqueeze(int d) const;
  Tensor squeeze(int d) const;                // d must have size 1
  Tensor expand(const Shape& shape) const;    // size-1 (or missing leading) dims repeat
  Tensor view(const Shape& shape) const;      // one -1 allowed; throws if it must copy
  Tensor reshape(const Shape& shape) const;   // view where possible, else a copy
  Tensor flatten(int first, int last) const;  // merges dimensions first..last

  // Copies.
  Tensor contiguous() const;  // itself when already dense
  Tensor clone() const;
  Tensor to(DType dtype) const;  // itself when nothing changes
  Tensor to(Device device) const;
  Tensor to(DType dtype, Device device) const;
  Tensor cpu() const { return to(Device::cpu()); }

  // In place; each raises the storage's version. Borrowed memory refuses them.
  const Tensor& copy_(const Tensor& src) const;  // broadcasts and converts, see copy()
  const Tensor& fill_(double value) const;
  const Tensor& zero_() const { return fill_(0); }
  uint64_t version() const { return storage_ ? storage_->version : 0; }
  void bump_version() const;

  // Declares use on a stream other than the one the memory was allocated on: once freed, the block
  // is not reused before the work queued there by then has finished.
  void record_stream(Stream stream) const;

  // Host values (synchronises).
  double item() const;  // one element, any dtype
  template <class T>
  std::vector<T> to_vector() const {
    const Tensor t = to(dtype_of<T>::value, Device::cpu()).contiguous();
    return t.numel() ? std::vector<T>(t.data<T>(), t.data<T>() + t.numel()) : std::vector<T>{};
  }
  std::string str(int64_t max_items = 6) const;  // values, shape, dtype, device

 private:
  static Tensor from_host(const void* values, int64_t count, DType dtype, const Shape& shape,
                          Device device);
  void expect_dtype(DType t) const;

  std::shared_ptr<Storage> storage_;
  Shape shape_;
  Shape strides_;
  int64_t offset_ = 0;
  DType dtype_ = DType::f32;
};

// dst[...] = src[...] with conversion (a float beyond an integer's range saturates, NaN gives 0);
// shapes equal, any strides, any devices. The two may share memory: src is read as it was before.
// dst must not overlap itself. (tensor/copy.cpp, cuda/copy.cu)
void copy(const Tensor& dst, const Tensor& src);

namespace cpu {
void fill(const Tensor& t, double value);  // any strides
}
namespace gpu {
void copy_strided(const Tensor& dst, const Tensor& src);  // both on the same GPU
void fill(const Tensor& t, double value);                 // any strides
void add_into(const Tensor& dst, const Tensor& src);      // dst += src; float types, dst dense
bool all_finite(const Tensor& t);  // cuda/reduce.cu; true for integers. Synchronises.
}  // namespace gpu

}  // namespace ebb
