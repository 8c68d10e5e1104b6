// SequenceCursor: the sequence a token belongs to, for code that walks along the flat B·T tokens
// on either device (plain constexpr members, which nvcc compiles for both).
//   SequenceCursor s = ...;  s.seek(f);
//   for (; f < f1; ++f) { if (f == s.end) s.next(); ... }
// `cu` points at SeqLayout's offsets where the kernel runs; null: every `time` tokens are one
// sequence. Empty sequences are passed over.
#pragma once
#include <cstdint>

#include "ops/seq_layout.h"

namespace ebb {

struct SequenceCursor {
  const int64_t* cu = nullptr;  // [N+1]
  int64_t time = 0;             // length of each sequence when cu is null
  int64_t count = 0;            // N
  int64_t n = 0, begin = 0, end = 0;

  // The n-th sequence, possibly empty.
  constexpr void select(int64_t index) {
    n = index;
    begin = cu ? cu[n] : n * time;
    end = cu ? cu[n + 1] : begin + time;
  }
  // The sequence that holds `token` (0 <= token < B·T).
  constexpr void seek(int64_t token) {
    if (!cu) return select(token / time);
    int64_t low = 0, high = count;  // the last n with cu[n] <= token: past any empty ones
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (cu[middle] <= token)
        low = middle;
      else
        high = middle;
    }
    select(low);
  }
  constexpr void next() {
    do select(n + 1);
    while (begin == end && n + 1 < count);
  }
  constexpr void previous() {
    do select(n - 1);
    while (begin == end && n > 0);
  }
};

// offsets: SeqLayout::device_offsets(), or undefined for a dense [batch,time].
inline SequenceCursor sequence_cursor(const Tensor& offsets, int64_t batch, int64_t time) {
  SequenceCursor s;
  s.cu = offsets.defined() ? offsets.data<int64_t>() : nullptr;
  s.time = time;
  s.count = s.cu ? offsets.numel() - 1 : batch;
  return s;
}

}  // namespace ebb
