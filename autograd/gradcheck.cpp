#include "autograd/gradcheck.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "tensor/check.h"
#include "tensor/random.h"

namespace ebb {
namespace {

using Values = std::vector<Tensor>;

// Elements a failing directional check looks at one by one to name the wrong one.
constexpr int64_t kSearchLimit = 4096;

double dot(const Tensor& a, const Tensor& b) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  double s = 0;
  for (size_t i = 0; i < x.size(); ++i) s += x[i] * y[i];
  return s;
}

double norm(const Tensor& a) { return std::sqrt(dot(a, a)); }

double relative(double analytic, double numeric, double scale) {
  const double error = std::abs(analytic - numeric) / std::max(1e-8, scale);
  return std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
}

// "[1,0,2]": where flat index `at` lies in `shape`.
std::string position(const Shape& shape, int64_t at) {
  Shape index = shape;
  for (int d = shape.size() - 1; d >= 0; --d) {
    index[d] = at % shape[d];
    at /= shape[d];
  }
  return index.str();
}

class Checker {
 public:
  Checker(const GradFn& fn, std::span<const Tensor> inputs, const GradcheckOptions& options)
      : fn_(fn), inputs_(inputs.begin(), inputs.end()), options_(options) {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Tensor& t = inputs_[i];
      check(!t.defined() || !is_float(t.dtype()) || t.dtype() == DType::f64,
            "gradcheck: input {} is {}, want f64", i, t.dtype());
      check(!t.defined() || !t.on_cuda(), "gradcheck: input {} is on a GPU, want the CPU", i);
      differentiable_.push_back(t.defined() && t.dtype() == DType::f64);
    }
  }

  GradcheckResult run() {
    base_ = evaluate(inputs_);
    bool any = false;
    for (size_t j = 0; j < base_.size(); ++j) {
      if (!floats(base_[j])) continue;
      any = true;
      check(base_[j].dtype() == DType::f64, "gradcheck: output {} is {}, want f64", j,
            base_[j].dtype());
    }
    if (!any ||
        std::find(differentiable_.begin(), differentiable_.end(), true) == differentiable_.end()) {
      result_.ok = false;
      result_.message = any ? "no float input: there is no gradient to check"
                            : "no float output: there is no gradient to check";
      return result_;
    }
    for (int d = 0; d < options_.directions && result_.ok; ++d) directional(uint64_t(d));
    if (options_.full_jacobian && result_.ok) jacobian();
    return result_;
  }

 private:
  static bool floats(const Tensor& t) { return t.defined() && is_float(t.dtype()); }

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
          sum.push_back(floats(t) ? Tensor::zeros(t.shape(), DType::f64) : Tensor());
      for (size_t j = 0; j < y.size(); ++j) {
        if (!sum[j].defined()) continue;
        const Tensor d = y[j].contiguous();
        for (int64_t e = 0; e < d.numel(); ++e)
          sum[j].data<double>()[e] += weights[p] * d.data<double>()[e] / (12 * h);
      }
    }
    return sum;
  }

  // The derivative of every output by one element of one input.
  Values jvp_at(size_t input, int64_t element) {
    Values u(inputs_.size());
    u[input] = Tensor::zeros(inputs_[input].shape(), DType::f64);
    u[input].data<double>()[element] = 1;
    return jvp(u);
  }

  Tensor random_like(const Tensor& t, uint64_t purpose) {
    Tensor r = Tensor::empty(t.shape(), DType::f64);
    fill_normal(r, {options_.seed, purpose});
    return r;
  }

  bool note(double analytic, double numeric, double scale, const std::string& where) {
    const double error = relative(analytic, numeric, scale);
    result_.worst = std::max(result_.worst, error);
    if (error <= options_.tolerance) return true;
    if (result_.ok)
      result_.message = fmt::format("{}: analytic {:.12g}, numeric {:.12g}, relative error {:.3g}",
                                    where, analytic, numeric, error);
    result_.ok = false;
    return false;
  }

  // <J u, v> against <u, Jᵀ v>, moving one input at a time so that no gradient hides another.
  void directional(uint64_t round) {
    Values v;
    for (size_t j = 0; j < base_.size(); ++j)
      v.push_back(floats(base_[j]) ? random_like(base_[j], 1000 * round + j) : Tensor());
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
        size_jv += norm(ju[j]) * norm(v[j]);
      }
      const double analytic = dot(u[i], g[i]);
      // Two random vectors may be near orthogonal; their lengths are the scale that rounding has.
      const double size_ug = norm(u[i]) * norm(g[i]) / std::sqrt(double(inputs_[i].numel()));
      const double scale =
          std::max({std::abs(analytic), std::abs(numeric), size_ug, 1e-3 * size_jv});
      if (!note(analytic, numeric, scale, fmt::format("input {} along a random direction", i)) &&
          result_.worst_input < 0)
        locate(i, v, g[i]);
    }
  }

  // Which element of input i is furthest off? Adds it to the message.
  void locate(size_t i, const Values& v, const Tensor& gradient) {
    result_.worst_input = int(i);
    const std::vector<double> g = gradient.to_vector<double>();
    if (int64_t(g.size()) > kSearchLimit) return;
    double worst = -1, numeric_there = 0;
    for (size_t e = 0; e < g.size(); ++e) {
      const Values column = jvp_at(i, int64_t(e));
      double numeric = 0;
      for (size_t j = 0; j < column.size(); ++j)
        if (column[j].defined()) numeric += dot(column[j], v[j]);
      if (const double off = relative(g[e], numeric, 1); off > worst) {
        worst = off;
        numeric_there = numeric;
        result_.worst_element = int64_t(e);
      }
    }
    result_.message +=
        fmt::format("; furthest off at input {}{}: analytic {:.12g}, numeric {:.12g}", i,
                    position(gradient.shape(), result_.worst_element),
                    g[size_t(result_.worst_element)], numeric_there);
  }

  void jacobian() {
    for (size_t j = 0; j < base_.size(); ++j) {
      if (!floats(base_[j])) continue;
      // Row e of the Jacobian by backward, for every output element.
      std::vector<Values> rows;
      for (int64_t e = 0; e < base_[j].numel(); ++e) {
        Values v;
        for (const Tensor& y : base_)
          v.push_back(floats(y) ? Tensor::zeros(y.shape(), DType::f64) : Tensor());
        v[j].data<double>()[e] = 1;
        rows.push_back(vjp(v));
      }
      for (size_t i = 0; i < inputs_.size(); ++i)
        if (differentiable_[i]) jacobian_block(j, i, rows);
    }
  }

  void jacobian_block(size_t j, size_t i, const std::vector<Values>& rows) {
    std::vector<std::vector<double>> analytic;
    // The central difference carries rounding of about 1e-12 of the output; an output that does not
    // depend on an input must not be judged against a scale of zero.
    double scale = 0;
    for (double y : base_[j].to_vector<double>()) scale = std::max(scale, 1e-4 * std::abs(y));
    for (const Values& r : rows) {
      analytic.push_back(r[i].to_vector<double>());
      for (double a : analytic.back()) scale = std::max(scale, std::abs(a));
    }
    for (int64_t e = 0; e < inputs_[i].numel(); ++e) {
      const std::vector<double> column = jvp_at(i, e)[j].to_vector<double>();
      for (size_t o = 0; o < column.size(); ++o) {
        const bool first = result_.ok;
        if (!note(analytic[o][size_t(e)], column[o], std::max(scale, std::abs(column[o])),
                  fmt::format("d output {}{} / d input {}{}", j,
                              position(base_[j].shape(), int64_t(o)), i,
                              position(inputs_[i].shape(), e))) &&
            first) {
          result_.worst_input = int(i);
          result_.worst_element = e;
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
