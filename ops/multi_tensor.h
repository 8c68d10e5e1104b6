// Work over long lists of tensors of any sizes (parameters, gradients) as one pass, on a GPU one
// launch, whether there is 1 tensor or 3000.
//   TensorList grads({w.grad(), b.grad()});
//   sum_of_squares(grads, out);           // out: f64 [], on the same device, no synchronisation
//   zero_all(grads);
//
//   sum_of_squares:  out = Σ_tensors Σ_i x[i]²        zero_all:  x[i] = 0
//
// Dense tensors of one dtype (f32, bf16; f64 on the CPU) on one device; empty ones and an empty
// list are fine. Every product and sum is f64, in an order fixed by the sizes alone: bitwise
// reproducible, exact to far below f32 rounding, and no overflow or underflow of f32 values.
#pragma once
#include <cstring>
#include <span>
#include <vector>

#include "ops/cost.h"
#include "tensor/tensor.h"

namespace ebb {

// Elements that one block (or one turn of a CPU loop) works on. Tensors are cut into chunks of this
// many; a tensor's last one is ragged.
inline constexpr int64_t kChunkItems = 8192;

struct TensorChunk {
  int64_t row = 0;    // which tensor
  int64_t begin = 0;  // its first element here
};

// One plain struct per tensor (`Row`: addresses and `int64_t numel`), and the list of all chunks.
// Kept on the host for the CPU and copied to a GPU, where the copy lasts until something changes:
// addresses recorded in a CUDA graph stay right as long as update() finds the same rows.
class ChunkTable {
 public:
  template <class Row>
  void update(const std::vector<Row>& rows, Device device) {
    static_assert(std::is_trivially_copyable_v<Row>);
    std::vector<int64_t> numel;
    numel.reserve(rows.size());
    for (const Row& r : rows) numel.push_back(r.numel);
    update(std::span(reinterpret_cast<const std::byte*>(rows.data()), rows.size() * sizeof(Row)),
           numel, device);
  }
  template <class Row>
  const Row* rows() const {  // on the list's device
    return static_cast<const Row*>(rows_on_device_ ? rows_on_device_.raw() : host_rows_.data());
  }
  const TensorChunk* chunks() const;  // likewise
  int64_t chunk_count() const { return int64_t(host_chunks_.size()); }

 private:
  void update(std::span<const std::byte> rows, std::span<const int64_t> numel, Device device);

  std::vector<std::byte> host_rows_;
  std::vector<int64_t> numel_;
  std::vector<TensorChunk> host_chunks_;
  Tensor rows_on_device_, chunks_on_device_;  // u8
  Device device_;
};

class TensorList {
 public:
  struct Row {
    void* data = nullptr;
    int64_t numel = 0;
  };
  TensorList() = default;
  explicit TensorList(std::vector<Tensor> tensors, const char* what = "multi_tensor") {
    set(std::move(tensors), what);
  }
  // Costs next to nothing when addresses and sizes are those of the last call.
  void set(std::vector<Tensor> tensors, const char* what = "multi_tensor");

  const std::vector<Tensor>& tensors() const { return tensors_; }
  const ChunkTable& table() const { return table_; }
  DType dtype() const { return tensors_.empty() ? DType::f32 : tensors_.front().dtype(); }
  Device device() const { return tensors_.empty() ? Device() : tensors_.front().device(); }
  const Tensor& partials() const { return partials_; }  // f64 [chunks], scratch of the sums

 private:
  std::vector<Tensor> tensors_;
  ChunkTable table_;
  Tensor partials_;
};

void sum_of_squares(const TensorList& list, const Tensor& out /*f64 []*/);
void zero_all(const TensorList& list);
Cost sum_of_squares_cost(int64_t items, DType dtype);

namespace cpu {
void sum_of_squares(const TensorList& list, const Tensor& out);
void zero_all(const TensorList& list);
}  // namespace cpu
namespace gpu {
void sum_of_squares(const TensorList& list, const Tensor& out);
void zero_all(const TensorList& list);
}  // namespace gpu

}  // namespace ebb
