// LayerNorm and GroupNorm, forward and backward (ops/layer_norm.h). Rows are slices of the last
// axis; rows on threads: cuda/norm_rows.cuh.
#include "cuda/norm_sums.cuh"
#include "ops/layer_norm.h"

namespace ebb::gpu {
namespace {

// 1 m = mean x, 2 r = 1/sqrt(mean (x−m)² + eps), 3 y = (x−m)·r·w + b.
template <class T, int N, bool kWide>
__global__ void __launch_bounds__(kRowThreads, kWide ? 2 : 3)
    fwd_kernel(RowPlan plan, Rows<T> g_x, const float* g_w, const float* g_b, float eps,
               Rows<T> g_y, float* g_m, float* g_r) {
  constexpr bool kAhead = fetch_ahead<T, N, kWide>(2);  // w and b take their share
  __shared__ float s_sums[2][kRowThreads / 32][1];
  RowSums<1> row_sum{s_sums};
  RowWalk<N, kWide> at(plan);
  RowValues<T, N> x, next;
  float w[kRowValues], b[kRowValues];
  const float per_value = 1.f / float(at.width);
  if (!kWide) {
    load_columns(w, g_w, at, 0, 1.f);
    load_columns(b, g_b, at, 0, 0.f);
  }
  if (kAhead) next.load(g_x, at.token, at);
  for (; at.more(); at.step()) {
    if (kAhead) {
      x = next;
      next.load(g_x, at.token + at.stride, at);
    } else if (!kWide) {
      x.load(g_x, at.token, at);
    }
    float sum[1] = {0};
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) x.load(g_x, at.token, at, tile);
      each_value([&](int v) { sum[0] += x.at(v); });
    }
    row_sum(sum, at);
    const float m = sum[0] * per_value;  // 1
    sum[0] = 0;
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) x.load(g_x, at.token, at, tile);
      each_value([&](int v) {
        const float deviation = at.inside(v, tile) ? x.at(v) - m : 0.f;
        sum[0] += deviation * deviation;
      });
    }
    row_sum(sum, at);
    const float r = rstd_of(sum[0] * per_value, eps);  // 2
    if (at.lane == 0 && at.active()) {
      if (g_m) g_m[at.row()] = m;
      if (g_r) g_r[at.row()] = r;
    }
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) {
        x.load(g_x, at.token, at, tile);
        load_columns(w, g_w, at, tile, 1.f);
        load_columns(b, g_b, at, tile, 0.f);
      }
      store_row(g_y, at, tile, [&](int v) { return (x.at(v) - m) * r * w[v] + b[v]; });  // 3
    }
  }
}

// With c = dy·w: 1 mean c and mean c·x̂ in one exchange, 2 dx = r (c − mean c − x̂·mean c·x̂),
// 3 dw += dy·x̂, db += dy.
template <class T, int N, bool kWide>
__global__ void __launch_bounds__(kRowThreads, 2)
    bwd_kernel(RowPlan plan, Rows<T> g_x, const float* g_w, const float* g_m, const float* g_r,
               Rows<T> g_dy, Rows<T> g_dx, float* g_partial_w, float* g_partial_b) {
  constexpr bool kAhead = fetch_ahead<T, N, kWide>(2);
  struct Inputs {
    RowValues<T, N> x, dy;
    float m, r;
  } in, next;
  __shared__ float s_sums[2][kRowThreads / 32][2];
  __shared__ alignas(16) float s_columns[kWide ? 1 : kRowThreads * kRowValues];
  RowSums<2> row_sum{s_sums};
  RowWalk<N, kWide> at(plan);
  ColumnSums<N, kWide> dw(g_partial_w, at), db(g_partial_b, at);
  const ParkedWeights<N, kWide> weights(g_w, s_columns, at);  // the buffer is free until the end
  const float per_value = 1.f / float(at.width);
  const auto load = [&](Inputs& to, int64_t token, int64_t tile) {
    to.x.load(g_x, token, at, tile);
    to.dy.load(g_dy, token, at, tile);
    to.m = token < at.tokens ? g_m[at.row(token)] : 0.f;
    to.r = token < at.tokens ? g_r[at.row(token)] : 0.f;
  };
  if (kAhead) load(next, at.token, 0);
  for (; at.more(); at.step()) {
    if (kAhead) {
      in = next;
      load(next, at.token + at.stride, 0);
    } else if (!kWide) {
      load(in, at.token, 0);
    }
    const auto hat = [&](int v) { return (in.x.at(v) - in.m) * in.r; };
    float sum[2] = {0, 0};
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) load(in, at.token, tile);
      each_pack<N>([&](int p, int v0) {
        float w[N];
        weights.get(w, at, tile, p);
        for (int i = 0, v = v0; i < N; ++i, ++v) {
          const float c = in.dy.at(v) * w[i];
          sum[0] += c;
          sum[1] += c * hat(v);
        }
      });
    }
    row_sum(sum, at);
    in.x.forget_copies(), in.dy.forget_copies();
    const float mean = sum[0] * per_value, dot = sum[1] * per_value;  // 1
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) load(in, at.token, tile);
      each_pack<N>([&](int p, int v0) {
        float w[N];
        weights.get(w, at, tile, p);
        const auto dx = [&](int v) {  // 2
          return in.r * (in.dy.at(v) * w[v - v0] - mean - hat(v) * dot);
        };
        if (g_dx.p) store_row_pack(g_dx, at, tile, p, dx);
        for (int v = v0; v < v0 + N; ++v) {  // 3
          dw.add(v, in.dy.at(v) * hat(v));
          db.add(v, in.dy.at(v));
        }
      });
      dw.end_tile(at, tile);
      db.end_tile(at, tile);
    }
  }
  dw.finish(at, s_columns);
  db.finish(at, s_columns);
}

}  // namespace

void layer_norm_fwd(const Tensor& x, const Tensor& w, const Tensor& b, float eps, const Tensor& y,
                    const Tensor& m, const Tensor& r) {
  if (x.numel() == 0) return;
  RowPlan plan = plan_rows(x, {&x, &y}, {&w, &b});
  visit_compute(x.dtype(), [&]<class T>() {
    visit_rows<T>(plan, [&]<int N, bool kWide>() {
      constexpr auto kKernel = fwd_kernel<device_t<T>, N, kWide>;
      fill_device<kKernel>(plan, x.device());
      launch_rows<kKernel>(plan, x, rows_of<T>(x), ptr<float>(w), ptr<float>(b), eps, rows_of<T>(y),
                           ptr<float>(m), ptr<float>(r));
    });
  });
}

void layer_norm_bwd(const Tensor& x, const Tensor& w, const Tensor& m, const Tensor& r,
                    const Tensor& dy, const Tensor& dx, const Tensor& dw, const Tensor& db) {
  if (x.numel() == 0) {
    if (dw.defined()) dw.zero_();
    if (db.defined()) db.zero_();
    return;
  }
  RowPlan plan = plan_rows(x, {&x, &dy, &dx}, {&w, &dw, &db});
  visit_compute(x.dtype(), [&]<class T>() {
    visit_rows<T>(plan, [&]<int N, bool kWide>() {
      constexpr auto kKernel = bwd_kernel<device_t<T>, N, kWide>;
      fill_device<kKernel>(plan, x.device());
      const auto partial = [&](const Tensor& to) {
        return to ? Tensor::empty({plan.blocks, x.size(1), x.size(2)}, DType::f32, x.device())
                  : Tensor();
      };
      const Tensor partial_w = partial(dw), partial_b = partial(db);
      launch_rows<kKernel>(plan, x, rows_of<T>(x), ptr<float>(w), ptr<float>(m), ptr<float>(r),
                           rows_of<T>(dy), rows_of<T>(dx), ptr<float>(partial_w),
                           ptr<float>(partial_b));
      sum_partials(partial_w, dw, partial_b, db);
    });
  });
}

}  // namespace ebb::gpu
