// Parameters for tests of the optimizer.
#pragma once
#include <gtest/gtest.h>

#include "tensor/compare.h"
#include "tensor/random.h"
#include "train/optimizer.h"

namespace ebb::testing {

inline Tensor draw(const Shape& shape, uint64_t purpose, DType dtype = DType::f32,
                   double scale = 1) {
  Tensor t = Tensor::empty(shape, DType::f64);
  fill_normal(t, {11, purpose}, 0, scale);
  return t.to(dtype);
}

inline NamedParameter named(const std::string& name, const Tensor& master,
                            WeightDecay decay = WeightDecay::on) {
  const Shape& s = master.shape();
  return {name, Parameter(master), 0, s.empty() ? 1 : s[0], s, decay};
}
inline std::vector<ParamGroup> one_group(std::vector<NamedParameter> parameters,
                                         double weight_decay = 0) {
  return {{.parameters = std::move(parameters), .weight_decay = weight_decay}};
}
inline std::vector<Tensor> copies(const std::vector<NamedParameter>& parameters,
                                  const AdamW& optimizer) {
  std::vector<Tensor> out;
  for (const NamedParameter& p : parameters) {
    out.push_back(p.parameter.master().clone());
    if (p.parameter.shadow()) out.push_back(p.parameter.shadow().clone());
  }
  for (const auto& [name, t] : optimizer.state_dict())
    if (is_float(t.dtype())) out.push_back(t.clone());
  return out;
}
inline void expect_same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(bitwise_equal(a[i], b[i])) << i;
}

}  // namespace ebb::testing
