// SeqLayout: the one description of how a token axis is cut into sequences.
//   SeqLayout dense;                                    // every row of [B,T] is one sequence
//   SeqLayout packed = SeqLayout::packed({0, 3, 8}, Device::cuda());   // over the B·T flat tokens
// Packed sequences may be empty; initial and final states then have one row per sequence.
#pragma once
#include <cstdint>
#include <vector>

#include "tensor/tensor.h"

namespace ebb {

class SeqLayout {
 public:
  SeqLayout() = default;
  // cu_seqlens: N+1 non-decreasing offsets into the flat B·T tokens, first 0, last B·T. The
  // contents live on `device` (i32... i64 [N+1]) and host copies serve as bounds.
  static SeqLayout packed(const std::vector<int64_t>& cu_seqlens, Device device = {});

  bool is_packed() const { return packed_; }
  // Number of sequences in a [B,T] batch.
  int64_t count(int64_t batch) const { return packed_ ? int64_t(host_.size()) - 1 : batch; }
  // Throws, naming op, when the offsets do not cover batch·time tokens.
  void check_covers(const char* op, int64_t batch, int64_t time, Device device) const;
  const std::vector<int64_t>& host() const { return host_; }  // [N+1]; empty when dense
  const Tensor& device_offsets() const { return offsets_; }   // i64 [N+1] on the device
  int64_t max_length() const { return max_length_; }          // 0 when dense
  // Begin and end of sequence n in flat tokens, for a [batch, time] batch (host side).
  int64_t begin(int64_t n, int64_t time) const { return packed_ ? host_[size_t(n)] : n * time; }
  int64_t end(int64_t n, int64_t time) const {
    return packed_ ? host_[size_t(n) + 1] : (n + 1) * time;
  }
  // Number of chunks of C tokens each (ragged last ones count), for sizing buffers and grids.
  int64_t chunk_count(int64_t batch, int64_t time, int64_t chunk) const;
  // i64 [N+1] on the device: how many chunks of C tokens lie before each sequence. Cached.
  Tensor chunk_offsets(int64_t batch, int64_t time, int64_t chunk, Device device) const;

 private:
  bool packed_ = false;
  std::vector<int64_t> host_;
  Tensor offsets_;
  int64_t max_length_ = 0;
};

}  // namespace ebb
