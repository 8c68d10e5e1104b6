#include "ops/seq_layout.h"

#include <algorithm>

#include "tensor/check.h"

namespace ebb {

SeqLayout SeqLayout::packed(const std::vector<int64_t>& cu_seqlens, Device device) {
  check(!cu_seqlens.empty() && cu_seqlens.front() == 0,
        "SeqLayout: cu_seqlens must start with 0 and have N+1 entries");
  SeqLayout s;
  s.packed_ = true;
  s.host_ = cu_seqlens;
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    check(cu_seqlens[i] >= cu_seqlens[i - 1], "SeqLayout: cu_seqlens[{}] = {} is below {}", i,
          cu_seqlens[i], cu_seqlens[i - 1]);
    s.max_length_ = std::max(s.max_length_, cu_seqlens[i] - cu_seqlens[i - 1]);
  }
  s.offsets_ = Tensor::from(cu_seqlens, {int64_t(cu_seqlens.size())}, device);
  return s;
}

void SeqLayout::check_covers(const char* op, int64_t batch, int64_t time, Device device) const {
  if (!packed_) return;
  check(host_.back() == batch * time, "{}: cu_seqlens ends at {}, the input has {}x{} tokens", op,
        host_.back(), batch, time);
  check(offsets_.device() == device, "{}: the SeqLayout is on {}, the input on {}", op,
        offsets_.device(), device);
}

int64_t SeqLayout::chunk_count(int64_t batch, int64_t time, int64_t chunk) const {
  if (!packed_) return batch * ((time + chunk - 1) / chunk);
  int64_t n = 0;
  for (size_t i = 1; i < host_.size(); ++i) n += (host_[i] - host_[i - 1] + chunk - 1) / chunk;
  return n;
}

Tensor SeqLayout::chunk_offsets(int64_t batch, int64_t time, int64_t chunk, Device device) const {
  const int64_t n = count(batch);
  std::vector<int64_t> before(size_t(n) + 1, 0);
  for (int64_t i = 0; i < n; ++i)
    before[size_t(i) + 1] = before[size_t(i)] + (end(i, time) - begin(i, time) + chunk - 1) / chunk;
  return Tensor::from(before, {n + 1}, device);
}

}  // namespace ebb
