#include "ops/multi_tensor.h"

#include <omp.h>

#include <algorithm>

#include "ops/common.h"

namespace ebb {
namespace {

Tensor upload(const void* data, size_t bytes, Device device) {
  return Tensor::from(std::span(static_cast<const uint8_t*>(data), bytes), {int64_t(bytes)},
                      device);
}

}  // namespace

const TensorChunk* ChunkTable::chunks() const {
  return chunks_on_device_ ? static_cast<const TensorChunk*>(chunks_on_device_.raw())
                           : host_chunks_.data();
}

void ChunkTable::update(std::span<const std::byte> rows, std::span<const int64_t> numel,
                        Device device) {
  const bool same_sizes = device == device_ && std::ranges::equal(numel, numel_);
  if (same_sizes && std::ranges::equal(rows, host_rows_)) return;
  // New tensors, not new contents: work that reads the old ones may still be queued. All or
  // nothing: an upload that fails leaves the table as it was.
  const Tensor new_rows = device.is_cuda() ? upload(rows.data(), rows.size(), device) : Tensor();
  if (!same_sizes) {
    std::vector<TensorChunk> chunks;
    for (size_t t = 0; t < numel.size(); ++t)
      for (int64_t begin = 0; begin < numel[t]; begin += kChunkItems)
        chunks.push_back({int64_t(t), begin});
    chunks_on_device_ = device.is_cuda()
                            ? upload(chunks.data(), chunks.size() * sizeof(TensorChunk), device)
                            : Tensor();
    host_chunks_ = std::move(chunks);
    numel_.assign(numel.begin(), numel.end());
    device_ = device;
  }
  host_rows_.assign(rows.begin(), rows.end());
  rows_on_device_ = new_rows;
}

void TensorList::set(std::vector<Tensor> tensors, const char* what) {
  std::vector<Row> rows;
  rows.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    check(t.defined(), "{}: tensor {} is undefined", what, i);
    check(t.dtype() == DType::f32 || t.dtype() == DType::bf16 ||
              (t.dtype() == DType::f64 && !t.on_cuda()),
          "{}: tensor {} {} is {} on {}; want f32 or bf16 (or f64 on the CPU)", what, i, t.shape(),
          t.dtype(), t.device());
    check(t.dtype() == tensors[0].dtype() && t.device() == tensors[0].device(),
          "{}: tensor {} {} is {} on {}, tensor 0 is {} on {}", what, i, t.shape(), t.dtype(),
          t.device(), tensors[0].dtype(), tensors[0].device());
    check(t.is_contiguous(), "{}: tensor {} {} is not dense", what, i, t.shape());
    rows.push_back({t.raw(), t.numel()});
  }
  tensors_ = std::move(tensors);
  table_.update(rows, device());
  const int64_t chunks = table_.chunk_count();
  if (!partials_ || partials_.numel() != chunks || partials_.device() != device())
    partials_ = Tensor::empty({chunks}, DType::f64, device());
}

Cost sum_of_squares_cost(int64_t items, DType dtype) {
  return {double(items) * double(item_size(dtype)), double(items) * 2};
}

namespace cpu {

void sum_of_squares(const TensorList& list, const Tensor& out) {
  const auto* rows = list.table().rows<TensorList::Row>();
  const TensorChunk* chunks = list.table().chunks();
  const int64_t n = list.table().chunk_count();
  double* partial = list.partials().data<double>();
  visit_float(list.dtype(), [&]<class T>() {
#pragma omp parallel for schedule(static) if (n > 4)
    for (int64_t c = 0; c < n; ++c) {
      const TensorList::Row& row = rows[chunks[c].row];
      const T* x = static_cast<const T*>(row.data) + chunks[c].begin;
      const int64_t items = std::min(kChunkItems, row.numel - chunks[c].begin);
      double lanes[8] = {};  // independent sums, so that the loop vectorises
      int64_t i = 0;
      for (; i + 8 <= items; i += 8)
        for (int64_t l = 0; l < 8; ++l) {
          const double v = double(acc_t<T>(x[i + l]));
          lanes[l] += v * v;
        }
      for (; i < items; ++i) lanes[0] += double(acc_t<T>(x[i])) * double(acc_t<T>(x[i]));
      double sum = 0;
      for (double l : lanes) sum += l;
      partial[c] = sum;
    }
  });
  double total = 0;
  for (int64_t c = 0; c < n; ++c) total += partial[c];
  *out.data<double>() = total;
}

void zero_all(const TensorList& list) {
  const auto* rows = list.table().rows<TensorList::Row>();
  const TensorChunk* chunks = list.table().chunks();
  const int64_t n = list.table().chunk_count(), size = item_size(list.dtype());
#pragma omp parallel for schedule(static) if (n > 4)
  for (int64_t c = 0; c < n; ++c) {
    const TensorList::Row& row = rows[chunks[c].row];
    const int64_t items = std::min(kChunkItems, row.numel - chunks[c].begin);
    std::memset(static_cast<char*>(row.data) + chunks[c].begin * size, 0, size_t(items * size));
  }
}

}  // namespace cpu

void sum_of_squares(const TensorList& list, const Tensor& out) {
  const OpScope scope("sum_of_squares");
  check_shape("sum_of_squares", "out", out, {});
  check(out.dtype() == DType::f64, "sum_of_squares: out is {}, want f64", out.dtype());
  check(list.tensors().empty() || out.device() == list.device(),
        "sum_of_squares: out is on {}, the list on {}", out.device(), list.device());
  out.bump_version();
  if (list.tensors().empty()) {
    zero_bytes(out.raw(), out.device(), sizeof(double));
    return;
  }
  if (kWithCuda && list.device().is_cuda())
    gpu::sum_of_squares(list, out);
  else
    cpu::sum_of_squares(list, out);
}

void zero_all(const TensorList& list) {
  const OpScope scope("zero_all");
  for (const Tensor& t : list.tensors()) t.bump_version();
  if (list.table().chunk_count() == 0) return;
  if (kWithCuda && list.device().is_cuda())
    gpu::zero_all(list);
  else
    cpu::zero_all(list);
}

}  // namespace ebb
