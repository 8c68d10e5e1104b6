// β = scale·σ(x) in f32 and its backward (ops/sigmoid_gate.h): one thread per four elements.
#include "cuda/activation.cuh"
#include "cuda/row_map.cuh"
#include "ops/sigmoid_gate.h"

namespace ebb::gpu {
namespace {

template <class T, int V>
struct Forward {
  const T* g_x;
  int64_t stride, width;
  float scale;
  float* g_y;
  __device__ void operator()(int64_t row, int64_t col) const {
    float r[V];
    load_pack(r, g_x + row * stride + col);
#pragma unroll
    for (int v = 0; v < V; ++v) r[v] = scale * exact_sigmoid(r[v]);
    store_pack(g_y + row * width + col, r);
  }
};

template <class T, int V>
struct Backward {
  const T* g_x;
  int64_t stride, width;
  float scale;
  const float* g_dy;
  T* g_dx;
  __device__ void operator()(int64_t row, int64_t col) const {
    float r[V], r_dy[V];
    load_pack(r, g_x + row * stride + col);
    load_pack(r_dy, g_dy + row * width + col);
#pragma unroll
    for (int v = 0; v < V; ++v) r[v] = r_dy[v] * scale * sigmoid_slope(r[v]);
    store_pack(g_dx + row * width + col, r);
  }
};

bool aligned(const Rows& x, const Tensor& dense) {
  return rows_aligned(x, 4) && rows_aligned(Rows{dense, x.count, x.width, x.width}, 4);
}

// fn<V> with packs of four or of one.
template <class F>
void visit_pack(bool wide, F&& f) {
  wide ? f.template operator()<4>() : f.template operator()<1>();
}

}  // namespace

void sigmoid_gate_fwd(const Rows& x, double scale, const Tensor& y) {
  visit_compute(x.t.dtype(), [&]<class T>() {
    visit_pack(aligned(x, y), [&]<int V>() {
      launch_rows(
          RowMap(x.count, x.width, V, is_dense(x)), stream_of(y),
          Forward<device_t<T>, V>{ptr<T>(x.t), x.stride, x.width, float(scale), ptr<float>(y)});
    });
  });
}

void sigmoid_gate_bwd(const Rows& x, double scale, const Tensor& dy, const Tensor& dx) {
  visit_compute(x.t.dtype(), [&]<class T>() {
    visit_pack(aligned(x, dy) && aligned(x, dx), [&]<int V>() {
      launch_rows(RowMap(x.count, x.width, V, is_dense(x)), stream_of(dx),
                  Backward<device_t<T>, V>{ptr<T>(x.t), x.stride, x.width, float(scale),
                                           ptr<float>(dy), ptr<T>(dx)});
    });
  });
}

}  // namespace ebb::gpu
