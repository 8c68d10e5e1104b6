// The language-model head and its loss without ever holding all logits (models.md 1.10):
//   loss of z = x·Wᵀ as in ops/cross_entropy.h, over chunks of rows.
//   loss = Σ_n w[n]·token_loss[n]           Reduction::sum
//        = Σ_n w[n]·token_loss[n] / count   Reduction::mean; 0 where count is 0
// x [...,d], W [V,d], labels [...] i32 or i64 (shifted by the caller), w [...] token weights, 1
// where undefined. No bias. dtypes: f32, f64 on the CPU; f32, bf16 on CUDA; losses in f32 (f64 for
// f64).
//
// When gradients are wanted, forward already forms them: the upstream gradient is one number, so
// everything else that scales a row (weights, 1/count) is an input and known. Per chunk:
//   1 z = x·Wᵀ   2 statistics, and z becomes w/count·(softmax(z) − onehot) in place, one read and
//   one write   3 dx = z·W   4 dW += zᵀ·x, f32 sums across chunks
// Backward multiplies dx and dW by the upstream number on the device. Saves dx and dW (f32).
// Extra memory: one chunk of logits, dx and dW.
//
// l2_wrap = f > 0 keeps the largest logit of each row near zero (RWKV): the loss stays as it is,
// the gradient of the row's first maximum gains f·(the logit)/rows (f·logit with Reduction::sum).
// rows: of this call, labelled or not, or the number handed in.
//
// Precision: a chunk's logits have f32 sums and are stored in x's dtype, softmax in f32. For bf16
// that is a relative error of 2⁻⁹ per logit: with |z| about 10, 2 % on a single probability,
// independent between classes and tokens, and 1e-4 bias on lse. Storing f32 would cost 6.3 instead
// of 4.2 GB of traffic at 32768 × 32000 for a gradient that is rounded to bf16 for steps 3 and 4
// anyway. For exact losses (evaluation) use cross_entropy on linear(x, W, {}, {.output = f32}).
#pragma once
#include "ops/cross_entropy.h"

namespace ebb {

struct LinearCrossEntropyOptions {
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;  // or sum
  Tensor count = {};                      // as in CrossEntropyOptions
  Tensor token_weights = {};              // [...] f32 (f64 beside f64)
  int64_t chunk_rows = 0;                 // 0: see linear_cross_entropy_chunk
  double l2_wrap = 0;                     // f
  int64_t l2_wrap_rows = 0;               // of all micro-batches together; 0: of this call
};
// As CrossEntropy; token_loss and lse are without the token weights.
CrossEntropy linear_cross_entropy(const Var& x /*[...,d]*/, const Var& w /*[V,d]*/,
                                  const Tensor& labels /*[...]*/,
                                  LinearCrossEntropyOptions options = {});

// Rows per chunk: on CUDA 4096 to 8192, so that logits take about half a gigabyte at V = 32000
// (smaller chunks pay more for re-reading dW than they save); on the CPU about 128 MB. Chunks of
// one call are of even size.
int64_t linear_cross_entropy_chunk(int64_t rows, int64_t v, DType dtype, Device device);

// Forward with gradients (three products; logits are scratch), backward (scaling dx and dW, the
// latter into an accumulator).
Cost linear_cross_entropy_cost(Pass pass, int64_t rows, int64_t d, int64_t v, DType dtype);

// logits [N,V] become scale[n]·(softmax − onehot); lse and token_loss [N] are written.
// scaled: out = scale·x in out's dtype, or out += scale·x; scale one f32 (f64) number on the
// device. add_at: x[n,index[n]] += factor·value[n]/count; count one f32 (f64) number on the device,
// or undefined (1); nothing where it is 0.
namespace cpu {
void add_at(const Tensor& x /*[N,V]*/, const Tensor& index, const Tensor& value, double factor,
            const Tensor& count);
void softmax_gradient(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                      const RowScale& scale, const Tensor& lse, const Tensor& token_loss);
void scaled(const Tensor& x, const Tensor& scale, const Tensor& out, bool accumulate);
}  // namespace cpu
namespace gpu {
void add_at(const Tensor& x, const Tensor& index, const Tensor& value, double factor,
            const Tensor& count);
void softmax_gradient(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                      const RowScale& scale, const Tensor& lse, const Tensor& token_loss);
void scaled(const Tensor& x, const Tensor& scale, const Tensor& out, bool accumulate);
}  // namespace gpu

}  // namespace ebb
