// How mixers cut projections into heads, and positions along packed sequences.
#pragma once
#include <vector>

#include "ops/movement.h"
#include "ops/seq_layout.h"

namespace ebb {

// Columns of a product, cut into these widths; padding columns behind them are left out.
inline std::vector<Var> columns_of(const Var& product, std::vector<int64_t> widths) {
  int64_t used = 0;
  for (const int64_t w : widths) used += w;
  if (const int64_t rest = product.shape().back() - used; rest > 0) widths.push_back(rest);
  return split(product, -1, widths);
}
// [...,H·P] -> [...,H,P]
inline Var in_heads(const Var& x, int64_t heads) {
  Shape shape = x.shape();
  const int64_t width = shape.back() / heads;
  shape[x.dim() - 1] = heads;
  shape.push_back(width);
  return reshape(x, shape);
}
// [...,G,P] -> [...,heads,P]: each head for the heads/G that share it.
inline Var repeated_heads(const Var& x, int64_t heads) {
  const int64_t own = x.size(-2);
  return own == heads ? x : repeat_interleave(x, x.dim() - 2, heads / own);
}
// [...,H,P] -> [...,H·P]
inline Var from_heads(const Var& x) { return flatten(x, -2, -1); }

// Tokens of every sequence of a [batch,time] input.
inline std::vector<int64_t> lengths_of(const SeqLayout& layout, int64_t batch, int64_t time) {
  std::vector<int64_t> out;
  for (int64_t n = 0; n < layout.count(batch); ++n)
    out.push_back(layout.end(n, time) - layout.begin(n, time));
  return out;
}
// position [N] (i64 on the CPU; undefined: zeros), moved on by these numbers of tokens.
inline Tensor positions_after(const Tensor& position, const std::vector<int64_t>& lengths) {
  std::vector<int64_t> p =
      position ? position.to_vector<int64_t>() : std::vector<int64_t>(lengths.size(), 0);
  for (size_t i = 0; i < p.size(); ++i) p[i] += lengths[i];
  return Tensor::from(p, {int64_t(p.size())});
}

}  // namespace ebb
