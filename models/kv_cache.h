// Keys and values of past tokens, as the tensors of a MixerState, one row per sequence:
//   keys, values [N,C,Hkv,P]; position i64 [N], on the CPU: tokens seen so far.
// The token at position p lies in row p mod C. With a window C is the window and the cache a ring;
// without one C exceeds every position and grows when it is reached.
#pragma once
#include "nn/mixer.h"

namespace ebb {

class KvCache {
 public:
  KvCache(int64_t key_heads, int64_t head_dim, int64_t window /*0: none*/)
      : heads_(key_heads), width_(head_dim), window_(window) {}

  MixerState zero_state(int64_t n, DType activations, Device device) const;

  // New keys and values [B,T,Hkv,P] of sequences that `state` (null: fresh) holds the past of.
  struct Extended {
    Tensor keys, values;     // [1,S,Hkv,P]: of each sequence the rows still in sight, then the new
    SeqLayout layout = {};   // of those
    SeqLayout queries = {};  // of the new tokens, packed
  };
  Extended extend(const MixerState* state, const Tensor& keys, const Tensor& values,
                  const SeqLayout& layout) const;
  // The state after them.
  MixerState after(const MixerState* state, const Tensor& keys, const Tensor& values,
                   const SeqLayout& layout) const;
  // Makes room for one more token of every sequence.
  void reserve_next(MixerState* state) const;

 private:
  int64_t rows_for(int64_t tokens) const;
  int64_t heads_, width_, window_;
};

}  // namespace ebb
