#include "ops/adamw.h"

#include <omp.h>

#include <algorithm>

#include "ops/common.h"

namespace ebb {
namespace {

constexpr int kScalars = sizeof(AdamWScalars) / sizeof(double);
static_assert(kScalars == 10 && sizeof(AdamWScalars) == kScalars * sizeof(double));

void check_scalars(const char* op, const Tensor& scalars) {
  check_shape(op, "scalars", scalars, {kScalars});
  check(scalars.dtype() == DType::f64 && scalars.is_contiguous(),
        "{}: scalars are {}, want dense f64 (adamw_scalars makes them)", op, scalars.dtype());
}

void check_member(size_t i, const char* what, const Tensor& t, const Tensor& master, DType dtype) {
  check(t.defined(), "adamw: {} of tensor {} is undefined", what, i);
  check(t.shape() == master.shape(), "adamw: {} of tensor {} is {}, the master is {}", what, i,
        t.shape(), master.shape());
  check(t.dtype() == dtype, "adamw: {} of tensor {} {} is {}, want {}", what, i, t.shape(),
        t.dtype(), dtype);
  check(t.device() == master.device(), "adamw: {} of tensor {} {} is on {}, the master on {}", what,
        i, t.shape(), t.device(), master.device());
  check(t.is_contiguous(), "adamw: {} of tensor {} {} is not dense", what, i, t.shape());
}

}  // namespace

Tensor adamw_scalars(const AdamWScalars& values, Device device) {
  double host[kScalars];
  std::memcpy(host, &values, sizeof values);
  return Tensor::from(std::span<const double>(host), {kScalars}, device);
}

AdamWScalars read_adamw_scalars(const Tensor& scalars) {
  check_scalars("read_adamw_scalars", scalars);
  const std::vector<double> host = scalars.to_vector<double>();
  AdamWScalars values;
  std::memcpy(static_cast<void*>(&values), host.data(), sizeof values);
  return values;
}

Tensor adamw_scalar(const Tensor& scalars, AdamWScalar which) {
  check_scalars("adamw_scalar", scalars);
  return scalars.select(0, int(which));
}

void AdamWList::set(std::vector<AdamWTensor> tensors) {
  std::erase_if(tensors, [](const AdamWTensor& t) { return !t.grad.defined(); });
  std::vector<Row> rows;
  rows.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const AdamWTensor& t = tensors[i];
    check(t.master.defined(), "adamw: master of tensor {} is undefined", i);
    const DType dtype = t.master.dtype(), first = tensors[0].master.dtype();
    check(dtype == DType::f32 || (dtype == DType::f64 && !t.master.on_cuda()),
          "adamw: master of tensor {} {} is {} on {}, want f32 (or f64 on the CPU)", i,
          t.master.shape(), dtype, t.master.device());
    check(t.master.device() == tensors[0].master.device(),
          "adamw: tensor {} is on {}, tensor 0 on {}", i, t.master.device(),
          tensors[0].master.device());
    check_member(i, "master", t.master, t.master, first);
    check_member(i, "grad", t.grad, t.master, dtype);
    check_member(i, "m", t.m, t.master, dtype);
    check_member(i, "v", t.v, t.master, dtype);
    if (t.shadow) check_member(i, "shadow", t.shadow, t.master, DType::bf16);
    rows.push_back({t.master.raw(), t.grad.raw(), t.m.raw(), t.v.raw(),
                    t.shadow ? t.shadow.raw() : nullptr, t.master.numel(), t.weight_decay,
                    t.lr_scale});
  }
  tensors_ = std::move(tensors);
  table_.update(rows, tensors_.empty() ? Device() : device());
}

Cost adamw_cost(int64_t items, bool shadow) {
  return {double(items) * (7 * 4 + (shadow ? 2 : 0)), double(items) * 14};
}

namespace cpu {

void adamw_begin(const Tensor& scalars, const Tensor& squares, const AdamWOptions& options) {
  auto& s = *static_cast<AdamWScalars*>(scalars.raw());
  adamw_begin_step(s, *squares.data<double>(), options);
}

void adamw(const AdamWList& list, const Tensor& scalars, const AdamWOptions& options) {
  const auto& s = *static_cast<const AdamWScalars*>(scalars.raw());
  if (s.skip != 0) return;
  const auto* rows = list.table().rows<AdamWList::Row>();
  const TensorChunk* chunks = list.table().chunks();
  const int64_t n = list.table().chunk_count();
  visit_float(list.dtype(), [&]<class T>() {
    if constexpr (!std::is_same_v<T, bf16>) {
#pragma omp parallel for schedule(static) if (n > 2)
      for (int64_t c = 0; c < n; ++c) {
        const AdamWList::Row& row = rows[chunks[c].row];
        const int64_t begin = chunks[c].begin;
        const int64_t items = std::min(kChunkItems, row.numel - begin);
        const AdamWCoefficients<T> k(s, row, options);
        T* p = static_cast<T*>(row.p) + begin;
        const T* g = static_cast<const T*>(row.g) + begin;
        T* m = static_cast<T*>(row.m) + begin;
        T* v = static_cast<T*>(row.v) + begin;
        for (int64_t i = 0; i < items; ++i) adamw_element(p[i], g[i], m[i], v[i], k);
        if (!row.shadow) continue;
        bf16* shadow = static_cast<bf16*>(row.shadow) + begin;
        for (int64_t i = 0; i < items; ++i) shadow[i] = bf16(float(p[i]));
      }
    }
  });
}

}  // namespace cpu

void adamw_begin(const Tensor& scalars, const Tensor& squares, const AdamWOptions& options) {
  const OpScope scope("adamw_begin");
  check_scalars("adamw_begin", scalars);
  check_shape("adamw_begin", "squares", squares, {});
  check(squares.dtype() == DType::f64, "adamw_begin: squares are {}, want f64", squares.dtype());
  check_same_device("adamw_begin", scalars, {&squares});
  scalars.bump_version();
  if (kWithCuda && scalars.on_cuda())
    gpu::adamw_begin(scalars, squares, options);
  else
    cpu::adamw_begin(scalars, squares, options);
}

void adamw(const AdamWList& list, const Tensor& scalars, const AdamWOptions& options) {
  const OpScope scope("adamw");
  check_scalars("adamw", scalars);
  if (list.tensors().empty()) return;
  check_same_device("adamw", scalars, {&list.tensors()[0].master});
  for (const AdamWTensor& t : list.tensors()) {
    for (const Tensor& changed : {t.master, t.m, t.v}) changed.bump_version();
    if (t.shadow) t.shadow.bump_version();
  }
  if (list.table().chunk_count() == 0) return;
  if (kWithCuda && scalars.on_cuda())
    gpu::adamw(list, scalars, options);
  else
    cpu::adamw(list, scalars, options);
}

}  // namespace ebb
