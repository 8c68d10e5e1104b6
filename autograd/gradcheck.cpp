#include "autograd/gradcheck.h"

#include <algorithm>
#include <cmath>

#include "autograd/tape.h"
#include "tensor/check.h"
#include "tensor/random.h"

namespace ebb {
namespace {

using Values = std::vector<Tensor>;

double dot(const Tensor& a, const Tensor& b) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  double s = 0;
  for (size_t i = 0; i < x.size(); ++i) s += x[i] * y[i];
  return s;
}

class Checker {
 public:
  Checker(const GradFn& fn, std::span<const Tensor> inputs, const GradcheckOptions& options)
      : fn_(fn), inputs_(inputs.begin(), inputs.end()), options_(options) {
    for (const Tensor& t : inputs_) {
      check(!t.defined() || !is_float(t.dtype()) || t.dtype() == DType::f64,
            "gradcheck: inputs must be f64, got {}", t.dtype());
      differentiable_.push_back(t.defined() && t.dtype() == DType::f64);
    }
  }

  GradcheckResult run() {
    base_ = evaluate(inputs_);
    for (int d = 0; d < options_.directions && result_.ok; ++d) directional(uint64_t(d));
    if (options_.full_jacobian && result_.ok) jacobian();
    return result_;
  }

 private:
  Values evaluate(const Values& at) {
    const NoGrad off;
    std::vector<Var> in(at.begin(), at.end());
    Values out;
    for (const Var& y : fn_(in)) out.push_back(y.value());
    return out;
  }

  // Jᵀ·v for one upstream gradient per output.
  Values vjp(const Values& v) {
    std::vector<Var> in;
    for (size_t i = 0; i < inputs_.size(); ++i)
      in.push_back(differentiable_[i] ? Var::leaf(inputs_[i]) : Var(inputs_[i]));
    const std::vector<Var> out = fn_(in);
    std::vector<Var> roots;
    Values dy;
    for (size_t j = 0; j < out.size(); ++j) {
      if (!out[j].requires_grad()) continue;
      roots.push_back(out[j]);
      dy.push_back(v[j]);
    }
    if (!roots.empty()) backward(roots, dy);
    Values g;
    for (size_t i = 0; i < in.size(); ++i)
      g.push_back(!differentiable_[i]      ? Tensor()
                  : in[i].grad().defined() ? in[i].grad()
                                           : Tensor::zeros_like(inputs_[i]));
    return g;
  }

  // Fourth-order central difference of the outputs along `u` (undefined entries: unmoved).
  Values jvp(const Values& u) {
    const double h = options_.step;
    // In pairs, so that an output that does not depend on the input comes out as exactly 0.
    const double points[4] = {2 * h, -2 * h, h, -h}, weights[4] = {-1, 1, 8, -8};
    Values sum;
    for (int p = 0; p < 4; ++p) {
      Values at = inputs_;
      for (size_t i = 0; i < at.size(); ++i) {
        if (!u[i].defined()) continue;
        at[i] = at[i].clone();
        const Tensor step = u[i].contiguous();
        for (int64_t e = 0; e < at[i].numel(); ++e)
          at[i].data<double>()[e] += points[p] * step.data<double>()[e];
      }
      const Values y = evaluate(at);
      if (p == 0)
        for (const Tensor& t : y)
          sum.push_back(is_float(t.dtype()) ? Tensor::zeros(t.shape(), DType::f64) : Tensor());
      for (size_t j = 0; j < y.size(); ++j) {
        if (!sum[j].defined()) continue;
        const Tensor d = y[j].contiguous();
        for (int64_t e = 0; e < d.numel(); ++e)
          sum[j].data<double>()[e] += weights[p] * d.data<double>()[e] / (12 * h);
      }
    }
    return sum;
  }

  Tensor random_like(const Tensor& t, uint64_t purpose) {
    Tensor r = Tensor::empty(t.shape(), DType::f64);
    fill_normal(r, {options_.seed, purpose});
    return r;
  }

  void note(double analytic, double numeric, double scale, const std::string& where) {
    const double error = std::abs(analytic - numeric) / std::max(1e-8, scale);
    if (error > result_.worst) result_.worst = error;
    if (!(error <= options_.tolerance) && result_.ok) {
      result_.ok = false;
      result_.message = fmt::format("{}: analytic {:.12g}, numeric {:.12g}, relative error {:.3g}",
                                    where, analytic, numeric, error);
    }
  }

  // <J u, v> against <u, Jᵀ v>, moving one input at a time so that no gradient hides another.
  void directional(uint64_t round) {
    Values v;
    for (size_t j = 0; j < base_.size(); ++j)
      v.push_back(is_float(base_[j].dtype()) ? random_like(base_[j], 1000 * round + j) : Tensor());
    const Values g = vjp(v);
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (!differentiable_[i] || inputs_[i].numel() == 0) continue;
      Values u(inputs_.size());
      u[i] = random_like(inputs_[i], 1000 * round + 500 + i);
      const Values ju = jvp(u);
      double numeric = 0, size_jv = 0;
      for (size_t j = 0; j < ju.size(); ++j) {
        if (!ju[j].defined()) continue;
        numeric += dot(ju[j], v[j]);
        size_jv += std::sqrt(dot(ju[j], ju[j]) * dot(v[j], v[j]));
      }
      const double analytic = dot(u[i], g[i]);
      const double size_ug = std::sqrt(dot(u[i], u[i]) * dot(g[i], g[i]));
      // Two random vectors may be near orthogonal; their lengths are the scale that rounding has.
      const double n = std::max<double>(1, double(inputs_[i].numel()));
      note(
          analytic, numeric,
          std::max({std::abs(analytic), std::abs(numeric), size_ug / std::sqrt(n), 1e-3 * size_jv}),
          fmt::format("input {} along a random direction", i));
    }
  }

  void jacobian() {
    for (size_t j = 0; j < base_.size(); ++j) {
      if (!is_float(base_[j].dtype())) continue;
      // The central difference carries rounding of about 1e-12 of the output; an output that does
      // not depend on an input must not be judged against a scale of zero.
      double rounding = 0;
      for (double y : base_[j].to_vector<double>())
        rounding = std::max(rounding, 1e-4 * std::abs(y));
      // Row e of the Jacobian by backward, for every output element.
      std::vector<Values> rows;
      for (int64_t e = 0; e < base_[j].numel(); ++e) {
        Values v;
        for (const Tensor& y : base_)
          v.push_back(is_float(y.dtype()) ? Tensor::zeros(y.shape(), DType::f64) : Tensor());
        v[j].data<double>()[e] = 1;
        rows.push_back(vjp(v));
      }
      for (size_t i = 0; i < inputs_.size(); ++i) {
        if (!differentiable_[i]) continue;
        std::vector<std::vector<double>> analytic;
        double scale = rounding;
        for (const Values& r : rows) {
          analytic.push_back(r[i].to_vector<double>());
          for (double a : analytic.back()) scale = std::max(scale, std::abs(a));
        }
        for (int64_t e = 0; e < inputs_[i].numel(); ++e) {
          Values u(inputs_.size());
          u[i] = Tensor::zeros(inputs_[i].shape(), DType::f64);
          u[i].data<double>()[e] = 1;
          const std::vector<double> column = jvp(u)[j].to_vector<double>();
          for (size_t o = 0; o < column.size(); ++o)
            note(analytic[o][size_t(e)], column[o], std::max(scale, std::abs(column[o])),
                 fmt::format("d output {}[{}] / d input {}[{}]", j, o, i, e));
        }
      }
    }
  }

  const GradFn& fn_;
  Values inputs_;
  GradcheckOptions options_;
  std::vector<bool> differentiable_;
  Values base_;
  GradcheckResult result_;
};

}  // namespace

GradcheckResult gradcheck(const GradFn& fn, std::span<const Tensor> inputs,
                          GradcheckOptions options) {
  return Checker(fn, inputs, options).run();
}

}  // namespace ebb
