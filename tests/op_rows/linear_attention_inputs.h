// What the rows of gated linear attention and of SSD run: sizes, options, packed sequences.
#pragma once
#include <limits>
#include <string>
#include <vector>

#include "tests/op_rows/delta_inputs.h"

namespace ebb::testing {

struct LinearAttentionCase {
  std::string name = {};
  int64_t batch = 1, time = 1, groups = 1, heads = 1, key_dim = 8, value_dim = 8;
  std::vector<int64_t> cu = {};
  bool h0 = true, final_state = true, weight = false, skip = false;
  bool by_channel = false, shared = false;  // g [B,T,H,K]; k = 1 − e^g
  int64_t memory = 0;
  Decay decay = Decay::usual;
  int64_t chunk = 64;
  // SSD only.
  bool softplus = true, log_A = false, bias = true;
  double dt_mean = -1, a_min = -3, dt_min = 0, dt_max = std::numeric_limits<double>::infinity();

  int64_t sequences() const { return cu.empty() ? batch : int64_t(cu.size()) - 1; }
  Shape keys() const { return {batch, time, groups, key_dim}; }
  Shape values() const { return {batch, time, heads, value_dim}; }
  Shape gates() const {
    Shape s = values().first(3);
    if (by_channel) s.push_back(key_dim);
    return s;
  }
  Shape state() const { return {sequences(), heads, key_dim, value_dim}; }
  SeqLayout layout(Device device) const {
    return cu.empty() ? SeqLayout() : SeqLayout::packed(cu, device);
  }
};

std::vector<LinearAttentionCase> linear_attention_cases();
// With a decay per channel.
std::vector<LinearAttentionCase> channel_attention_cases();
std::vector<LinearAttentionCase> ssd_cases();

}  // namespace ebb::testing
