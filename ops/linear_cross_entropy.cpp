#include "ops/linear_cross_entropy.h"

#include <algorithm>
#include <optional>

#include "ops/common.h"
#include "ops/gemm.h"
#include "ops/reduce.h"

namespace ebb {

namespace cpu {

void softmax_gradient(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                      const RowScale& scale, const Tensor& lse, const Tensor& token_loss) {
  const RowStatistics rows{Tensor::empty_like(lse), Tensor::empty_like(lse), lse, token_loss};
  cross_entropy_fwd(logits, labels, ignore_index, rows);
  cross_entropy_bwd(logits, labels, ignore_index, rows, scale, logits);
}

void add_at(const Tensor& x, const Tensor& index, const Tensor& value, double factor,
            const Tensor& count) {
  const int64_t rows = x.size(0), v = x.size(1);
  visit_float(x.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const double divisor = count ? double(count.data<A>()[0]) : 1;
    if (divisor == 0) return;
    const A f = A(factor / divisor);
    for (int64_t n = 0; n < rows; ++n) {
      T& to = x.data<T>()[n * v + index.data<int64_t>()[n]];
      to = T(A(to) + f * A(value.data<T>()[n]));
    }
  });
}

void scaled(const Tensor& x, const Tensor& scale, const Tensor& out, bool accumulate) {
  const int64_t n = x.numel();
  visit_float(x.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const A g = scale.data<A>()[0];
    const T* p_x = x.data<T>();
    T* p_out = out.data<T>();
#pragma omp parallel for if (n > 65536)
    for (int64_t i = 0; i < n; ++i) p_out[i] = T(g * A(p_x[i]) + (accumulate ? A(p_out[i]) : A(0)));
  });
}

}  // namespace cpu

namespace {

constexpr const char* kOp = "linear_cross_entropy";

void scaled(const Tensor& x, const Tensor& scale, const Tensor& out, bool accumulate) {
  if (kWithCuda && x.on_cuda())
    gpu::scaled(x, scale, out, accumulate);
  else
    cpu::scaled(x, scale, out, accumulate);
}

// The largest logit of every row, before its gradient takes its place, and what l2_wrap adds there.
struct Largest {
  Tensor index, value;
  Largest(const Tensor& z)
      : index(Tensor::empty({z.size(0)}, DType::i64, z.device())),
        value(Tensor::empty({z.size(0)}, z.dtype(), z.device())) {
    const ReduceShape shape{z.size(0), z.size(1), 1};
    if (kWithCuda && z.on_cuda())
      gpu::max(z, shape, false, value, index);
    else
      cpu::max(z, shape, false, value, index);
  }
  void add(const Tensor& z, double factor) const {
    if (kWithCuda && z.on_cuda())
      gpu::add_at(z, index, value, factor, {});
    else
      cpu::add_at(z, index, value, factor, {});
  }
};

// All inputs, checked and dense.
struct Inputs {
  Tensor x, w, labels, weights, count, kept;  // [N,d], [V,d], [N], [N] or undefined, [], i64 []
  Shape lead;
};

Inputs checked_inputs(const Tensor& x, const Tensor& w, const Tensor& labels,
                      const LinearCrossEntropyOptions& o) {
  check_defined(kOp, "x", x);
  check_defined(kOp, "w", w);
  check_compute_dtype(kOp, "x", x);
  check(x.dim() >= 1 && w.dim() == 2 && x.size(-1) == w.size(1) && w.size(0) >= 1,
        "{}: x is {}, w is {}; want [...,d] and [V,d], V >= 1", kOp, x.shape(), w.shape());
  check(x.dtype() == w.dtype(), "{}: x {} is {}, w {} is {}; want one dtype", kOp, x.shape(),
        x.dtype(), w.shape(), w.dtype());
  check_same_device(kOp, x, {&w, &o.token_weights});
  check(o.reduction != Reduction::none, "{}: no reduction 'none'; use cross_entropy for that", kOp);
  check(o.l2_wrap >= 0, "{}: l2_wrap is {}, want 0 (none) or more", kOp, o.l2_wrap);
  check(o.l2_wrap_rows >= 0, "{}: l2_wrap_rows is {}, want 0 (this call's) or more", kOp,
        o.l2_wrap_rows);
  check(o.chunk_rows >= 0, "{}: chunk_rows is {}, want 0 (automatic) or more", kOp, o.chunk_rows);
  Inputs in;
  in.lead = x.shape().first(x.dim() - 1);
  in.labels = checked_labels(kOp, labels, in.lead, x.device());
  const int64_t n = in.labels.numel();
  in.x = x.contiguous().view({n, x.size(-1)});
  in.w = w.contiguous();
  const DType t = accumulate_type(x.dtype());
  in.kept = count_labels(in.labels, o.ignore_index);
  if (o.reduction == Reduction::mean)
    in.count = checked_count(kOp, o.count, in.kept, t, x.device());
  if (o.token_weights) {
    check_shape(kOp, "token_weights", o.token_weights, in.lead);
    in.weights = parameter_values(kOp, "token_weights", o.token_weights, x).view({n});
  }
  if (!x.on_cuda()) check_label_values(kOp, in.labels, w.size(0), o.ignore_index);
  return in;
}

struct Gradients {
  Tensor dx, dw;  // [N,d] in x's dtype, [V,d] f32 (f64); undefined where not wanted
};

// The walk over chunks: token losses and lse of all rows and, where wanted, the gradients for an
// upstream gradient of 1.
void run_chunks(const Inputs& in, int64_t ignore_index, double l2_wrap, int64_t chunk,
                const Tensor& token_loss, const Tensor& lse, const Gradients& out) {
  const int64_t n = in.x.size(0), v = in.w.size(0);
  const bool gradients = out.dx || out.dw;
  const Tensor buffer = Tensor::empty({std::min(chunk, n), v}, in.x.dtype(), in.x.device());
  for (int64_t begin = 0; begin < n; begin += chunk) {
    const int64_t end = std::min(n, begin + chunk);
    const auto part = [&](const Tensor& t) { return t ? t.slice(0, begin, end) : t; };
    const Tensor z = buffer.slice(0, 0, end - begin), x = part(in.x), labels = part(in.labels);
    matmul_into(x, in.w.transpose(0, 1), z);
    if (gradients) {
      const RowScale scale{{}, part(in.weights), in.count};
      std::optional<Largest> largest;
      if (l2_wrap > 0) largest.emplace(z);
      if (kWithCuda && x.on_cuda())
        gpu::softmax_gradient(z, labels, ignore_index, scale, part(lse), part(token_loss));
      else
        cpu::softmax_gradient(z, labels, ignore_index, scale, part(lse), part(token_loss));
      if (largest) largest->add(z, l2_wrap);
    } else {
      const Tensor scratch = Tensor::empty({2, end - begin}, lse.dtype(), lse.device());
      const RowStatistics rows{scratch.select(0, 0), scratch.select(0, 1), part(lse),
                               part(token_loss)};
      if (kWithCuda && x.on_cuda())
        gpu::cross_entropy_fwd(z, labels, ignore_index, rows);
      else
        cpu::cross_entropy_fwd(z, labels, ignore_index, rows);
    }
    if (out.dx) matmul_into(z, in.w, part(out.dx));
    if (out.dw) matmul_into(z.transpose(0, 1), x, out.dw, begin ? Beta::one : Beta::zero);
  }
  if (n == 0 && out.dw) out.dw.zero_();
}

void backward_pass(BackwardContext& ctx, const Shape& x_shape) {
  const Tensor upstream = ctx.dy(0).contiguous();  // one number
  if (ctx.needs(0)) {
    const Tensor& dx = ctx.saved(0);
    const Tensor out = Tensor::empty(x_shape, dx.dtype(), dx.device());
    scaled(dx, upstream, out, false);
    ctx.grad(0, out);
  }
  if (ctx.needs(1)) {
    const Tensor &dw = ctx.saved(1), sum = ctx.accumulator(1);
    const Tensor out = sum ? sum : Tensor::empty_like(dw);
    scaled(dw, upstream, out, sum.defined());
    sum ? ctx.grad_accumulated(1) : ctx.grad(1, out);
  }
}

}  // namespace

int64_t linear_cross_entropy_chunk(int64_t rows, int64_t v, DType dtype, Device device) {
  const int64_t bytes = device.is_cuda() ? int64_t(544) << 20 : int64_t(128) << 20;
  const int64_t least = device.is_cuda() ? 4096 : 256;
  const int64_t most = std::clamp<int64_t>(bytes / (v * item_size(dtype)), least, 8192);
  const int64_t chunks = std::max<int64_t>(1, (rows + most - 1) / most);
  return std::max<int64_t>(1, ((rows + chunks - 1) / chunks + 127) / 128 * 128);
}

CrossEntropy linear_cross_entropy(const Var& xv, const Var& wv, const Tensor& labels,
                                  LinearCrossEntropyOptions options) {
  const OpScope scope(kOp);
  const Inputs in = checked_inputs(xv.value(), wv.value(), labels, options);
  const Device device = in.x.device();
  const DType t = accumulate_type(in.x.dtype());
  const int64_t v = in.w.size(0);
  const Tensor token_loss = Tensor::empty(in.lead, t, device);
  const Tensor lse = Tensor::empty(in.lead, t, device), loss = Tensor::empty({}, t, device);
  Gradients out;
  if (will_record({xv, wv})) {
    if (xv.requires_grad()) out.dx = Tensor::empty_like(in.x);
    if (wv.requires_grad()) out.dw = Tensor::empty(in.w.shape(), t, device);
  }
  const int64_t chunk = options.chunk_rows
                            ? options.chunk_rows
                            : linear_cross_entropy_chunk(in.x.size(0), v, in.x.dtype(), device);
  const Shape rows{in.x.size(0)};
  const int64_t l2_rows = options.reduction == Reduction::sum ? 1
                          : options.l2_wrap_rows              ? options.l2_wrap_rows
                                                              : std::max<int64_t>(1, in.x.size(0));
  run_chunks(in, options.ignore_index, options.l2_wrap / double(l2_rows), chunk,
             token_loss.view(rows), lse.view(rows), out);
  const RowScale total{{}, in.weights, in.count};
  if (kWithCuda && device.is_cuda())
    gpu::total_loss(token_loss, total, loss);
  else
    cpu::total_loss(token_loss, total, loss);
  const Var result =
      record(kOp, {xv, wv}, {out.dx, out.dw}, {loss},
             [shape = xv.shape()](BackwardContext& ctx) { backward_pass(ctx, shape); })[0];
  return {result, token_loss, lse, in.kept};
}

Cost linear_cross_entropy_cost(Pass pass, int64_t rows, int64_t d, int64_t v, DType dtype) {
  const double n = double(rows), x = n * double(d), w = double(v) * double(d);
  const double item = double(item_size(dtype)), wide = double(item_size(accumulate_type(dtype)));
  if (pass == Pass::backward) return {2 * x * item + 3 * w * wide, x + 2 * w};
  // Per logit three products and, in the softmax: compare, subtract, exp, add, multiply.
  return {2 * x * item + w * (item + wide) + n * (8 + 2 * wide),
          n * double(v) * (6 * double(d) + 5)};
}

}  // namespace ebb
