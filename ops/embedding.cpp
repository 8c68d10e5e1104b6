#include "ops/embedding.h"

#include <algorithm>

#include "ops/common.h"

namespace ebb {

namespace cpu {

void embedding_fwd(const Tensor& table, const Tensor& ids, const Tensor& y) {
  const int64_t n = ids.numel(), d = table.size(1);
  const int64_t* p_ids = ids.data<int64_t>();
  visit_float(table.dtype(), [&]<class T>() {
    const T* p_table = table.data<T>();
    T* p_y = y.data<T>();
#pragma omp parallel for if (n * d > 65536)
    for (int64_t i = 0; i < n; ++i) std::copy_n(p_table + p_ids[i] * d, d, p_y + i * d);
  });
}

void embedding_bwd(const Tensor& ids, const Tensor& dy, const Tensor& dtable) {
  constexpr int64_t kColumns = 32;  // at least a cache line, so that threads do not share one
  const int64_t n = ids.numel(), d = dtable.size(1), blocks = (d + kColumns - 1) / kColumns;
  const int64_t* p_ids = ids.data<int64_t>();
  visit_float(dy.dtype(), [&]<class T>() {
    const T* p_dy = dy.data<T>();
    acc_t<T>* p_out = dtable.data<acc_t<T>>();
    // Threads own columns and walk all tokens in order: nobody shares a sum.
#pragma omp parallel for if (n * d > 65536)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * kColumns, end = std::min(d, begin + kColumns);
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = begin; j < end; ++j) p_out[p_ids[i] * d + j] += p_dy[i * d + j];
    }
  });
}

}  // namespace cpu

namespace {

void check_ids_on_cpu(const Tensor& ids, int64_t v) {
  const int64_t* p = ids.data<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i)
    check(p[i] >= 0 && p[i] < v, "embedding: id {} at position {} lies outside [0, {})", p[i], i,
          v);
}

}  // namespace

Var embedding(const Var& tv, const Tensor& ids, std::optional<DType> output) {
  const OpScope scope("embedding");
  const Tensor& table = tv.value();
  check_defined("embedding", "table", table);
  check_defined("embedding", "ids", ids);
  check_compute_dtype("embedding", "table", table);
  check(table.dim() == 2, "embedding: table is {}, want [V,d]", table.shape());
  check(table.size(0) <= int64_t(1) << 30, "embedding: table is {}, want at most 2^30 rows",
        table.shape());
  check(ids.dtype() == DType::i32 || ids.dtype() == DType::i64,
        "embedding: ids {} are {}, want i32 or i64", ids.shape(), ids.dtype());
  check(ids.numel() <= INT32_MAX, "embedding: ids are {}, want at most 2^31-1 of them",
        ids.shape());
  check_same_device("embedding", table, {&ids});
  const DType t = output.value_or(table.dtype());
  check(t == table.dtype() || (table.dtype() == DType::bf16 && t == DType::f32),
        "embedding: output dtype {} from a table of {}; want the same, or f32 from bf16", t,
        table.dtype());
  const int64_t v = table.size(0);
  const Tensor flat = ids.to(DType::i64).contiguous(), dense = table.contiguous();
  Shape shape = ids.shape();
  shape.push_back(table.size(1));
  const Tensor y = Tensor::empty(shape, t, table.device());
  if (kWithCuda && y.on_cuda()) {
    gpu::embedding_fwd(dense, flat, y);
  } else {
    check_ids_on_cpu(flat, v);
    cpu::embedding_fwd(dense, flat, y);
  }
  return record("embedding", {tv}, {flat}, {y},
                [table_shape = table.shape(), t](BackwardContext& ctx) {
                  const Tensor sum = ctx.accumulator(0), dy = ctx.dy(0).contiguous();
                  const Tensor dtable =
                      sum ? sum : Tensor::zeros(table_shape, accumulate_type(t), dy.device());
                  if (kWithCuda && dy.on_cuda())
                    gpu::embedding_bwd(ctx.saved(0), dy, dtable);
                  else
                    cpu::embedding_bwd(ctx.saved(0), dy, dtable);
                  sum ? ctx.grad_accumulated(0) : ctx.grad(0, dtable);
                })[0];
}

Cost embedding_cost(Pass pass, int64_t tokens, int64_t d, DType dtype) {
  const double n = double(tokens) * double(d), item = double(item_size(dtype));
  const double ids = 8 * double(tokens);
  if (pass == Pass::forward) return {2 * n * item + ids, 0};
  const double sums = double(item_size(accumulate_type(dtype)));
  return {n * item + 2 * n * sums + ids, n};  // at most: every token its own row, read and written
}

}  // namespace ebb
