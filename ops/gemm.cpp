#include "ops/gemm.h"

#include <algorithm>
#include <climits>
#include <vector>

#include "tensor/check.h"

namespace ebb {
namespace {

constexpr int64_t kMaxBatch = 32768;            // CUDA grids end at 65535
constexpr int64_t kMaxSide = int64_t(1) << 30;  // BLAS and cuBLASLt kernels count in 32 bits
constexpr int64_t kMaxCalls = 64;               // rather than more calls, copy the operands

struct Layout {
  bool usable = false, transposed = false;
  int64_t ld = 0;
};

// How the library can read a matrix with these strides, if it can.
Layout layout_of(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  Layout l;
  if ((col_stride == 1 || cols == 1) && (rows == 1 || row_stride >= cols))
    l = {true, false, rows == 1 ? cols : row_stride};
  else if ((row_stride == 1 || rows == 1) && (cols == 1 || col_stride >= rows))
    l = {true, true, cols == 1 ? rows : col_stride};
  l.usable &= l.ld <= INT_MAX;
  return l;
}

Layout layout_of(const Tensor& t) {
  return layout_of(t.size(-2), t.size(-1), t.stride(-2), t.stride(-1));
}

Tensor usable(const Tensor& t) { return layout_of(t).usable ? t : t.contiguous(); }

// A batch dimension of the product: its size and each operand's stride along it.
struct BatchDim {
  int64_t size, a, b, c;
};

// Outermost first, without sizes of 1; neighbours that all three operands walk as one are merged.
std::vector<BatchDim> batch_dims(const Tensor& a, const Tensor& b, const Tensor& c) {
  std::vector<BatchDim> dims;
  for (int i = 0; i + 2 < c.dim(); ++i) {
    const BatchDim d{c.size(i), a.stride(i), b.stride(i), c.stride(i)};
    if (d.size == 1) continue;
    if (!dims.empty()) {
      BatchDim& outer = dims.back();
      if (outer.a == d.a * d.size && outer.b == d.b * d.size && outer.c == d.c * d.size) {
        outer = {outer.size * d.size, d.a, d.b, d.c};
        continue;
      }
    }
    dims.push_back(d);
  }
  return dims;
}

// Batches that share b are more rows of a single product where a and c are laid out that way:
// [...,m,k]·[k,n] is then one product of m·... rows.
void fold_rows(std::vector<BatchDim>& dims, const Tensor& a, const Tensor& c, int64_t& m,
               int64_t& row_a, int64_t& row_c) {
  while (!dims.empty()) {
    const BatchDim d = dims.back();
    const bool one = m == 1;
    if (d.b != 0 || !(one || (d.a == m * row_a && d.c == m * row_c))) return;
    const int64_t rows = m * d.size, next_a = one ? d.a : row_a, next_c = one ? d.c : row_c;
    const Layout la = layout_of(rows, a.size(-1), next_a, a.stride(-1));
    const Layout lc = layout_of(rows, c.size(-1), next_c, c.stride(-1));
    if (!la.usable || !lc.usable || lc.transposed) return;
    m = rows, row_a = next_a, row_c = next_c;
    dims.pop_back();
  }
}

void* at(void* p, int64_t elements, DType t) {
  return static_cast<char*>(p) + elements * item_size(t);
}

// Position (row, col) of an operand.
void* at(const GemmOperand& o, int64_t g, int64_t row, int64_t col, DType t) {
  return at(o.data, g * o.stride + (o.transposed ? row + col * o.ld : row * o.ld + col), t);
}

// Splits what exceeds the library's limits; K in order, accumulating.
void dispatch(const Gemm& g, Device device) {
  for (int64_t b0 = 0; b0 < g.batch; b0 += kMaxBatch)
    for (int64_t i0 = 0; i0 < g.m; i0 += kMaxSide)
      for (int64_t k0 = 0; k0 < g.k; k0 += kMaxSide) {
        Gemm part = g;
        part.batch = std::min(kMaxBatch, g.batch - b0);
        part.m = std::min(kMaxSide, g.m - i0);
        part.k = std::min(kMaxSide, g.k - k0);
        part.a.data = at(g.a, b0, i0, k0, g.operands);
        part.b.data = at(g.b, b0, k0, 0, g.operands);
        part.c.data = at(g.c, b0, i0, 0, g.result);
        part.accumulate |= k0 > 0;
        if (kWithCuda && device.is_cuda())
          gpu::gemm(part, device);
        else
          cpu::gemm(part);
      }
}

// The largest batch dimension goes to the library, the others are walked here.
void dispatch_batches(Gemm g, std::vector<BatchDim> dims, Device device) {
  if (!dims.empty()) {
    const auto most =
        std::max_element(dims.begin(), dims.end(),
                         [](const BatchDim& x, const BatchDim& y) { return x.size < y.size; });
    g.batch = most->size;
    g.a.stride = most->a, g.b.stride = most->b, g.c.stride = most->c;
    dims.erase(most);
  }
  int64_t calls = 1;
  for (const BatchDim& d : dims) calls *= d.size;
  for (int64_t call = 0; call < calls; ++call) {
    Gemm one = g;
    int64_t rest = call;
    for (const BatchDim& d : dims) {
      const int64_t i = rest % d.size;
      rest /= d.size;
      one.a.data = at(one.a.data, i * d.a, g.operands);
      one.b.data = at(one.b.data, i * d.b, g.operands);
      one.c.data = at(one.c.data, i * d.c, g.result);
    }
    dispatch(one, device);
  }
}

int64_t calls_needed(const std::vector<BatchDim>& dims) {
  int64_t calls = 1, most = 1;
  for (const BatchDim& d : dims) calls *= d.size, most = std::max(most, d.size);
  return calls / most;
}

Tensor expand_batch(const Tensor& t, const Tensor& c) {
  Shape shape = c.shape().first(c.dim() - 2);
  shape.push_back(t.size(-2));
  shape.push_back(t.size(-1));
  return t.expand(shape);
}

void check_operands(const Tensor& a, const Tensor& b, const Tensor& c) {
  check(a.dim() >= 2 && b.dim() >= 2 && c.dim() >= 2 && c.dim() >= std::max(a.dim(), b.dim()) &&
            a.size(-1) == b.size(-2) && c.size(-2) == a.size(-2) && c.size(-1) == b.size(-1),
        "{}: product of {} and {} into {}; want [...,m,k], [...,k,n], [...,m,n]", current_op(),
        a.shape(), b.shape(), c.shape());
  check(a.dtype() == b.dtype() &&
            (c.dtype() == a.dtype() || (a.dtype() == DType::bf16 && c.dtype() == DType::f32)),
        "{}: product of {} and {} into {}", current_op(), a.dtype(), b.dtype(), c.dtype());
  const DType other = a.on_cuda() ? DType::bf16 : DType::f64;
  check(a.dtype() == DType::f32 || a.dtype() == other, "{}: no product of {} on {}", current_op(),
        a.dtype(), a.device());
  check(a.device() == b.device() && a.device() == c.device(),
        "{}: product of {} on {} and {} on {} into {}", current_op(), a.shape(), a.device(),
        b.shape(), b.device(), c.device());
}

void multiply(const Tensor& a, const Tensor& b, const Tensor& c, Beta beta) {
  Gemm g{.operands = a.dtype(), .result = c.dtype()};
  g.m = c.size(-2), g.n = c.size(-1), g.k = a.size(-1);
  g.accumulate = beta == Beta::one;
  int64_t row_a = a.stride(-2), row_c = c.stride(-2);
  std::vector<BatchDim> dims = batch_dims(a, b, c);
  fold_rows(dims, a, c, g.m, row_a, row_c);
  if (calls_needed(dims) > kMaxCalls && !(a.is_contiguous() && b.is_contiguous()))
    return multiply(a.contiguous(), b.contiguous(), c, beta);
  const auto operand = [](const Tensor& t, int64_t rows, int64_t cols, int64_t row_stride) {
    const Layout l = layout_of(rows, cols, row_stride, t.stride(-1));
    check(l.usable, "{}: a matrix of {} rows and {} columns is too large", current_op(), rows,
          cols);
    return GemmOperand{t.raw(), l.ld, 0, l.transposed};
  };
  g.a = operand(a, g.m, g.k, row_a);
  g.b = operand(b, g.k, g.n, b.stride(-2));
  g.c = operand(c, g.m, g.n, row_c);
  dispatch_batches(g, dims, c.device());
}

void write_product(const Tensor& a, const Tensor& b, const Tensor& c, Beta beta) {
  if (a.size(-1) == 0) {
    if (beta == Beta::zero) c.zero_();
    return;
  }
  const Layout l = layout_of(c);
  if (l.usable && l.transposed)
    return write_product(b.transpose(-1, -2), a.transpose(-1, -2), c.transpose(-1, -2), beta);
  if (!l.usable) {
    const Tensor dense = beta == Beta::one ? c.clone() : Tensor::empty_like(c);
    write_product(a, b, dense, beta);
    c.copy_(dense);
    return;
  }
  // Inner strides are put right before expanding, so that a broadcast operand is copied once.
  multiply(expand_batch(usable(a), c), expand_batch(usable(b), c), c, beta);
}

}  // namespace

void matmul_into(const Tensor& a, const Tensor& b, const Tensor& c, Beta beta) {
  check_operands(a, b, c);
  if (c.numel() == 0) return;
  c.bump_version();  // before anything is written: read-only memory is refused here
  check(!c.may_overlap_itself(), "{}: product into {} with strides {}, whose elements overlap",
        current_op(), c.shape(), c.strides());
  write_product(a, b, c, beta);
}

Cost gemm_cost(int64_t batch, int64_t m, int64_t n, int64_t k, DType operands, DType result) {
  const double items = double(batch);
  return {items * (double(m * k + k * n) * double(item_size(operands)) +
                   double(m * n) * double(item_size(result))),
          2 * items * double(m) * double(n) * double(k)};
}

}  // namespace ebb
