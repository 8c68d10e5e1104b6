// Plain reductions in f64: collects the reduced elements of every result in row-major order and
// hands them to a function.
#pragma once
#include <cmath>
#include <limits>

#include "tests/reference/elementwise.h"

namespace ebb::testing::reference {

using Values = std::vector<double>;

inline Tensor reduce(const Tensor& x, const std::vector<int>& dims, bool keep,
                     const std::function<double(const Values&)>& fn) {
  std::vector<bool> gone(size_t(x.dim()), false);
  for (int d : dims) gone[size_t(d < 0 ? d + x.dim() : d)] = true;
  Shape result, inside;
  for (int d = 0; d < x.dim(); ++d) {
    if (!gone[size_t(d)])
      result.push_back(x.size(d));
    else if (keep)
      result.push_back(1);
    if (gone[size_t(d)]) inside.push_back(x.size(d));
  }
  return build(result, [&](const Index& at) {
    Values v;
    Index full(size_t(x.dim()));
    const Tensor order = build(inside, [&](const Index& in) {
      size_t next = 0, out = 0;
      for (size_t d = 0; d < full.size(); ++d) {
        full[d] = gone[d] ? in[next++] : at[out];
        out += !gone[d] || keep;
      }
      v.push_back(value_at(x, full));
      return 0.;
    });
    return fn(v);
  });
}

inline double sum(const Values& v) {
  double s = 0;
  for (double x : v) s += x;
  return s;
}
inline double mean(const Values& v) { return sum(v) / double(v.size()); }
inline double norm2(const Values& v) {
  double s = 0;
  for (double x : v) s += x * x;
  return std::sqrt(s);
}
inline double variance(const Values& v) {
  const double m = mean(v);
  double s = 0;
  for (double x : v) s += (x - m) * (x - m);
  return s / (double(v.size()) - 1);
}
inline double argmax(const Values& v) {
  size_t best = 0;
  for (size_t i = 1; i < v.size(); ++i)
    if (v[i] > v[best]) best = i;
  return double(best);
}
inline double max(const Values& v) { return v[size_t(argmax(v))]; }
inline double min(const Values& v) {
  double m = v[0];
  for (double x : v) m = x < m ? x : m;
  return m;
}
inline double logsumexp(const Values& v) {
  double m = -std::numeric_limits<double>::infinity(), s = 0;
  for (double x : v) m = x > m ? x : m;
  for (double x : v) s += std::exp(x - m);
  return m + std::log(s);
}

// fn(row) -> row along one dimension.
inline Tensor along(const Tensor& x, int dim, const std::function<Values(const Values&)>& fn) {
  const Tensor y = Tensor::empty(x.shape(), DType::f64), moved = y.transpose(dim, -1);
  const Tensor from = x.transpose(dim, -1);
  build(from.shape().first(x.dim() - 1), [&](const Index& at) {
    Index full = at;
    full.push_back(0);
    Values row;
    for (int64_t i = 0; i < from.size(-1); ++i) {
      full.back() = i;
      row.push_back(value_at(from, full));
    }
    const Values out = fn(row);
    int64_t offset = 0;
    for (size_t d = 0; d < at.size(); ++d) offset += at[d] * moved.stride(int(d));
    for (size_t i = 0; i < out.size(); ++i)
      y.data<double>()[offset + int64_t(i) * moved.stride(-1)] = out[i];
    return 0.;
  });
  return y;
}

}  // namespace ebb::testing::reference
