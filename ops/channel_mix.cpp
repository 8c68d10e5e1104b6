#include "ops/channel_mix.h"

#include "ops/common.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"

namespace ebb {

ChannelMix channel_mix(const Var& x, const Var& x_k, const Var& key, const Var& value,
                       const Var& last, const TokenShiftOptions& options) {
  const char* op = "channel_mix";
  for (const auto& [what, v] :
       {std::pair("x", &x), {"x_k", &x_k}, {"key", &key}, {"value", &value}})
    check_defined(op, what, v->value());
  check(x.dim() == 3, "{}: x is {}, want [B,T,D]", op, x.shape());
  const int64_t d = x.size(2);
  check(key.dim() == 2 && key.size(1) == d, "{}: key is {}, x is {}; want [I,{}]", op, key.shape(),
        x.shape(), d);
  check_shape(op, "value", value.value(), {d, key.size(0)});
  check(x_k.numel() == d, "{}: x_k is {}, x is {}; want {} values", op, x_k.shape(), x.shape(), d);
  const TokenShiftMix shifted = token_shift_mix(x, std::vector{x_k}, last, options);
  return {linear(relu2(linear(shifted.out[0], key)), value), shifted.last};
}

Cost channel_mix_cost(Pass pass, int64_t tokens, int64_t channels, int64_t inner, DType dtype) {
  const double n = double(tokens) * double(inner), size = double(item_size(dtype));
  const Cost relu2 = pass == Pass::forward ? Cost{2 * n * size, 2 * n} : Cost{3 * n * size, 3 * n};
  return token_shift_cost(pass, tokens, channels, 1, dtype) + relu2 +
         linear_cost(pass, tokens, channels, inner, dtype) +
         linear_cost(pass, tokens, inner, channels, dtype);
}

}  // namespace ebb
