// SwiGLU, forward and backward (ops/swiglu.h): streaming, one thread per 16 bytes of every tensor.
#include "cuda/activation.cuh"
#include "cuda/row_map.cuh"
#include "ops/swiglu.h"

namespace ebb::gpu {
namespace {

template <class T>
struct RowPointer {
  T* g;
  int64_t stride;
  __device__ __forceinline__ T* at(int64_t row, int64_t col) const {
    return g + row * stride + col;
  }
};

template <class T>
RowPointer<device_t<T>> pointer(const Rows& r) {
  return {ptr<T>(r.t), r.stride};
}

template <class T, int V>
struct Forward {
  RowPointer<T> gate, up, y;
  __device__ void operator()(int64_t row, int64_t col) const {
    float r_a[V], r_b[V];
    load_pack(r_a, gate.at(row, col));
    load_pack(r_b, up.at(row, col));
#pragma unroll
    for (int v = 0; v < V; ++v) r_b[v] *= r_a[v] * fast_sigmoid(r_a[v]);
    store_pack(y.at(row, col), r_b);
  }
};

template <class T, int V>
struct Backward {
  RowPointer<T> gate, up, dy, dgate, dup;
  __device__ void operator()(int64_t row, int64_t col) const {
    float r_a[V], r_b[V], r_g[V];
    load_pack(r_a, gate.at(row, col));
    load_pack(r_b, up.at(row, col));
    load_pack(r_g, dy.at(row, col));
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const float sig = fast_sigmoid(r_a[v]), silu = r_a[v] * sig;
      r_b[v] *= r_g[v] * sig * fmaf(r_a[v], 1.f - sig, 1.f);
      r_g[v] *= silu;
    }
    if (dgate.g) store_pack(dgate.at(row, col), r_b);
    if (dup.g) store_pack(dup.at(row, col), r_g);
  }
};

}  // namespace

void swiglu_fwd(const Rows& gate, const Rows& up, const Tensor& y) {
  visit_compute(y.dtype(), [&]<class T>() {
    constexpr int V = 16 / int(sizeof(T));
    const Rows out{y, gate.count, gate.width, gate.width};
    const bool dense = is_dense(gate) && is_dense(up);
    const auto run = [&]<int N>() {
      launch_rows(RowMap(gate.count, gate.width, N, dense), stream_of(y),
                  Forward<device_t<T>, N>{pointer<T>(gate), pointer<T>(up), pointer<T>(out)});
    };
    if (rows_aligned(gate, V) && rows_aligned(up, V) && rows_aligned(out, V))
      run.template operator()<V>();
    else
      run.template operator()<1>();
  });
}

void swiglu_bwd(const Rows& gate, const Rows& up, const Rows& dy, const Rows& dgate,
                const Rows& dup) {
  visit_compute(gate.t.dtype(), [&]<class T>() {
    constexpr int V = 16 / int(sizeof(T));
    bool dense = true, aligned = true;
    for (const Rows* r : {&gate, &up, &dy, &dgate, &dup}) {
      if (!r->t) continue;
      dense = dense && is_dense(*r);
      aligned = aligned && rows_aligned(*r, V);
    }
    const auto run = [&]<int N>() {
      launch_rows(RowMap(gate.count, gate.width, N, dense), stream_of(gate.t),
                  Backward<device_t<T>, N>{pointer<T>(gate), pointer<T>(up), pointer<T>(dy),
                                           pointer<T>(dgate), pointer<T>(dup)});
    };
    if (aligned)
      run.template operator()<V>();
    else
      run.template operator()<1>();
  });
}

}  // namespace ebb::gpu
