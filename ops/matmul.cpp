#include "ops/matmul.h"

#include <algorithm>
#include <vector>

#include "ops/common.h"
#include "ops/gemm.h"

namespace ebb {

namespace cpu {

void add_bias(const Tensor& y, const Tensor& bias) {
  const int64_t n = bias.numel(), rows = n ? y.numel() / n : 0;
  visit_float(y.dtype(), [&]<class T>() {
    T* p_y = y.data<T>();
    const acc_t<T>* p_bias = bias.data<acc_t<T>>();
#pragma omp parallel for if (rows * n > 65536)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < n; ++j) p_y[i * n + j] = T(acc_t<T>(p_y[i * n + j]) + p_bias[j]);
  });
}

void column_sum(const Tensor& x, const Tensor& sum, bool accumulate) {
  const int64_t n = sum.numel(), rows = n ? x.numel() / n : 0;
  if (!accumulate) sum.zero_();
  visit_float(x.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    constexpr int64_t kRows = 256;  // per partial sum
    const int64_t blocks = (rows + kRows - 1) / kRows;
    std::vector<A> partial(size_t(blocks * n));
    const T* p_x = x.data<T>();
#pragma omp parallel for if (rows * n > 65536)
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t i = b * kRows; i < std::min(rows, (b + 1) * kRows); ++i)
        for (int64_t j = 0; j < n; ++j) partial[size_t(b * n + j)] += A(p_x[i * n + j]);
    A* p_sum = sum.data<A>();
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t j = 0; j < n; ++j) p_sum[j] += partial[size_t(b * n + j)];
  });
}

}  // namespace cpu

namespace {

// How a product's leading dimensions relate to one operand's.
struct Batch {
  std::vector<int> kept, summed;  // dimensions of the product; summed ones were broadcast
};

Batch batch_of(const Shape& operand, const Shape& product) {
  Batch out;
  const int lead = product.size() - operand.size();
  for (int i = 0; i + 2 < product.size(); ++i)
    (i < lead || (operand[i - lead] == 1 && product[i] != 1) ? out.summed : out.kept).push_back(i);
  return out;
}

// [...,r,c] → [kept..., (summed,r), c]: the summed dimensions lie next to the rows.
Tensor rows_with_batch(const Tensor& t, const Batch& batch) {
  std::vector<int> order = batch.kept;
  order.insert(order.end(), batch.summed.begin(), batch.summed.end());
  order.push_back(t.dim() - 2);
  order.push_back(t.dim() - 1);
  Shape shape;
  int64_t rows = t.size(-2);
  for (const int i : batch.kept) shape.push_back(t.size(i));
  for (const int i : batch.summed) rows *= t.size(i);
  shape.push_back(rows);
  shape.push_back(t.size(-1));
  return t.permute(order).reshape(shape);
}

Tensor expand_to(const Tensor& t, const Shape& batch) {
  Shape shape = batch;
  shape.push_back(t.size(-2));
  shape.push_back(t.size(-1));
  return t.expand(shape);
}

// Gradient of b in c = a·b: Σ over the broadcast batch of aᵀ·dc, as one product whose inner
// dimension runs over that batch too. Goes into the accumulator where there is one.
// Flip::yes: the gradient of a, through cᵀ = bᵀ·aᵀ; pass bᵀ and dcᵀ.
enum class Flip { no, yes };
void operand_gradient(BackwardContext& ctx, int input, const Tensor& other, const Tensor& dc,
                      const Shape& shape, DType dtype, Flip flip) {
  const Batch which = batch_of(shape, dc.shape());
  const Shape batch = dc.shape().first(dc.dim() - 2);
  const Tensor left = rows_with_batch(expand_to(other, batch), which).transpose(-1, -2);
  const Tensor right = rows_with_batch(dc, which);
  const auto product_into = [&](const Tensor& gradient, Beta beta) {
    Shape squeezed = left.shape().first(left.dim() - 2);  // without the 1s that were broadcast
    squeezed.push_back(gradient.size(-2));
    squeezed.push_back(gradient.size(-1));
    const Tensor view = gradient.view(squeezed);
    matmul_into(left, right, flip == Flip::yes ? view.transpose(-1, -2) : view, beta);
  };
  if (const Tensor sum = ctx.accumulator(input)) {
    product_into(sum, Beta::one);
    return ctx.grad_accumulated(input);
  }
  const bool weight = flip == Flip::no && shape.size() == 2;
  const DType t = weight || !which.summed.empty() ? accumulate_type(dtype) : dtype;
  const Tensor gradient = Tensor::empty(shape, t, dc.device());
  product_into(gradient, Beta::zero);
  ctx.grad(input, gradient);
}

DType result_type(const char* op, const Tensor& x, const MatmulOptions& options) {
  const DType t = options.output.value_or(x.dtype());
  check(t == x.dtype() || (x.dtype() == DType::bf16 && t == DType::f32),
        "{}: output dtype {} from {} operands; want the same, or f32 from bf16", op, t, x.dtype());
  return t;
}

void check_pair(const char* op, const char* a_name, const Tensor& a, const char* b_name,
                const Tensor& b) {
  check_defined(op, a_name, a);
  check_defined(op, b_name, b);
  check_compute_dtype(op, a_name, a);
  check_same_device(op, a, {&b});
  check(a.dtype() == b.dtype(), "{}: {} {} is {}, {} {} is {}; want one dtype", op, a_name,
        a.shape(), a.dtype(), b_name, b.shape(), b.dtype());
}

Tensor as_matrix(const Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t; }

void linear_backward(BackwardContext& ctx, const Shape& x_shape, const Shape& w_shape, DType t) {
  const Tensor full = ctx.dy(0), dy = full.to(t);  // [...,out]
  const Shape lead = x_shape.first(x_shape.size() - 1);
  if (ctx.needs(0)) {
    const Tensor dx = Tensor::empty(x_shape, t, dy.device());
    matmul_into(as_matrix(dy), ctx.saved(1), as_matrix(dx));
    ctx.grad(0, dx);
  }
  const auto target = [&](int input, const Shape& shape) {
    const Tensor sum = ctx.accumulator(input);
    return sum ? sum : Tensor::empty(shape, accumulate_type(t), dy.device());
  };
  const auto deliver = [&](int input, const Tensor& gradient) {
    ctx.accumulator(input) ? ctx.grad_accumulated(input) : ctx.grad(input, gradient);
  };
  if (ctx.needs(1)) {
    const Tensor dw = target(1, w_shape);
    const Tensor x = ctx.saved(0).reshape({lead.numel(), w_shape[1]});
    matmul_into(dy.reshape({lead.numel(), w_shape[0]}).transpose(0, 1), x, dw,
                ctx.accumulator(1) ? Beta::one : Beta::zero);
    deliver(1, dw);
  }
  if (ctx.needs(2)) {
    const Tensor db = target(2, {w_shape[0]}), dense = full.contiguous();
    const bool accumulate = ctx.accumulator(2).defined();
    if (kWithCuda && dy.on_cuda())
      gpu::column_sum(dense, db, accumulate);
    else
      cpu::column_sum(dense, db, accumulate);
    deliver(2, db);
  }
}

}  // namespace

Var matmul(const Var& av, const Var& bv, MatmulOptions options) {
  const OpScope scope("matmul");
  const Tensor &a = av.value(), &b = bv.value();
  check_pair("matmul", "a", a, "b", b);
  check(a.dim() >= 2 && b.dim() >= 2 && a.size(-1) == b.size(-2),
        "matmul: a is {}, b is {}; want [...,m,k] and [...,k,n]", a.shape(), b.shape());
  Shape shape;
  try {
    shape = broadcast_shapes("matmul", a.shape().first(a.dim() - 2), b.shape().first(b.dim() - 2));
  } catch (const Error&) {
    fail("matmul: a is {}, b is {}; their leading dimensions do not broadcast", a.shape(),
         b.shape());
  }
  shape.push_back(a.size(-2));
  shape.push_back(b.size(-1));
  const Tensor c = Tensor::empty(shape, result_type("matmul", a, options), a.device());
  matmul_into(a, b, c);
  const Tensor keep_a = bv.requires_grad() ? a : Tensor();
  const Tensor keep_b = av.requires_grad() ? b : Tensor();
  return record("matmul", {av, bv}, {keep_a, keep_b}, {c},
                [a_shape = a.shape(), b_shape = b.shape(), t = a.dtype()](BackwardContext& ctx) {
                  const Tensor dc = ctx.dy(0).to(t);
                  if (ctx.needs(0))
                    operand_gradient(ctx, 0, ctx.saved(1).transpose(-1, -2), dc.transpose(-1, -2),
                                     a_shape, t, Flip::yes);
                  if (ctx.needs(1))
                    operand_gradient(ctx, 1, ctx.saved(0), dc, b_shape, t, Flip::no);
                })[0];
}

Var linear(const Var& xv, const Var& wv, const Var& bias, MatmulOptions options) {
  const OpScope scope("linear");
  const Tensor &x = xv.value(), &w = wv.value();
  check_pair("linear", "x", x, "w", w);
  check(x.dim() >= 1 && w.dim() == 2 && x.size(-1) == w.size(1),
        "linear: x is {}, w is {}; want [...,in] and [out,in]", x.shape(), w.shape());
  check(!bias || bias.shape() == Shape{w.size(0)}, "linear: bias is {}, w is {}; want bias = [{}]",
        bias.shape(), w.shape(), w.size(0));
  check_same_device("linear", x, {&bias.value()});
  Shape shape = x.shape().first(x.dim() - 1);
  shape.push_back(w.size(0));
  const Tensor y = Tensor::empty(shape, result_type("linear", x, options), x.device());
  matmul_into(as_matrix(x), w.transpose(0, 1), as_matrix(y));
  if (bias) {
    const Tensor b = parameter_values("linear", "bias", bias.value(), x);
    if (kWithCuda && y.on_cuda())
      gpu::add_bias(y, b);
    else
      cpu::add_bias(y, b);
  }
  const Tensor keep_x = wv.requires_grad() ? x : Tensor();
  const Tensor keep_w = xv.requires_grad() ? w : Tensor();
  return record("linear", {xv, wv, bias}, {keep_x, keep_w}, {y},
                [x_shape = x.shape(), w_shape = w.shape(), t = x.dtype()](BackwardContext& ctx) {
                  linear_backward(ctx, x_shape, w_shape, t);
                })[0];
}

Cost matmul_cost(Pass pass, int64_t batch, int64_t m, int64_t n, int64_t k, DType dtype) {
  const Cost one = gemm_cost(batch, m, n, k, dtype, dtype);
  return pass == Pass::forward ? one : one + one;
}

Cost linear_cost(Pass pass, int64_t rows, int64_t in, int64_t out, DType dtype) {
  if (pass == Pass::forward) return gemm_cost(1, rows, out, in, dtype, dtype);
  return gemm_cost(1, rows, in, out, dtype, dtype) +
         gemm_cost(1, out, in, rows, dtype, accumulate_type(dtype));
}

}  // namespace ebb
