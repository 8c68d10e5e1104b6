// Host vectors for kernels whose matrices are small (a chunk, a head): transposition, packing with
// zero padding. Padded widths are multiples of kLanes<T>, so inner loops have no
// tails.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace ebb::simd {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <class T>
inline constexpr int kLanes = kVectorBytes / int(sizeof(T));
template <class T>
struct vector_of {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
};
template <class T>
using Vec = typename vector_of<T>::type;

template <class T>
inline Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename vector_of<T>::unaligned*>(p);
}
template <class T>
inline void store(T* p, Vec<T> v) {
  *reinterpret_cast<typename vector_of<T>::unaligned*>(p) = v;
}
// s·x + y, rounded once, in every instance: contraction left to the compiler differs between them.
template <class T>
inline Vec<T> fused(T s, Vec<T> x, Vec<T> y) {
  for (int i = 0; i < kLanes<T>; ++i) y[i] = std::fma(s, x[i], y[i]);
  return y;
}
template <class T>
inline int64_t padded(int64_t n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// One thread's working memory, handed out in aligned, zero-initialised pieces; all of it lives as
// long as the Scratch.
template <class T>
class Scratch {
 public:
  T* take(int64_t n) {
    constexpr int64_t kAlign = 64 / int64_t(sizeof(T));
    pieces_.emplace_back(size_t(n + kAlign), T(0));
    T* p = pieces_.back().data();
    const auto address = reinterpret_cast<uintptr_t>(p);
    return p + (64 - address % 64) % 64 / sizeof(T);
  }

 private:
  std::vector<std::vector<T>> pieces_;
};

// dst[r,c] = src[r,c] for r < rows, c < cols; zero up to `width` columns.
template <class T>
void pack(const T* src, int64_t src_stride, int64_t rows, int64_t cols, T* dst, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(dst + r * width, src + r * src_stride, size_t(cols) * sizeof(T));
    std::fill(dst + r * width + cols, dst + (r + 1) * width, T(0));
  }
}
// The matrix itself where its rows already lie that wide, else a padded copy in `buffer`.
template <class T>
const T* dense(const T* src, int64_t src_stride, int64_t rows, int64_t cols, T* buffer,
               int64_t width) {
  if (src_stride == width) return src;
  pack(src, src_stride, rows, cols, buffer, width);
  return buffer;
}
template <class T>
void unpack(const T* src, int64_t width, int64_t rows, int64_t cols, T* dst, int64_t dst_stride) {
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(dst + r * dst_stride, src + r * width, size_t(cols) * sizeof(T));
}

namespace detail {
// One stage of the in-register transposition: exchanges the off-diagonal S×S blocks of x and y.
template <class T, int S, size_t... J>
inline void exchange(Vec<T>& x, Vec<T>& y, std::index_sequence<J...>) {
  constexpr int n = kLanes<T>;
  const Vec<T> a = x, b = y;
  x = __builtin_shufflevector(a, b, (int(J) & S ? n + int(J) - S : int(J))...);
  y = __builtin_shufflevector(a, b, (int(J) & S ? n + int(J) : int(J) + S)...);
}
template <class T, int S>
inline void transpose_stages(Vec<T> (&row)[kLanes<T>]) {
  if constexpr (S < kLanes<T>) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i)
      if (!(i & S)) exchange<T, S>(row[i], row[i + S], std::make_index_sequence<kLanes<T>>());
    transpose_stages<T, 2 * S>(row);
  }
}
}  // namespace detail

// out[c,r] = in[r,c]; cols a multiple of kLanes<T>. Columns of `out` up to the next multiple of
// kLanes<T> after `rows` are zero.
template <class T>
void transpose(const T* in, int64_t in_stride, int64_t rows, int64_t cols, T* out,
               int64_t out_stride) {
  constexpr int n = kLanes<T>;
  for (int64_t r = 0; r < rows; r += n) {
    const int64_t here = std::min<int64_t>(n, rows - r);
    for (int64_t c = 0; c < cols; c += n) {
      Vec<T> block[n];
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i)
        block[i] = i < here ? load(in + (r + i) * in_stride + c) : Vec<T>{};
      detail::transpose_stages<T, 1>(block);
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) store(out + (c + i) * out_stride + r, block[i]);
    }
  }
}

}  // namespace ebb::simd
