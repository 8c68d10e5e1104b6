#include "ops/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/common.h"
#include "ops/cpu_math.h"

namespace ebb {

namespace cpu {
namespace {

template <class A>
A row_scale(const RowScale& s, int64_t row) {
  A g = 1;
  if (s.upstream) g *= s.upstream.data<A>()[s.upstream.numel() == 1 ? 0 : row];
  if (s.weights) g *= s.weights.data<A>()[row];
  if (s.count) {
    const A count = s.count.data<A>()[0];
    g = count == 0 ? A(0) : g / count;
  }
  return g;
}

}  // namespace

void cross_entropy_fwd(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                       const RowStatistics& rows) {
  const int64_t n = labels.numel(), v = logits.size(1);
  const int64_t* p_label = labels.data<int64_t>();
  visit_float(logits.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const T* p_z = logits.data<T>();
    A *p_max = rows.max.data<A>(), *p_sum = rows.log_sum.data<A>();
    A *p_lse = rows.lse.data<A>(), *p_loss = rows.token_loss.data<A>();
#pragma omp parallel for if (n * v > 16384)
    for (int64_t i = 0; i < n; ++i) {
      const T* z = p_z + i * v;
      A max = -std::numeric_limits<A>::infinity(), sum = 0;
      // In lanes: the order is the compiler's, not the number of threads'.
#pragma omp simd reduction(max : max)
      for (int64_t j = 0; j < v; ++j) max = max < A(z[j]) ? A(z[j]) : max;
      const A shift = std::isinf(max) && max < 0 ? A(0) : max;  // a row of −inf: no inf − inf
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < v; ++j) sum += vexp(A(z[j]) - shift);
      p_max[i] = shift;
      p_sum[i] = std::log(sum);
      p_lse[i] = p_max[i] + p_sum[i];
      p_loss[i] = p_label[i] == ignore_index ? A(0) : p_sum[i] + (shift - A(z[p_label[i]]));
    }
  });
}

void cross_entropy_bwd(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                       const RowStatistics& rows, const RowScale& scale, const Tensor& dlogits) {
  const int64_t n = labels.numel(), v = logits.size(1);
  const int64_t* p_label = labels.data<int64_t>();
  visit_float(logits.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const T* p_z = logits.data<T>();
    T* p_dz = dlogits.data<T>();
    const A *p_max = rows.max.data<A>(), *p_sum = rows.log_sum.data<A>();
#pragma omp parallel for if (n * v > 16384)
    for (int64_t i = 0; i < n; ++i) {
      const T* z = p_z + i * v;
      T* dz = p_dz + i * v;
      if (p_label[i] == ignore_index) {
        std::fill(dz, dz + v, T(0));
        continue;
      }
      const A g = row_scale<A>(scale, i), max = p_max[i], log_sum = p_sum[i];
      const A at_label = vexp((A(z[p_label[i]]) - max) - log_sum);
#pragma omp simd  // dz may be z, element by element
      for (int64_t j = 0; j < v; ++j) dz[j] = T(g * vexp((A(z[j]) - max) - log_sum));
      dz[p_label[i]] = T(g * (at_label - 1));
    }
  });
}

void count_labels(const Tensor& labels, int64_t ignore_index, const Tensor& count) {
  const int64_t* p = labels.data<int64_t>();
  count.data<int64_t>()[0] = labels.numel() - std::count(p, p + labels.numel(), ignore_index);
}

void total_loss(const Tensor& token_loss, const RowScale& scale, const Tensor& loss) {
  visit_float(token_loss.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const T* p = token_loss.data<T>();
    double sum = 0;
    for (int64_t i = 0; i < token_loss.numel(); ++i) {
      const double w = scale.weights ? double(scale.weights.data<A>()[i]) : 1;
      sum += w * double(p[i]);
    }
    if (scale.count) {
      const double count = double(scale.count.data<A>()[0]);
      sum = count == 0 ? 0 : sum / count;
    }
    loss.data<A>()[0] = A(sum);
  });
}

}  // namespace cpu

Tensor checked_labels(const char* op, const Tensor& labels, const Shape& want, Device device) {
  check_shape(op, "labels", labels, want);
  check(labels.dtype() == DType::i32 || labels.dtype() == DType::i64,
        "{}: labels {} are {}, want i32 or i64", op, labels.shape(), labels.dtype());
  check(labels.device() == device, "{}: labels {} on {}, logits or x on {}", op, labels.shape(),
        labels.device(), device);
  check(labels.numel() <= INT32_MAX, "{}: labels are {}, want at most 2^31-1 rows", op,
        labels.shape());
  return labels.to(DType::i64).contiguous().view({labels.numel()});
}

void check_label_values(const char* op, const Tensor& labels, int64_t v, int64_t ignore_index) {
  const int64_t* p = labels.data<int64_t>();
  for (int64_t i = 0; i < labels.numel(); ++i)
    check(p[i] == ignore_index || (p[i] >= 0 && p[i] < v),
          "{}: label {} at position {} is neither in [0, {}) nor ignore_index {}", op, p[i], i, v,
          ignore_index);
}

Tensor checked_count(const char* op, const Tensor& count, const Tensor& kept, DType dtype,
                     Device device) {
  if (!count) return kept.to(dtype);
  check(count.numel() == 1, "{}: count is {}, want one number", op, count.shape());
  check(count.device() == device, "{}: count on {}, logits or x on {}", op, count.device(), device);
  return count.to(dtype).contiguous().view({});
}

Tensor count_labels(const Tensor& labels, int64_t ignore_index) {
  const OpScope scope("count_labels");
  const Tensor flat = checked_labels("count_labels", labels, labels.shape(), labels.device());
  const Tensor count = Tensor::empty({}, DType::i64, labels.device());
  if (kWithCuda && flat.on_cuda())
    gpu::count_labels(flat, ignore_index, count);
  else
    cpu::count_labels(flat, ignore_index, count);
  return count;
}

namespace {

void backward_pass(BackwardContext& ctx, Shape shape, int64_t ignore_index, Reduction reduction) {
  const Tensor &logits = ctx.saved(0), &labels = ctx.saved(1);  // [N,V], [N]
  const RowStatistics rows{ctx.saved(2), ctx.saved(3), {}, {}};
  RowScale scale;
  scale.upstream = ctx.dy(0).contiguous();
  if (reduction == Reduction::mean) scale.count = ctx.saved(4);
  const Tensor dlogits = Tensor::empty_like(logits);
  if (kWithCuda && logits.on_cuda())
    gpu::cross_entropy_bwd(logits, labels, ignore_index, rows, scale, dlogits);
  else
    cpu::cross_entropy_bwd(logits, labels, ignore_index, rows, scale, dlogits);
  shape.push_back(logits.size(1));
  ctx.grad(0, dlogits.view(shape));
}

}  // namespace

CrossEntropy cross_entropy(const Var& zv, const Tensor& labels_in, CrossEntropyOptions options) {
  const OpScope scope("cross_entropy");
  const Tensor& z = zv.value();
  check_defined("cross_entropy", "logits", z);
  check_compute_dtype("cross_entropy", "logits", z);
  check(z.dim() >= 1 && z.shape().back() >= 1, "cross_entropy: logits are {}, want [...,V], V >= 1",
        z.shape());
  const int64_t v = z.shape().back();
  const Shape lead = z.shape().first(z.dim() - 1);
  const Tensor labels = checked_labels("cross_entropy", labels_in, lead, z.device());
  const int64_t n = labels.numel();
  const Tensor logits = z.contiguous().view({n, v});
  const DType t = accumulate_type(z.dtype());
  const auto per_row = [&] { return Tensor::empty(lead, t, z.device()); };
  const RowStatistics rows{per_row(), per_row(), per_row(), per_row()};
  const Tensor kept = count_labels(labels, options.ignore_index);
  const Tensor count = checked_count("cross_entropy", options.count, kept, t, z.device());
  const bool reduced = options.reduction != Reduction::none;
  const Tensor loss = reduced ? Tensor::empty({}, t, z.device()) : per_row();
  RowScale total;
  if (options.reduction == Reduction::mean) total.count = count;
  if (kWithCuda && z.on_cuda()) {
    gpu::cross_entropy_fwd(logits, labels, options.ignore_index, rows);
    if (reduced) gpu::total_loss(rows.token_loss, total, loss);
  } else {
    check_label_values("cross_entropy", labels, v, options.ignore_index);
    cpu::cross_entropy_fwd(logits, labels, options.ignore_index, rows);
    if (reduced) cpu::total_loss(rows.token_loss, total, loss);
  }
  if (!reduced) loss.copy_(rows.token_loss);
  const Var out =
      record("cross_entropy", {zv}, {logits, labels, rows.max, rows.log_sum, count}, {loss},
             [lead, ignore = options.ignore_index, how = options.reduction](BackwardContext& ctx) {
               backward_pass(ctx, lead, ignore, how);
             })[0];
  return {out, rows.token_loss, rows.lse, kept};
}

Cost cross_entropy_cost(Pass pass, int64_t rows, int64_t v, DType dtype) {
  const double n = double(rows) * double(v), item = double(item_size(dtype));
  const double row = double(rows) * double(8 + 4 * item_size(accumulate_type(dtype)));
  if (pass == Pass::forward) return {n * item + row, 4 * n};  // compare, subtract, exp, add
  return {2 * n * item + row, 4 * n};
}

}  // namespace ebb
