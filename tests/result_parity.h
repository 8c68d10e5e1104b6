// Results of a recurrence, outputs first and then gradients, as lists of tensors beside a list of
// names; a tensor is undefined where there is no such result.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <string>

#include "tensor/compare.h"

namespace ebb::testing {

// Relative errors within `outputs` for the first `output_count` results, `gradients` for the rest.
inline void expect_results_near(std::span<const Tensor> got, std::span<const Tensor> want,
                                const char* const* names, size_t output_count, double outputs,
                                double gradients, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), want[i].defined()) << what << ' ' << names[i];
    if (got[i].defined()) {
      EXPECT_LE(relative_error(got[i], want[i]), i < output_count ? outputs : gradients)
          << what << ' ' << names[i];
    }
  }
}

inline bool all_values_finite(std::span<const Tensor> results) {
  for (const Tensor& t : results)
    if (t.defined())
      for (double x : t.to_vector<double>())
        if (!std::isfinite(x)) return false;
  return true;
}

// Every row of the last axis to length 1; f64 on the CPU.
inline void normalize_rows(const Tensor& x) {
  const int64_t width = x.shape().back();
  for (int64_t i = 0; i < x.numel(); i += width) {
    double sum = 0;
    for (int64_t j = 0; j < width; ++j) sum += std::pow(x.data<double>()[i + j], 2);
    for (int64_t j = 0; j < width; ++j) x.data<double>()[i + j] /= std::sqrt(sum);
  }
}

}  // namespace ebb::testing
