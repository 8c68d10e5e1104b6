// Shared by the kernels of causal softmax attention (attention*.cu): the problem as raw pointers,
// and where a tile of queries or of keys lies.
#pragma once
#include "cuda/common.cuh"
#include "ops/attention.h"
#include "ops/sequence_cursor.h"

namespace ebb::gpu::attend {

// Tokens of one axis, queries or keys, in tiles that end with their sequence.
struct Axis {
  SequenceCursor cursor = {};            // sequences over the flat tokens
  const int64_t* tiles_before = {};      // [N+1] tiles before each sequence; null: dense
  int64_t tiles = 0, tiles_per_row = 0;  // of all sequences; dense, of one
};

template <class T>
struct Problem {
  const T *q, *k, *v;  // [tokens,H,P], [key tokens,Hkv,P]
  T* o;                // [tokens,H,P]
  float* lse;          // [tokens,H]
  float scale;
  int64_t window;  // as long as all sequences where there is none
  int heads, key_heads, width;
  int64_t tokens, sequences;
  Axis query, key;

  __host__ __device__ int64_t at(int64_t t, int h) const { return (t * heads + h) * width; }
  __host__ __device__ int64_t key_at(int64_t t, int h) const { return (t * key_heads + h) * width; }
  __host__ __device__ int64_t stride() const { return int64_t(heads) * width; }
  __host__ __device__ int64_t key_stride() const { return int64_t(key_heads) * width; }
};

template <class T>
struct Backward : Problem<T> {
  const T* d_o = {};               // [tokens,H,P]
  float* delta = {};               // [tokens,H]: dO·o
  T *dq = {}, *dk = {}, *dv = {};  // null: not wanted
};

// A tile and its sequence. Query i of the sequence stands at position i + before among the keys.
struct Tile {
  int64_t first = 0;           // row of the sequence
  int rows = 0;                // 0: no such tile
  int64_t query = 0, key = 0;  // first flat tokens of the sequence
  int64_t queries = 0, keys = 0;

  __device__ __forceinline__ int64_t before() const { return keys - queries; }
};

#ifdef __CUDACC__
// Tile `index` of `axis`, which is p.query or p.key, SIZE rows each.
template <int SIZE, class T>
__device__ __forceinline__ Tile tile_of(const Problem<T>& p, const Axis& axis, bool of_keys,
                                        int64_t index) {
  Tile t;
  int64_t n;
  if (axis.tiles_before) {
    int64_t low = 0, high = p.sequences;  // the last n with tiles_before[n] <= index
    if (high == 0 || index >= axis.tiles_before[high]) return t;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (axis.tiles_before[middle] <= index)
        low = middle;
      else
        high = middle;
    }
    n = low;
    index -= axis.tiles_before[n];
  } else {
    n = index / axis.tiles_per_row;
    index -= n * axis.tiles_per_row;
  }
  SequenceCursor queries = p.query.cursor, keys = p.key.cursor;
  queries.select(n), keys.select(n);
  t.query = queries.begin, t.queries = queries.end - queries.begin;
  t.key = keys.begin, t.keys = keys.end - keys.begin;
  t.first = index * SIZE;
  const int64_t left = (of_keys ? t.keys : t.queries) - t.first;
  t.rows = int(left < SIZE ? left : SIZE);
  return t;
}
#endif

// The device's view in tiles of these sizes. `offsets` holds what it points at.
struct Offsets {
  Tensor query, key;
};
template <class T>
Problem<device_t<T>> make_problem(const AttentionProblem& p, const Tensor& o, const Tensor& lse,
                                  int64_t query_tile, int64_t key_tile, Offsets* offsets);
// delta [tokens,H] = dO·o.
template <class T>
void row_products(const T* a, const T* b, int64_t rows, int width, float* out, cudaStream_t stream);

}  // namespace ebb::gpu::attend
