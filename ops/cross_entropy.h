// Token cross-entropy over logits (models.md 1.10).
//   m[n] = max_v z[n,v]    s[n] = log Σ_v exp(z[n,v] − m[n])    lse[n] = m[n] + s[n]
//   token_loss[n] = s[n] + m[n] − z[n,label[n]],  0 where label[n] == ignore_index
//   loss = Σ_n token_loss[n]                 Reduction::sum
//        = Σ_n token_loss[n] / count         Reduction::mean; 0 where count is 0 (all ignored)
//        = token_loss                        Reduction::none, with an upstream gradient per token
//   dz[n,v] = g[n]·(exp(z[n,v] − lse[n]) − [v = label[n]]),  g[n] = the row's upstream / count
// logits [...,V] f32 f64 bf16 (softmax in f32), labels [...] i32 or i64, already shifted by the
// caller. count: how many labels are kept, or whatever number is handed in: the global count over
// micro-batches and ranks, so that accumulated gradients equal those of one large batch.
// Everything else is f32 (f64 for f64). Saves logits, labels, m, s, count. m and s apart, because
// exp(z − lse) with lse near 1e4 would lose four digits in f32.
// A label that is neither a class nor ignore_index: an error on the CPU; on CUDA it is treated as
// ignored (but counted) and raises DeviceFlag::cross_entropy_label. NaN logits give NaN, except in
// ignored rows. V may be any size >= 1, N may be 0.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb {

enum class Reduction { mean, sum, none };

struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
  Tensor count = {};  // one number of any dtype on the logits' device; undefined: counted here
};
struct CrossEntropy {
  Var loss;           // [], or [...] without reduction
  Tensor token_loss;  // [...]; no gradient flows through this or lse
  Tensor lse;         // [...]
  Tensor count;       // i64 [] kept labels of this call, even if another count was handed in
};
CrossEntropy cross_entropy(const Var& logits /*[...,V]*/, const Tensor& labels /*[...]*/,
                           CrossEntropyOptions options = {});

// i64 []: labels other than ignore_index. Sum these over micro-batches and ranks before forward.
Tensor count_labels(const Tensor& labels, int64_t ignore_index = -100);

Cost cross_entropy_cost(Pass pass, int64_t rows, int64_t v, DType dtype);

// ---- backends and what linear_cross_entropy shares ----
// What row n's loss and gradient are multiplied with: upstream · weights[n] / count, factors left
// out where undefined; 0 where count is 0. All f32 (f64 for f64), dense.
struct RowScale {
  Tensor upstream = {};  // [] or [N]
  Tensor weights = {};   // [N]
  Tensor count = {};     // []
};
// Per row [N]: max m, log-sum s, lse and token_loss.
struct RowStatistics {
  Tensor max, log_sum, lse, token_loss;
};
// logits [N,V], labels i64 [N]; all dense. dlogits may be logits itself.
namespace cpu {
void cross_entropy_fwd(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                       const RowStatistics& rows);
void cross_entropy_bwd(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                       const RowStatistics& rows, const RowScale& scale, const Tensor& dlogits);
void count_labels(const Tensor& labels, int64_t ignore_index, const Tensor& count);
void total_loss(const Tensor& token_loss, const RowScale& scale, const Tensor& loss);
}  // namespace cpu
namespace gpu {
void cross_entropy_fwd(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                       const RowStatistics& rows);
void cross_entropy_bwd(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                       const RowStatistics& rows, const RowScale& scale, const Tensor& dlogits);
void count_labels(const Tensor& labels, int64_t ignore_index, const Tensor& count);
void total_loss(const Tensor& token_loss, const RowScale& scale, const Tensor& loss);
}  // namespace gpu

// Argument checks both losses make; `op` opens the messages.
Tensor checked_labels(const char* op, const Tensor& labels, const Shape& want, Device device);
void check_label_values(const char* op, const Tensor& labels, int64_t v, int64_t ignore_index);
Tensor checked_count(const char* op, const Tensor& count, const Tensor& kept, DType dtype,
                     Device device);

}  // namespace ebb
