// AdamW over a list of tensors (Loshchilov and Hutter 2019, "Decoupled weight decay
// regularization", algorithm 2; eps outside the root, as PyTorch has it). Per element, with
// g' = g · grad_scale, lr' = lr · lr_scale of the tensor, t the number of the step:
//   m = β1·m + (1−β1)·g'            v = β2·v + (1−β2)·g'²
//   p = p·(1 − lr'·wd) − lr'/(1−β1ᵗ) · m / (sqrt(v)/sqrt(1−β2ᵗ) + eps)
// master, grad, m, v: f32 (f64 on the CPU), dense, of one shape; shadow: bf16, receives p rounded
// to nearest even in the same pass; it may be absent. A tensor without a gradient is left alone.
//
// Everything that changes from step to step is device memory, so that a step can be captured as a
// CUDA graph, and nothing synchronises:
//   Tensor scalars = adamw_scalars({.lr = 3e-4, .max_norm = 1}, device);   // f64, an AdamWScalars
//   sum_of_squares(gradients, squares);
//   adamw_begin(scalars, squares, options);     // norm, clip scale, skip flag, step, corrections
//   adamw(list, scalars, options);
// A step whose gradient norm is not finite (or too large to square in f32 after clipping) changes
// no weight, moment or shadow and is counted in `skipped`.
#pragma once
#include <cmath>

#include "ops/cost.h"
#include "ops/multi_tensor.h"
#include "tensor/random.h"  // EBB_HD

namespace ebb {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
};

struct AdamWScalars {
  // Set from outside, between steps.
  double lr = 0;
  double max_norm = 0;      // gradients are scaled down to this global norm; 0: never
  double grad_divisor = 1;  // gradients are divided by it before anything else (valid tokens)
  // Written by adamw_begin.
  double grad_norm = 0;                     // of the divided gradients, before clipping
  double grad_scale = 1;                    // min(1, max_norm / (grad_norm + 1e-6)) / grad_divisor
  double skip = 0;                          // 1: this step changes nothing
  double step = 0;                          // steps taken, this one included, skipped ones not
  double skipped = 0;                       // steps skipped
  double correction1 = 1, correction2 = 1;  // 1 − βᵗ
};
enum class AdamWScalar { lr, max_norm, grad_divisor, grad_norm, grad_scale, skip, step, skipped };

Tensor adamw_scalars(const AdamWScalars& values, Device device);  // f64 [10]
AdamWScalars read_adamw_scalars(const Tensor& scalars);           // synchronises
// A view of one of them, f64 []: copy_ to it from the host or from a device value.
Tensor adamw_scalar(const Tensor& scalars, AdamWScalar which);

struct AdamWTensor {
  Tensor master, grad, m, v;
  Tensor shadow = {};
  double weight_decay = 0;
  double lr_scale = 1;
};

class AdamWList {
 public:
  struct Row {
    void* p = nullptr;
    const void* g = nullptr;
    void* m = nullptr;
    void* v = nullptr;
    void* shadow = nullptr;
    int64_t numel = 0;
    double weight_decay = 0;
    double lr_scale = 1;
  };
  AdamWList() = default;
  explicit AdamWList(std::vector<AdamWTensor> tensors) { set(std::move(tensors)); }
  // Tensors without a gradient are dropped. Cheap when nothing has moved since the last call.
  void set(std::vector<AdamWTensor> tensors);

  const std::vector<AdamWTensor>& tensors() const { return tensors_; }
  const ChunkTable& table() const { return table_; }
  DType dtype() const { return tensors_.front().master.dtype(); }
  Device device() const { return tensors_.front().master.device(); }

 private:
  std::vector<AdamWTensor> tensors_;
  ChunkTable table_;
};

void adamw_begin(const Tensor& scalars, const Tensor& squares /*f64 []*/,
                 const AdamWOptions& options);
void adamw(const AdamWList& list, const Tensor& scalars, const AdamWOptions& options);

// p, m, v in and out, g in, the shadow out.
Cost adamw_cost(int64_t items, bool shadow);

namespace cpu {
void adamw_begin(const Tensor& scalars, const Tensor& squares, const AdamWOptions& options);
void adamw(const AdamWList& list, const Tensor& scalars, const AdamWOptions& options);
}  // namespace cpu
namespace gpu {
void adamw_begin(const Tensor& scalars, const Tensor& squares, const AdamWOptions& options);
void adamw(const AdamWList& list, const Tensor& scalars, const AdamWOptions& options);
}  // namespace gpu

// The arithmetic, one text for both devices.

EBB_HD void adamw_begin_step(AdamWScalars& s, double squares, const AdamWOptions& o) {
  s.grad_norm = std::sqrt(squares) / std::fabs(s.grad_divisor);
  const double clip =
      s.max_norm > 0 && s.grad_norm + 1e-6 > s.max_norm ? s.max_norm / (s.grad_norm + 1e-6) : 1;
  s.grad_scale = clip / s.grad_divisor;
  // False for NaN as well. 1.8e19 squared still is an f32.
  const bool usable = s.grad_norm < 1e300 && s.grad_norm * clip < 1.8e19;
  s.skip = usable ? 0 : 1;
  if (!usable) {
    s.skipped += 1;
    return;
  }
  s.step += 1;
  s.correction1 = 1 - std::pow(o.beta1, s.step);
  s.correction2 = 1 - std::pow(o.beta2, s.step);
}

template <class T>
struct AdamWCoefficients {
  T grad_scale, beta1, rest1, beta2, rest2, step_size, root_scale, eps, keep;

  EBB_HD AdamWCoefficients(const AdamWScalars& s, const AdamWList::Row& row, const AdamWOptions& o)
      : grad_scale(T(s.grad_scale)),
        beta1(T(o.beta1)),
        rest1(T(1 - o.beta1)),
        beta2(T(o.beta2)),
        rest2(T(1 - o.beta2)),
        step_size(T(s.lr * row.lr_scale / s.correction1)),
        root_scale(T(1 / std::sqrt(s.correction2))),
        eps(T(o.eps)),
        keep(T(1 - s.lr * row.lr_scale * row.weight_decay)) {}
};

template <class T>
EBB_HD void adamw_element(T& p, T g, T& m, T& v, const AdamWCoefficients<T>& k) {
  // Contractions are spelled out: left to the compiler they differ from loop to loop.
  g *= k.grad_scale;
  m = std::fma(k.beta1, m, k.rest1 * g);
  v = std::fma(k.beta2, v, k.rest2 * g * g);
  p = std::fma(p, k.keep, -k.step_size * (m / std::fma(std::sqrt(v), k.root_scale, k.eps)));
}

}  // namespace ebb
