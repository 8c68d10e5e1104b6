// A differentiable operator of your own, and the check that its gradients are right.
//   y = w ⊙ tanh(αx)        x [N,d], w [d], α a number (dynamic tanh, a stand-in for a norm)
#include <fmt/format.h>

#include <cmath>

#include "autograd/gradcheck.h"
#include "autograd/node.h"
#include "autograd/tape.h"
#include "ops/reduce.h"
#include "tensor/check.h"
#include "tensor/random.h"

using namespace ebb;

// dx = dy ⊙ w ⊙ α(1 − t²),  dw = Σ_n dy ⊙ t,  with t = tanh(αx) saved from the forward pass.
void dynamic_tanh_backward(BackwardContext& ctx, double alpha) {
  const Tensor &w = ctx.saved(0), &t = ctx.saved(1), dy = ctx.dy(0).contiguous();
  const Tensor dx = Tensor::empty_like(t), dw = Tensor::zeros_like(w);
  visit_float(t.dtype(), [&]<class T>() {
    for (int64_t i = 0; i < t.numel(); ++i) {
      const int64_t j = i % w.numel();
      const T ti = t.data<T>()[i], g = dy.data<T>()[i];
      dx.data<T>()[i] = T(g * w.data<T>()[j] * alpha * (1 - ti * ti));
      dw.data<T>()[j] = T(dw.data<T>()[j] + g * ti);
    }
  });
  if (ctx.needs(0)) ctx.grad(0, dx);
  if (ctx.needs(1)) ctx.grad(1, dw);
}

Var dynamic_tanh(const Var& x /*[N,d]*/, const Var& w /*[d]*/, double alpha) {
  check(!x.on_cuda() && x.dim() == 2 && w.shape() == Shape{x.size(1)},
        "dynamic_tanh: x is {}, w is {}; want [N,d] and [d] on the CPU", x.shape(), w.shape());
  const Tensor xs = x.value().contiguous(), ws = w.value().contiguous();
  const Tensor t = Tensor::empty_like(xs), y = Tensor::empty_like(xs);
  visit_float(xs.dtype(), [&]<class T>() {
    for (int64_t i = 0; i < xs.numel(); ++i) {
      t.data<T>()[i] = T(std::tanh(alpha * xs.data<T>()[i]));
      y.data<T>()[i] = T(ws.data<T>()[i % ws.numel()] * t.data<T>()[i]);
    }
  });
  return record("dynamic_tanh", {x, w}, {ws, t}, {y},
                [alpha](BackwardContext& ctx) { dynamic_tanh_backward(ctx, alpha); })[0];
}

int main() {
  const Tensor x = random_normal({5, 4}, {.seed = 1}, DType::f64);
  const Tensor w = random_normal({4}, {.seed = 2}, DType::f64);
  const GradcheckResult r =
      gradcheck([](auto in) { return std::vector{dynamic_tanh(in[0], in[1], 0.5)}; }, {x, w},
                {.full_jacobian = true});
  fmt::print("gradients {}, largest relative error {:.1e} {}\n", r.ok ? "right" : "WRONG", r.worst,
             r.message);
  const Var leaf = Var::leaf(w);
  backward(sum(dynamic_tanh(x, leaf, 0.5)));
  fmt::print("d(sum y)/dw = {}\n", leaf.grad().str());
  return r.ok ? 0 : 1;
}
