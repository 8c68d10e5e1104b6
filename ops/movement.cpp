#include "ops/movement.h"

#include <algorithm>

#include "ops/common.h"
#include "ops/reduce.h"

namespace ebb {
namespace {

int wrap(const char* op, int dim, int rank, const Shape& shape) {
  check(dim >= -rank && dim < rank, "{}: dimension {} of x {}", op, dim, shape);
  return dim < 0 ? dim + rank : dim;
}

// One input, one output, nothing saved. back: gradient of y -> gradient of x.
template <class Back>
Var move(const char* op, const Var& x, const Tensor& y, Back back) {
  return record(op, {x}, {}, {y},
                [back](BackwardContext& ctx) { ctx.grad(0, back(ctx.dy(0))); })[0];
}

// dy where x was cut out of a tensor of this shape, 0 elsewhere; each element written once unless
// step skips some.
Tensor embed(const Tensor& dy, const Shape& shape, int dim, int64_t begin, int64_t end,
             int64_t step) {
  if (end - begin == shape[dim] && step == 1) return dy;
  const Tensor dx = Tensor::empty(shape, dy.dtype(), dy.device());
  if (step == 1) {
    dx.slice(dim, 0, begin).zero_();
    dx.slice(dim, end, shape[dim]).zero_();
  } else {
    dx.zero_();
  }
  dx.slice(dim, begin, end, step).copy_(dy);
  return dx;
}

void check_parts(const char* op, const std::vector<Var>& parts) {
  check(!parts.empty(), "{}: nothing to join", op);
  const Tensor& first = parts[0].value();
  for (const Var& p : parts) {
    check_defined(op, "a part", p.value());
    check(p.dtype() == first.dtype(), "{}: parts are {} and {}", op, first.dtype(), p.dtype());
    check_same_device(op, first, {&p.value()});
  }
}

}  // namespace

Var reshape(const Var& x, const Shape& shape) {
  const OpScope scope("reshape");
  check_defined("reshape", "x", x.value());
  return move("reshape", x, x.value().reshape(shape),
              [shape = x.shape()](const Tensor& dy) { return dy.reshape(shape); });
}

Var flatten(const Var& x, int first, int last) {
  const OpScope scope("flatten");
  check_defined("flatten", "x", x.value());
  return move("flatten", x, x.value().flatten(first, last),
              [shape = x.shape()](const Tensor& dy) { return dy.reshape(shape); });
}

Var transpose(const Var& x, int a, int b) {
  const OpScope scope("transpose");
  check_defined("transpose", "x", x.value());
  return move("transpose", x, x.value().transpose(a, b),
              [a, b](const Tensor& dy) { return dy.transpose(a, b); });
}

Var permute(const Var& x, const std::vector<int>& order) {
  const OpScope scope("permute");
  check_defined("permute", "x", x.value());
  const Tensor y = x.value().permute(order);
  std::vector<int> inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i)
    inverse[size_t(order[i] < 0 ? order[i] + x.dim() : order[i])] = int(i);
  return move("permute", x, y, [inverse](const Tensor& dy) { return dy.permute(inverse); });
}

Var unsqueeze(const Var& x, int dim) {
  const OpScope scope("unsqueeze");
  check_defined("unsqueeze", "x", x.value());
  return move("unsqueeze", x, x.value().unsqueeze(dim),
              [dim](const Tensor& dy) { return dy.squeeze(dim); });
}

Var squeeze(const Var& x, int dim) {
  const OpScope scope("squeeze");
  check_defined("squeeze", "x", x.value());
  return move("squeeze", x, x.value().squeeze(dim),
              [shape = x.shape()](const Tensor& dy) { return dy.reshape(shape); });
}

Var select(const Var& x, int dim, int64_t index) {
  const OpScope scope("select");
  check_defined("select", "x", x.value());
  dim = wrap("select", dim, x.dim(), x.shape());
  return move("select", x, x.value().select(dim, index),
              [dim, index, shape = x.shape()](const Tensor& dy) {
                return embed(dy.unsqueeze(dim), shape, dim, index, index + 1, 1);
              });
}

Var slice(const Var& x, int dim, int64_t begin, int64_t end, int64_t step) {
  const OpScope scope("slice");
  check_defined("slice", "x", x.value());
  dim = wrap("slice", dim, x.dim(), x.shape());
  return move("slice", x, x.value().slice(dim, begin, end, step),
              [dim, begin, end, step, shape = x.shape()](const Tensor& dy) {
                return embed(dy, shape, dim, begin, end, step);
              });
}

Var expand(const Var& x, const Shape& shape) {
  const OpScope scope("expand");
  check_defined("expand", "x", x.value());
  return move("expand", x, x.value().expand(shape),
              [to = x.shape()](const Tensor& dy) { return sum_to(dy, to); });
}

namespace {

// The gradients of split's parts, where their operator has written them side by side into one
// buffer: a view of it. Else undefined.
Tensor joined_gradients(const BackwardContext& ctx, int dim, const std::vector<int64_t>& sizes,
                        const Shape& shape, DType dtype) {
  Tensor first;
  int64_t at = 0;
  Shape strides = shape;  // dense ones
  int64_t dense = 1;
  for (int d = shape.size() - 1; d >= 0; --d) strides[d] = dense, dense *= shape[d];
  for (size_t i = 0; i < sizes.size(); at += sizes[i++]) {
    if (!ctx.has_dy(int(i))) return {};
    const Tensor piece = ctx.dy(int(i));
    if (i == 0) first = piece;
    bool fits = piece.dtype() == dtype && piece.storage() == first.storage() &&
                piece.offset() == first.offset() + at * strides[dim];
    for (int d = 0; d < shape.size(); ++d)
      fits = fits && (piece.size(d) == 1 || piece.stride(d) == strides[d]);
    if (!fits || piece.numel() == 0) return {};
  }
  return Tensor::wrap(first.storage(), dtype, shape, strides, first.offset());
}

}  // namespace

std::vector<Var> split(const Var& x, int dim, const std::vector<int64_t>& sizes) {
  const OpScope scope("split");
  check_defined("split", "x", x.value());
  dim = wrap("split", dim, x.dim(), x.shape());
  std::vector<Tensor> parts;
  int64_t at = 0;
  for (int64_t n : sizes) {
    check(n >= 0 && n <= x.size(dim) - at, "split: parts [{}] of dimension {} of x {}",
          fmt::join(sizes, ","), dim, x.shape());
    parts.push_back(x.value().slice(dim, at, at + n));
    at += n;
  }
  check(at == x.size(dim) && !sizes.empty(), "split: parts [{}] of dimension {} of x {}",
        fmt::join(sizes, ","), dim, x.shape());
  return record("split", {x}, {}, std::move(parts),
                [dim, sizes, shape = x.shape(), dtype = x.dtype(),
                 device = x.device()](BackwardContext& ctx) {
                  if (const Tensor dx = joined_gradients(ctx, dim, sizes, shape, dtype))
                    return ctx.grad(0, dx);
                  const Tensor dx = Tensor::empty(shape, dtype, device);
                  int64_t at = 0;
                  for (size_t i = 0; i < sizes.size(); ++i) {
                    const Tensor piece = dx.slice(dim, at, at + sizes[i]);
                    if (ctx.has_dy(int(i)))
                      piece.copy_(ctx.dy(int(i)));
                    else
                      piece.zero_();
                    at += sizes[i];
                  }
                  ctx.grad(0, dx);
                });
}

std::vector<Var> split(const Var& x, int dim, int64_t parts) {
  check_defined("split", "x", x.value());
  dim = wrap("split", dim, x.dim(), x.shape());
  check(parts > 0 && x.size(dim) % parts == 0, "split: dimension {} of x {} into {} parts", dim,
        x.shape(), parts);
  return split(x, dim, std::vector<int64_t>(size_t(parts), x.size(dim) / parts));
}

Var contiguous(const Var& x) {
  const OpScope scope("contiguous");
  check_defined("contiguous", "x", x.value());
  if (x.value().is_contiguous()) return x;
  return move("contiguous", x, x.value().contiguous(), [](const Tensor& dy) { return dy; });
}

Var concat(const std::vector<Var>& parts, int dim) {
  const OpScope scope("concat");
  check_parts("concat", parts);
  dim = wrap("concat", dim, parts[0].dim(), parts[0].shape());
  Shape shape = parts[0].shape();
  shape[dim] = 0;
  std::vector<int64_t> sizes;
  for (const Var& p : parts) {
    Shape rest = p.shape();
    if (rest.size() > dim) rest[dim] = parts[0].size(dim);
    check(rest == parts[0].shape(), "concat: parts {} and {} differ outside dimension {}",
          parts[0].shape(), p.shape(), dim);
    sizes.push_back(p.size(dim));
    check(!__builtin_add_overflow(shape[dim], p.size(dim), &shape[dim]),
          "concat: the parts overflow 64-bit sizes");
  }
  const Tensor y = Tensor::empty(shape, parts[0].dtype(), parts[0].device());
  int64_t at = 0;
  for (size_t i = 0; i < parts.size(); at += sizes[i++])
    y.slice(dim, at, at + sizes[i]).copy_(parts[i].value());
  return record("concat", parts, {}, {y}, [dim, sizes](BackwardContext& ctx) {
    const Tensor dy = ctx.dy(0);
    int64_t at = 0;
    for (size_t i = 0; i < sizes.size(); at += sizes[i++])
      if (ctx.needs(int(i))) ctx.grad(int(i), dy.slice(dim, at, at + sizes[i]));
  })[0];
}

Var stack(const std::vector<Var>& parts, int dim) {
  const OpScope scope("stack");
  check_parts("stack", parts);
  dim = wrap("stack", dim, parts[0].dim() + 1, parts[0].shape());
  Shape shape = parts[0].shape();
  for (const Var& p : parts) check(p.shape() == shape, "stack: parts {} and {}", shape, p.shape());
  shape.insert(dim, int64_t(parts.size()));
  const Tensor y = Tensor::empty(shape, parts[0].dtype(), parts[0].device());
  for (size_t i = 0; i < parts.size(); ++i) y.select(dim, int64_t(i)).copy_(parts[i].value());
  return record("stack", parts, {}, {y}, [dim](BackwardContext& ctx) {
    const Tensor dy = ctx.dy(0);
    for (int i = 0; i < ctx.inputs(); ++i)
      if (ctx.needs(i)) ctx.grad(i, dy.select(dim, i));
  })[0];
}

Var pad(const Var& x, int dim, int64_t before, int64_t after, double value) {
  const OpScope scope("pad");
  check_defined("pad", "x", x.value());
  dim = wrap("pad", dim, x.dim(), x.shape());
  check(before >= 0 && after >= 0, "pad: {} before and {} after", before, after);
  const int64_t n = x.size(dim);
  Shape shape = x.shape();
  check(!__builtin_add_overflow(before, n, &shape[dim]) &&
            !__builtin_add_overflow(shape[dim], after, &shape[dim]),
        "pad: {} before and {} after x {} overflow 64-bit sizes", before, after, x.shape());
  const Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  y.slice(dim, 0, before).fill_(value);
  y.slice(dim, before + n, before + n + after).fill_(value);
  y.slice(dim, before, before + n).copy_(x.value());
  return move("pad", x, y,
              [dim, before, n](const Tensor& dy) { return dy.slice(dim, before, before + n); });
}

Var repeat_interleave(const Var& x, int dim, int64_t n) {
  const OpScope scope("repeat_interleave");
  check_defined("repeat_interleave", "x", x.value());
  dim = wrap("repeat_interleave", dim, x.dim(), x.shape());
  check(n >= 1, "repeat_interleave: {} repeats", n);
  Shape apart = x.shape(), joined = x.shape();
  apart.insert(dim + 1, n);
  check(!__builtin_mul_overflow(joined[dim], n, &joined[dim]),
        "repeat_interleave: x {} and {} repeats overflow 64-bit sizes", x.shape(), n);
  const Tensor y = x.value().unsqueeze(dim + 1).expand(apart).reshape(joined);
  return move("repeat_interleave", x, y, [apart, dim, shape = x.shape()](const Tensor& dy) {
    Shape one = apart;
    one[dim + 1] = 1;
    return sum_to(dy.reshape(apart), one).reshape(shape);
  });
}

Var cast(const Var& x, DType dtype) {
  const OpScope scope("cast");
  check_defined("cast", "x", x.value());
  if (x.dtype() == dtype) return x;
  return move("cast", x, x.value().to(dtype),
              [t = x.dtype()](const Tensor& dy) { return dy.to(t); });
}

Var to_device(const Var& x, Device device) {
  const OpScope scope("to_device");
  check_defined("to_device", "x", x.value());
  if (x.device() == device) return x;
  return move("to_device", x, x.value().to(device),
              [d = x.device()](const Tensor& dy) { return dy.to(d); });
}

Cost movement_cost(int64_t elements, DType from, DType to) {
  return {double(elements) * double(item_size(from) + item_size(to)), 0};
}

}  // namespace ebb
