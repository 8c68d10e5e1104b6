#include "tests/op_table.h"

#include "tensor/random.h"

namespace ebb::testing {

Tensor Draw::normal(const Shape& shape, double scale, double mean) {
  Tensor t = Tensor::empty(shape, DType::f64);
  fill_normal(t, {seed_, next_++}, mean, scale);
  return t;
}

Tensor Draw::uniform(const Shape& shape, double low, double high) {
  Tensor t = Tensor::empty(shape, DType::f64);
  fill_uniform(t, {seed_, next_++}, low, high);
  return t;
}

Tensor Draw::integers(const Shape& shape, int64_t low, int64_t high) {
  Tensor t = Tensor::empty(shape, DType::i64);
  const RandomKey key{seed_, next_++};
  for (int64_t i = 0; i < t.numel(); ++i)
    t.data<int64_t>()[i] = low + int64_t(random_word(key, uint64_t(i))) % (high - low);
  return t;
}

std::vector<OpRow> op_table(uint64_t seed) {
  std::vector<OpRow> table;
  uint64_t stream = 0;  // new families go to the end
  for (const auto family : {reduce_rows, matmul_rows, loss_rows, norm_rows, conv_rows, gate_rows,
                            delta_rule_rows, optimizer_rows, elementwise_rows, movement_rows,
                            delta_rule_channel_rows, linear_attention_rows,
                            state_memory_attention_rows, dplr_rows, attention_rows, decay_rows}) {
    Draw draw(seed, stream++);
    for (OpRow& row : family(draw)) table.push_back(std::move(row));
  }
  return table;
}

GradcheckResult gradcheck_case(const OpCase& c, const GradcheckOptions& options) {
  std::vector<Tensor> inputs;
  for (const OpInput& in : c.inputs) inputs.push_back(in.differentiable ? in.value : Tensor());
  const GradFn run = [&](std::span<const Var> in) {
    std::vector<Var> all(in.begin(), in.end());
    for (size_t i = 0; i < all.size(); ++i)
      if (!c.inputs[i].differentiable) all[i] = Var(c.inputs[i].value);
    return c.run(all);
  };
  return gradcheck(run, inputs, options);
}

}  // namespace ebb::testing
