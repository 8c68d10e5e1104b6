// Running log-sum-exp along time, as the decays and keys of LightNet (models.md 7.9): by channel,
//   z_t = log(e^{z_{t−1}} + e^{u_t})      g_t = z_{t−1} − z_t
//   k_t = e^{u_t − z_t} = 1 − e^{g_t}
// from z_0 = −inf where nothing came before: then g_1 = 0 and k_1 = 1, without gradients.
//
//   LogCumsumExp r = log_cumsum_exp(u, {}, {.want_final = true, .layout = packed});
//
// u [B,T,C] f32, f64 (CPU) or bf16 (CUDA), any strides; z0 [N,C] f32 (f64 beside f64), absent:
// −inf. k [B,T,C] in u's dtype; g [B,T,C] and z [N,C], the value after each sequence's last token
// (z0 where it has none), f32 (f64). z may be large while g is small, so g is never the difference
// of two z: the sum is kept as a maximum and a factor beside it. Backward, Z = dL/dz:
//   ζ_t = dg_{t+1} − dg_t − k_t dk_t    ρ_t = ζ_t + ρ_{t+1} e^{g_{t+1}}    du_t = k_t (dk_t + ρ_t)
// with ρ_{T+1} e^{g_{T+1}} = dz; dz0 = dg_1 + ρ_1 e^{g_1}. Saves k and g, and z0.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/seq_layout.h"

namespace ebb {

struct LogCumsumExpOptions {
  bool want_final = false;  // else z stays undefined
  SeqLayout layout = {};    // N sequences; dense: N = B
};
struct LogCumsumExp {
  Var k;  // [B,T,C]
  Var g;  // [B,T,C]
  Var z;  // [N,C]
};
LogCumsumExp log_cumsum_exp(const Var& u, const Var& z0 /*may be undefined*/,
                            const LogCumsumExpOptions& options = {});

Cost log_cumsum_exp_cost(Pass pass, int64_t elements, DType dtype);  // elements of u

// What the backends see: checked, dense tensors; k, g and z are overwritten, z may be undefined.
struct LogCumsumExpProblem {
  Tensor u = {};   // forward only
  Tensor z0 = {};  // undefined: −inf
  Tensor k = {}, g = {};
  SeqLayout layout = {};
  int64_t batch() const { return g.size(0); }
  int64_t time() const { return g.size(1); }
  int64_t channels() const { return g.size(2); }
  int64_t sequences() const { return layout.count(batch()); }
};
// dk, dg, dz may be undefined: zeros. du and dz0: dense, overwritten; undefined: not wanted.
struct LogCumsumExpGradients {
  Tensor dk = {}, dg = {}, dz = {};
  Tensor du = {}, dz0 = {};
};
namespace cpu {
void log_cumsum_exp_fwd(const LogCumsumExpProblem& p, const Tensor& z);
void log_cumsum_exp_bwd(const LogCumsumExpProblem& p, const LogCumsumExpGradients& grads);
}  // namespace cpu
namespace gpu {
void log_cumsum_exp_fwd(const LogCumsumExpProblem& p, const Tensor& z);
void log_cumsum_exp_bwd(const LogCumsumExpProblem& p, const LogCumsumExpGradients& grads);
}  // namespace gpu

}  // namespace ebb
