// RWKV's MLP (models.md 1.7) as a module: unlike other MLPs it looks one token back.
#pragma once
#include "nn/module.h"
#include "ops/seq_layout.h"

namespace ebb {

class RwkvChannelMix : public Module {
 public:
  RwkvChannelMix(int64_t dim, int64_t width);
  // x [B,T,d] -> [B,T,d]. last [N,d]: the token before each sequence (undefined: zeros); end, where
  // not null, receives the last token of each.
  Var forward(const Var& x, const SeqLayout& layout, const Tensor& last, Tensor* end) const;
  // One token of every sequence, x [N,d]; last is updated in place.
  Var step(const Var& x, const Tensor& last) const;

 private:
  Parameter mix_, key_, value_;
};

}  // namespace ebb
