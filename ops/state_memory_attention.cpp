#include "ops/state_memory_attention.h"

#include <cmath>

#include "ops/common.h"

namespace ebb {
namespace {

constexpr const char* kOp = "state_memory_attention";

// t is [B,T,*,width] with a divisor of H as *; width 0: [B,T,*].
void check_vector(const char* what, const Tensor& t, const Tensor& q, int64_t heads,
                  int64_t width) {
  check_defined(kOp, what, t);
  check(t.dtype() == q.dtype(), "{}: {} is {}, q {}; want one dtype", kOp, what, t.dtype(),
        q.dtype());
  const int dims = width ? 4 : 3;
  const std::string want = width ? fmt::format("[{},{},*,{}]", q.size(0), q.size(1), width)
                                 : fmt::format("[{},{},*]", q.size(0), q.size(1));
  check(t.dim() == dims && t.shape().first(2) == q.shape().first(2) &&
            (!width || t.size(3) == width) && t.size(2) >= 1 && heads % t.size(2) == 0,
        "{}: {} is {}, want {} with a divisor of {} heads as *", kOp, what, t.shape(), want, heads);
}

void check_sizes(const Tensor& q, const Tensor& memories, int64_t chunk,
                 const StateMemoryOptions& options) {
  check(q.dim() == 4, "{}: q is {}, want [B,T,*,N]", kOp, q.shape());
  check(chunk >= 1 && chunk < (1 << 30), "{}: memory_chunk is {}, want 1...2^30", kOp, chunk);
  options.layout.check_covers(kOp, q.size(0), q.size(1), q.device());
  const int64_t runs = options.layout.chunk_count(q.size(0), q.size(1), chunk);
  check(memories.dim() == 4 && memories.size(0) == runs,
        "{}: contributions is {}, want [{},H,N,P]: a run of {} tokens each", kOp, memories.shape(),
        runs, chunk);
  check(memories.size(1) >= 1, "{}: contributions is {}, want at least one head", kOp,
        memories.shape());
  for (const auto& [name, size] :
       {std::pair{"N", memories.size(2)}, std::pair{"P", memories.size(3)}})
    check(size >= 1 && size <= 256, "{}: size {} is {}, want 1...256", kOp, name, size);
  check(options.eps > 0 && options.eps_row > 0, "{}: eps is {}, eps_row {}; want more than 0", kOp,
        options.eps, options.eps_row);
  check(std::isfinite(options.scale) && options.scale >= 0,
        "{}: scale is {}, want more than 0, or 0 for 1/sqrt(N)", kOp, options.scale);
}

StateMemoryProblem checked(const Tensor& q, const Tensor& e, const Tensor& c,
                           const Tensor& memories, int64_t chunk,
                           const StateMemoryOptions& options) {
  check_defined(kOp, "q", q);
  check_defined(kOp, "contributions", memories);
  check_compute_dtype(kOp, "q", q);
  check_sizes(q, memories, chunk, options);
  check(
      memories.dtype() == q.dtype() || (memories.dtype() == DType::f32 && q.dtype() == DType::bf16),
      "{}: contributions is {}, q {}; want one dtype, or f32 beside bf16", kOp, memories.dtype(),
      q.dtype());
  const int64_t heads = memories.size(1), N = memories.size(2), P = memories.size(3);
  check_vector("q", q, q, heads, N);
  check_vector("e", e, q, heads, P);
  check_vector("c", c, q, heads, N);
  const Tensor &gate = options.gate.value(), &base = options.base.value();
  if (gate) check_vector("gate", gate, q, heads, 0);
  if (base) {
    check_shape(kOp, "base", base, {q.size(0), q.size(1), heads, P});
    check(base.dtype() == q.dtype(), "{}: base is {}, q {}; want one dtype", kOp, base.dtype(),
          q.dtype());
  }
  check_same_device(kOp, q, {&e, &c, &memories, &gate, &base});
  return {.q = q.contiguous(),
          .e = e.contiguous(),
          .c = c.contiguous(),
          .memories = memories.contiguous(),
          .gate = gate ? gate.contiguous() : Tensor(),
          .base = base ? base.contiguous() : Tensor(),
          .scale = options.scale > 0 ? options.scale : 1 / std::sqrt(double(N)),
          .eps = options.eps,
          .eps_row = options.eps_row,
          .normalize = options.normalize,
          .memory_chunk = chunk,
          .layout = options.layout};
}

// Inputs q, e, c, contributions, gate, base; saved: q, e, c, contributions or what the forward pass
// has prepared in their stead, gate, r, lse.
void backward_pass(BackwardContext& ctx, StateMemoryProblem p, DType memory_type) {
  p.q = ctx.saved(0), p.e = ctx.saved(1), p.c = ctx.saved(2), p.memories = ctx.saved(3);
  p.gate = ctx.saved(4), p.prepared = ctx.saved(7);
  const auto wanted = [&](int i, const Tensor& like) {
    return ctx.needs(i) ? Tensor::empty_like(like) : Tensor();
  };
  const Shape memories = {p.memory_count(), p.heads(), p.state_dim(), p.value_dim()};
  const StateMemoryGradients grads{
      .dq = wanted(0, p.q),
      .de = wanted(1, p.e),
      .dc = wanted(2, p.c),
      .dmemories = ctx.needs(3) ? Tensor::empty(memories, memory_type, p.q.device()) : Tensor(),
      .dgate = wanted(4, p.gate)};
  const Tensor* all[] = {&grads.dq, &grads.de, &grads.dc, &grads.dmemories, &grads.dgate};
  bool any = false;
  for (const Tensor* t : all) any = any || t->defined();
  const Tensor dy = ctx.dy(0).contiguous();
  if (any && kWithCuda && dy.on_cuda())
    gpu::state_memory_attention_bwd(p, ctx.saved(5), ctx.saved(6), dy, grads);
  else if (any)
    cpu::state_memory_attention_bwd(p, ctx.saved(5), ctx.saved(6), dy, grads);
  for (int i = 0; i < 5; ++i)
    if (*all[i]) ctx.grad(i, *all[i]);
  if (ctx.needs(5)) ctx.grad(5, dy);
}

}  // namespace

StateMemoryAttention state_memory_attention(const Var& q, const Var& e, const Var& c,
                                            const Var& contributions, int64_t memory_chunk,
                                            const StateMemoryOptions& options) {
  const OpScope scope(kOp);
  const StateMemoryProblem p =
      checked(q.value(), e.value(), c.value(), contributions.value(), memory_chunk, options);
  const Shape tokens = {p.batch(), p.time(), p.heads()};
  Shape rows = tokens;
  rows.push_back(p.value_dim());
  const DType wide = accumulate_type(p.q.dtype());
  const Tensor r = Tensor::empty(rows, wide, p.q.device());
  const Tensor lse = Tensor::empty(tokens, wide, p.q.device());
  const bool same = !p.gate && !p.base && p.q.dtype() == wide;
  const Tensor o = same ? Tensor() : Tensor::empty(rows, p.q.dtype(), p.q.device());
  Tensor prepared;
  if (kWithCuda && r.on_cuda())
    prepared = gpu::state_memory_attention_fwd(p, o, r, lse);
  else
    cpu::state_memory_attention_fwd(p, o, r, lse);
  StateMemoryProblem sizes = p;  // what backward captures: the problem without its tensors
  sizes.q = sizes.e = sizes.c = sizes.memories = sizes.gate = sizes.base = {};
  const Tensor memories = prepared ? Tensor() : p.memories;
  const std::vector<Var> out =
      record(kOp, {q, e, c, contributions, options.gate, options.base},
             {p.q, p.e, p.c, memories, p.gate, r, lse, prepared}, {o ? o : r},
             [sizes, type = p.memories.dtype()](BackwardContext& ctx) {
               backward_pass(ctx, sizes, type);
             });
  return {out[0], r, lse};
}

Cost state_memory_attention_cost(Pass pass, const StateMemorySize& s, DType dtype) {
  const double tokens = double(s.batch) * double(s.time), item = double(item_size(dtype));
  const double N = double(s.state_dim), P = double(s.value_dim), H = double(s.heads);
  const double chunk = double(s.memory_chunk), full = std::floor(double(s.time) / chunk);
  const double runs = std::ceil(double(s.time) / chunk), rest = double(s.time) - full * chunk;
  // Σ_t visible(t): a whole run c sees c memories, the ragged one all whole ones.
  const double visits =
      double(s.batch) * H * (chunk * full * std::max(full - 1, 0.0) / 2 + rest * full);
  const double vectors =
      tokens * item *
      (double(s.query_heads) * (N + P) + double(s.read_heads) * N + double(s.gate_heads));
  const double memories = double(s.batch) * runs * H * N * P *
                          double(item_size(s.wide_contributions ? accumulate_type(dtype) : dtype));
  const double rows = tokens * H * P * item;  // one of o, base, dy
  const double wide = tokens * H * (P + 1) * double(item_size(accumulate_type(dtype)));  // r, lse
  if (pass == Pass::forward) return {vectors + memories + 2 * rows + wide, visits * 4 * N * P};
  return {2 * vectors + 2 * memories + rows + wide, visits * 10 * N * P};
}

}  // namespace ebb
