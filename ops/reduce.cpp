#include "ops/reduce.h"

#include <algorithm>

#include "ops/common.h"
#include "ops/elementwise.h"
#include "ops/indexing.h"
#include "ops/map.h"
#include "ops/movement.h"

namespace ebb {

Dims Dims::all() {
  Dims d{};
  d.all_ = true;
  return d;
}

unsigned Dims::mask(const char* op, const Shape& shape) const {
  if (all_) return (1u << shape.size()) - 1;
  unsigned mask = 0;
  for (int d : list_) {
    check(d >= -shape.size() && d < shape.size(), "{}: dimension {} of x {}", op, d, shape);
    const unsigned bit = 1u << (d < 0 ? d + shape.size() : d);
    check(!(mask & bit), "{}: dimension {} of x {} is named twice", op, d, shape);
    mask |= bit;
  }
  return mask;
}

namespace {

bool reduced(unsigned mask, int d) { return mask >> d & 1u; }

Shape result_shape(const Shape& x, unsigned mask, KeepDim keep) {
  Shape s;
  for (int d = 0; d < x.size(); ++d) {
    if (!reduced(mask, d))
      s.push_back(x[d]);
    else if (keep == KeepDim::yes)
      s.push_back(1);
  }
  return s;
}

int64_t reduced_size(const Shape& x, unsigned mask) {
  int64_t n = 1;
  for (int d = 0; d < x.size(); ++d)
    if (reduced(mask, d)) n *= x[d];
  return n;
}

// Neighbouring dimensions of one kind as one; those of size 1 left out.
struct Group {
  int64_t size;
  bool reduced;
};
std::vector<Group> groups_of(const Shape& x, unsigned mask) {
  std::vector<Group> out;
  for (int d = 0; d < x.size(); ++d) {
    if (x[d] == 1) continue;
    if (!out.empty() && out.back().reduced == reduced(mask, d))
      out.back().size *= x[d];
    else
      out.push_back({x[d], reduced(mask, d)});
  }
  return out;
}

// x as dense [outer,n,inner] with one reduced run: as it lies if that is its form already, else
// with the reduced dimensions moved to the end.
struct Arranged {
  Tensor x;
  ReduceShape shape;
  std::vector<int> order;  // of x's dimensions; empty: as they were
};
Arranged arrange(const Tensor& x, unsigned mask) {
  Arranged a;
  const std::vector<Group> groups = groups_of(x.shape(), mask);
  const auto runs = std::count_if(groups.begin(), groups.end(), [](Group g) { return g.reduced; });
  if (runs > 1) {
    for (const bool last : {false, true})
      for (int d = 0; d < x.dim(); ++d)
        if (reduced(mask, d) == last) a.order.push_back(d);
    a.x = x.permute(a.order).contiguous();
    a.shape.n = reduced_size(x.shape(), mask);
    a.shape.outer = a.shape.n ? x.numel() / a.shape.n : result_shape(x.shape(), mask, {}).numel();
    return a;
  }
  a.x = x.contiguous();
  bool seen = false;
  for (const Group& g : groups) {
    (g.reduced ? a.shape.n : seen ? a.shape.inner : a.shape.outer) *= g.size;
    seen |= g.reduced;
  }
  return a;
}

void run_sum(const Tensor& x, const Tensor& factor, ReduceShape s, double divisor,
             const Tensor& y) {
  if (y.numel() == 0) return;
  if (kWithCuda && x.on_cuda())
    gpu::sum(x, factor, s, divisor, y);
  else
    cpu::sum(x, factor, s, divisor, y);
}

}  // namespace

Tensor sum_over(const Tensor& x, unsigned mask, DType out, double divisor, const Tensor& factor) {
  const Shape shape = result_shape(x.shape(), mask, KeepDim::yes);
  const Tensor y = Tensor::empty(shape, out, x.device());
  if (x.numel() == 0) {
    y.fill_(0 / divisor);
    return y;
  }
  std::vector<Group> groups = groups_of(x.shape(), mask);
  Tensor from = x.contiguous(), f = factor ? factor.contiguous() : Tensor();
  // One reduced run per pass, the innermost first: it is the one that shrinks x fastest.
  for (bool done = false; !done;) {
    int at = int(groups.size()) - 1;
    while (at >= 0 && !groups[size_t(at)].reduced) --at;
    ReduceShape s;
    for (int g = 0; g < int(groups.size()); ++g)
      (g < at ? s.outer : g == at ? s.n : s.inner) *= groups[size_t(g)].size;
    if (at >= 0) groups.erase(groups.begin() + at);
    done = std::none_of(groups.begin(), groups.end(), [](Group g) { return g.reduced; });
    const Tensor to =
        done ? y : Tensor::empty({s.outer * s.inner}, accumulate_type(x.dtype()), x.device());
    run_sum(from, f, s, done ? divisor : 1, to);
    from = to;
    f = Tensor();
  }
  return y;
}

Tensor sum_to(const Tensor& x, const Shape& shape, const Tensor& factor) {
  const int lead = x.dim() - shape.size();
  unsigned mask = 0;
  for (int d = 0; d < x.dim(); ++d)
    if (d < lead || (shape[d - lead] == 1 && x.size(d) != 1)) mask |= 1u << d;
  if (!factor && reduced_size(x.shape(), mask) == 1) return x.reshape(shape);
  return sum_over(x, mask, accumulate_type(x.dtype()), 1, factor).reshape(shape);
}

Tensor expand_reduced(const Tensor& y, const Shape& x, unsigned mask) {
  return y.reshape(result_shape(x, mask, KeepDim::yes)).expand(x);
}

namespace {

// Checks x and hands back the mask.
unsigned prepare(const char* op, const Var& x, const Dims& dims) {
  check_float(op, "x", x.value());
  return dims.mask(op, x.shape());
}

Var scaled_sum(const char* op, const Var& x, const Dims& dims, KeepDim keep, bool average) {
  const OpScope scope(op);
  const unsigned mask = prepare(op, x, dims);
  const double divisor = average ? double(reduced_size(x.shape(), mask)) : 1;
  const Tensor y = sum_over(x.value(), mask, x.dtype(), divisor);
  return record(op, {x}, {}, {y.reshape(result_shape(x.shape(), mask, keep))},
                [mask, divisor, shape = x.shape()](BackwardContext& ctx) {
                  Tensor dy = ctx.dy(0);
                  if (divisor != 1) dy = map({MapOp::div_scalar, divisor}, dy.dtype(), dy);
                  ctx.grad(0, expand_reduced(dy, shape, mask));
                })[0];
}

struct Extreme {
  Tensor value, index;  // the result's shape
  Arranged arranged;
};
Extreme extreme(const char* op, const Tensor& x, unsigned mask, KeepDim keep, bool negate,
                bool want_value, bool want_index) {
  const Shape shape = result_shape(x.shape(), mask, keep);
  check(shape.numel() == 0 || reduced_size(x.shape(), mask) > 0, "{}: of no elements: x is {}", op,
        x.shape());
  Extreme e;
  if (want_value) e.value = Tensor::empty(shape, x.dtype(), x.device());
  if (want_index) e.index = Tensor::empty(shape, DType::i64, x.device());
  e.arranged = arrange(x, mask);
  if (shape.numel() == 0) return e;
  if (kWithCuda && x.on_cuda())
    gpu::max(e.arranged.x, e.arranged.shape, negate, e.value, e.index);
  else
    cpu::max(e.arranged.x, e.arranged.shape, negate, e.value, e.index);
  return e;
}

// dy scattered to the positions of the extremes.
Tensor extreme_gradient(const Tensor& dy, const Tensor& index, const Shape& x, const ReduceShape& s,
                        const std::vector<int>& order) {
  Shape arranged = x;
  for (size_t i = 0; i < order.size(); ++i) arranged[int(i)] = x[order[i]];
  const Tensor dx = Tensor::zeros(arranged, accumulate_type(dy.dtype()), dy.device());
  if (dx.numel()) {
    const Tensor dense = dy.contiguous();
    if (kWithCuda && dx.on_cuda())
      gpu::gather_bwd(dense, index, {s.outer, s.n, 1, s.inner}, dx);
    else
      cpu::gather_bwd(dense, index, {s.outer, s.n, 1, s.inner}, dx);
  }
  if (order.empty()) return dx;
  std::vector<int> inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) inverse[size_t(order[i])] = int(i);
  return dx.permute(inverse);
}

Var extreme(const char* op, const Var& x, const Dims& dims, KeepDim keep, bool negate) {
  const OpScope scope(op);
  const unsigned mask = prepare(op, x, dims);
  const Extreme e = extreme(op, x.value(), mask, keep, negate, true, will_record({x}));
  return record(
      op, {x}, {e.index}, {e.value},
      [shape = x.shape(), s = e.arranged.shape, order = e.arranged.order](BackwardContext& ctx) {
        ctx.grad(0, extreme_gradient(ctx.dy(0), ctx.saved(0), shape, s, order));
      })[0];
}

Tensor position(const char* op, const Var& x, const Dims& dims, KeepDim keep, bool negate) {
  const OpScope scope(op);
  return extreme(op, x.value(), prepare(op, x, dims), keep, negate, false, true).index;
}

}  // namespace

Var sum(const Var& x, const Dims& dims, KeepDim keep) {
  return scaled_sum("sum", x, dims, keep, false);
}
Var mean(const Var& x, const Dims& dims, KeepDim keep) {
  return scaled_sum("mean", x, dims, keep, true);
}
Var max(const Var& x, const Dims& dims, KeepDim keep) {
  return extreme("max", x, dims, keep, false);
}
Var min(const Var& x, const Dims& dims, KeepDim keep) {
  return extreme("min", x, dims, keep, true);
}
Tensor argmax(const Var& x, const Dims& dims, KeepDim keep) {
  return position("argmax", x, dims, keep, false);
}
Tensor argmin(const Var& x, const Dims& dims, KeepDim keep) {
  return position("argmin", x, dims, keep, true);
}

Var norm2(const Var& x, const Dims& dims, KeepDim keep) {
  const OpScope scope("norm2");
  const unsigned mask = prepare("norm2", x, dims);
  const DType wide = accumulate_type(x.dtype());
  const Tensor y = map({MapOp::sqrt}, wide, sum_over(x.value(), mask, wide, 1, x.value()))
                       .reshape(result_shape(x.shape(), mask, keep));
  return record("norm2", {x}, {x.value(), y}, {y.to(x.dtype())}, [mask](BackwardContext& ctx) {
    const Tensor& x = ctx.saved(0);
    const Tensor dy = expand_reduced(ctx.dy(0), x.shape(), mask);
    ctx.grad(0, map({MapOp::norm_grad}, x.dtype(), dy, x,
                    expand_reduced(ctx.saved(1), x.shape(), mask)));
  })[0];
}

Var variance(const Var& x, const Dims& dims, int64_t correction, KeepDim keep) {
  const OpScope scope("variance");
  const double n = double(reduced_size(x.shape(), prepare("variance", x, dims)));
  const Var wide = cast(x, accumulate_type(x.dtype()));
  const Var apart = sub(wide, mean(wide, dims, KeepDim::yes));
  return cast(div(sum(square(apart), dims, keep), std::max(0., n - double(correction))), x.dtype());
}

Var logsumexp(const Var& x, const Dims& dims, KeepDim keep) {
  const OpScope scope("logsumexp");
  const unsigned mask = prepare("logsumexp", x, dims);
  // Unrounded for backward: an error in y is a relative error of exp(x − y).
  const Tensor y =
      Tensor::empty(result_shape(x.shape(), mask, keep), accumulate_type(x.dtype()), x.device());
  if (x.numel() == 0) {
    y.fill_(-INFINITY);
  } else {
    const Arranged a = arrange(x.value(), mask);
    if (kWithCuda && x.on_cuda())
      gpu::logsumexp(a.x, a.shape, y);
    else
      cpu::logsumexp(a.x, a.shape, y);
  }
  return record("logsumexp", {x}, {x.value(), y}, {y.to(x.dtype())}, [mask](BackwardContext& ctx) {
    const Tensor& x = ctx.saved(0);
    const Tensor dy = expand_reduced(ctx.dy(0), x.shape(), mask);
    ctx.grad(0, map({MapOp::logsumexp_grad}, x.dtype(), dy, x,
                    expand_reduced(ctx.saved(1), x.shape(), mask)));
  })[0];
}

Cost reduce_cost(Pass pass, const Shape& x, DType dtype, int64_t results) {
  const double n = double(x.numel()), item = double(item_size(dtype));
  // Backward of sum and mean reads the result's gradient and writes x's.
  return pass == Pass::forward ? Cost{(n + double(results)) * item, n}
                               : Cost{(n + double(results)) * item, 0};
}

}  // namespace ebb
