#include "ops/attention.h"

#include <cmath>

#include "ops/common.h"

namespace ebb {
namespace {

constexpr const char* kOp = "attention";

// Everything about q, k, v that does not depend on which dimensions lead.
void check_heads(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, int dims) {
  check_defined(op, "q", q);
  check_defined(op, "k", k);
  check_defined(op, "v", v);
  check_compute_dtype(op, "q", q);
  check(q.dim() == dims, "{}: q is {}, want {} dimensions", op, q.shape(), dims);
  check(k.dim() == dims && k.size(0) == q.size(0) && k.size(-1) == q.size(-1),
        "{}: k is {}, q is {}; want the same batch and head size", op, k.shape(), q.shape());
  check(v.shape() == k.shape(), "{}: v is {}, want {} as k", op, v.shape(), k.shape());
  check(k.dtype() == q.dtype() && v.dtype() == q.dtype(), "{}: q is {}, k {}, v {}; want one dtype",
        op, q.dtype(), k.dtype(), v.dtype());
  const int64_t heads = q.size(-2), key_heads = k.size(-2);
  check(heads >= 1 && key_heads >= 1 && heads % key_heads == 0,
        "{}: {} heads over {} key/value heads; want a multiple", op, heads, key_heads);
  check(q.size(-1) >= 1 && q.size(-1) <= 256, "{}: head size is {}, want 1...256", op, q.size(-1));
  check_same_device(op, q, {&k, &v});
}

double scale_of(double scale, int64_t head_dim) {
  return scale != 0 ? scale : 1 / std::sqrt(double(head_dim));
}

void check_layouts(AttentionProblem* p, const AttentionOptions& options) {
  const Device device = p->q.device();
  p->layout = options.layout;
  p->key_layout = options.key_layout.is_packed() ? options.key_layout : options.layout;
  p->layout.check_covers(kOp, p->batch(), p->time(), device);
  p->key_layout.check_covers(kOp, p->batch(), p->key_time(), device);
  check(p->layout.is_packed() == p->key_layout.is_packed(),
        "{}: the keys are packed, the queries are not", kOp);
  const int64_t n = p->sequences();
  check(p->key_layout.count(p->batch()) == n, "{}: {} sequences of queries, {} of keys", kOp, n,
        p->key_layout.count(p->batch()));
  for (int64_t i = 0; i < (p->layout.is_packed() ? n : std::min<int64_t>(n, 1)); ++i) {
    const int64_t queries = p->layout.end(i, p->time()) - p->layout.begin(i, p->time());
    const int64_t keys =
        p->key_layout.end(i, p->key_time()) - p->key_layout.begin(i, p->key_time());
    check(queries <= keys, "{}: sequence {} has {} queries and {} keys; want at least as many keys",
          kOp, i, queries, keys);
  }
}

// Saved: q, k, v, o, lse.
void backward_pass(BackwardContext& ctx, AttentionProblem p) {
  p.q = ctx.saved(0), p.k = ctx.saved(1), p.v = ctx.saved(2);
  const auto wanted = [&](int i, const Tensor& like) {
    return ctx.needs(i) ? Tensor::empty_like(like) : Tensor();
  };
  const AttentionGradients grads{wanted(0, p.q), wanted(1, p.k), wanted(2, p.v)};
  const Tensor d_o = ctx.dy(0).contiguous();
  if (kWithCuda && d_o.on_cuda())
    gpu::attention_bwd(p, ctx.saved(3), ctx.saved(4), d_o, grads);
  else
    cpu::attention_bwd(p, ctx.saved(3), ctx.saved(4), d_o, grads);
  if (grads.dq) ctx.grad(0, grads.dq);
  if (grads.dk) ctx.grad(1, grads.dk);
  if (grads.dv) ctx.grad(2, grads.dv);
}

}  // namespace

Attention attention(const Var& q, const Var& k, const Var& v, const AttentionOptions& options) {
  const OpScope scope(kOp);
  check_heads(kOp, q.value(), k.value(), v.value(), 4);
  check(options.window >= 0, "{}: window is {}, want at least 1, or 0 for none", kOp,
        options.window);
  AttentionProblem p{.q = q.value().contiguous(),
                     .k = k.value().contiguous(),
                     .v = v.value().contiguous(),
                     .scale = scale_of(options.scale, q.size(-1)),
                     .window = options.window};
  check_layouts(&p, options);
  const Tensor o = Tensor::empty_like(p.q);
  const Tensor lse =
      Tensor::empty(p.q.shape().first(3), accumulate_type(p.q.dtype()), p.q.device());
  if (kWithCuda && o.on_cuda())
    gpu::attention_fwd(p, o, lse);
  else
    cpu::attention_fwd(p, o, lse);
  AttentionProblem sizes;  // what backward captures: the problem without its tensors
  sizes.scale = p.scale, sizes.window = p.window;
  sizes.layout = p.layout, sizes.key_layout = p.key_layout;
  const Var out = record(kOp, {q, k, v}, {p.q, p.k, p.v, o, lse}, {o},
                         [sizes](BackwardContext& ctx) { backward_pass(ctx, sizes); })[0];
  return {out, lse};
}

Tensor attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& position, const AttentionStep& options) {
  constexpr const char* op = "attention_step";
  const OpScope scope(op);
  check_heads(op, q, k, v, 3);
  for (const auto& [name, t] : {std::pair{"k_cache", &k_cache}, std::pair{"v_cache", &v_cache}}) {
    check_defined(op, name, *t);
    check(t->dim() == 4 && t->size(0) == q.size(0) && t->size(1) >= 1 && t->size(2) == k.size(1) &&
              t->size(3) == k.size(2) && t->dtype() == q.dtype(),
          "{}: {} is {} {}, want [{},C,{},{}] {}", op, name, t->shape(), t->dtype(), q.size(0),
          k.size(1), k.size(2), q.dtype());
    check(t->is_contiguous(), "{}: {} {} is updated in place and must be dense", op, name,
          t->shape());
  }
  check(k_cache.shape() == v_cache.shape(), "{}: k_cache is {}, v_cache {}", op, k_cache.shape(),
        v_cache.shape());
  check_shape(op, "position", position, {q.size(0)});
  check(position.dtype() == DType::i64, "{}: position is {}, want i64", op, position.dtype());
  check(options.window >= 0, "{}: window is {}, want at least 1, or 0 for none", op,
        options.window);
  check_same_device(op, q, {&k_cache, &v_cache, &position});
  const Tensor o = Tensor::empty(q.shape(), q.dtype(), q.device());
  k_cache.bump_version();
  v_cache.bump_version();
  const double scale = scale_of(options.scale, q.size(-1));
  const Tensor in[] = {q.contiguous(), k.contiguous(), v.contiguous(), position.contiguous()};
  if (kWithCuda && q.on_cuda())
    gpu::attention_step(in[0], in[1], in[2], k_cache, v_cache, in[3], scale, options.window, o);
  else
    cpu::attention_step(in[0], in[1], in[2], k_cache, v_cache, in[3], scale, options.window, o);
  return o;
}

Cost attention_cost(Pass pass, const AttentionSize& s, DType dtype) {
  const double t = double(s.time), w = s.window > 0 ? std::min(double(s.window), t) : t;
  const double pairs = double(s.batch * s.heads) * (t * w - w * (w - 1) / 2);
  const double p = double(s.head_dim), item = double(item_size(dtype));
  const double queries = double(s.batch * s.heads) * t * p * item;
  const double keys = double(s.batch * s.key_heads) * t * p * item;
  const double lse = double(s.batch * s.heads) * t * double(item_size(accumulate_type(dtype)));
  if (pass == Pass::forward) return {2 * queries + 2 * keys + lse, 4 * pairs * p};
  return {4 * queries + 4 * keys + lse, 10 * pairs * p};
}

Cost attention_step_cost(const AttentionSize& s, DType dtype) {
  const double t = double(s.window > 0 ? std::min(s.window, s.time) : s.time);
  const double p = double(s.head_dim), item = double(item_size(dtype)), n = double(s.batch);
  return {n * (2 * t * double(s.key_heads) + 2 * double(s.heads)) * p * item,
          4 * n * double(s.heads) * t * p};
}

}  // namespace ebb
