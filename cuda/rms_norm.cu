// RMSNorm with optional residual add, forward and backward (ops/rms_norm.h). T: x, y, dx; R: the
// residual stream. Rows on threads: cuda/norm_rows.cuh.
#include "cuda/norm_sums.cuh"
#include "ops/rms_norm.h"

namespace ebb::gpu {
namespace {

// 1 u = x (+ residual, rounded to the stream's type), 2 r = 1/sqrt(mean u² + eps), 3 y = u·r·w.
template <class T, class R, bool kAdd, int N, bool kWide>
__global__ void __launch_bounds__(kRowThreads, kWide ? 2 : 3)
    fwd_kernel(RowPlan plan, Rows<T> g_x, Rows<R> g_res, const float* g_w, float eps, Rows<T> g_y,
               Rows<R> g_u, float* g_r) {
  constexpr bool kAhead = fetch_ahead<R, N, kWide>(kAdd ? 2 : 1);
  struct Inputs {
    RowValues<T, N> x;
    RowValues<R, kAdd ? N : 1> res;
  } in, next;
  __shared__ float s_sums[2][kRowThreads / 32][1];
  RowSums<1> row_sum{s_sums};
  RowWalk<N, kWide> at(plan);
  float w[kRowValues], u[kRowValues];
  const float per_value = 1.f / float(at.width);
  const auto load = [&](Inputs& to, int64_t token, int64_t tile) {
    to.x.load(g_x, token, at, tile);
    if constexpr (kAdd) to.res.load(g_res, token, at, tile);
  };
  if (!kWide) load_columns(w, g_w, at, 0, 1.f);
  if (kAhead) load(next, at.token, 0);
  for (; at.more(); at.step()) {
    if (kAhead) {
      in = next;
      load(next, at.token + at.stride, 0);
    } else if (!kWide) {
      load(in, at.token, 0);
    }
    float sum[1] = {0};
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) load(in, at.token, tile);
      each_value([&](int v) {  // 1
        u[v] = in.x.at(v);
        if constexpr (kAdd) u[v] = to_float(from_float<R>(u[v] + in.res.at(v)));
        sum[0] += u[v] * u[v];
      });
      if constexpr (kAdd) store_row(g_u, at, tile, [&](int v) { return u[v]; });
    }
    row_sum(sum, at);
    const float r = rstd_of(sum[0] * per_value, eps);  // 2
    if (g_r && at.lane == 0 && at.active()) g_r[at.row()] = r;
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) {
        load_columns(w, g_w, at, tile, 1.f);
        load(in, at.token, tile);
        each_value([&](int v) {
          u[v] = in.x.at(v);
          if constexpr (kAdd) u[v] = to_float(from_float<R>(u[v] + in.res.at(v)));
        });
      }
      store_row(g_y, at, tile, [&](int v) { return u[v] * r * w[v]; });  // 3
    }
  }
}

// With û = u·r and c = dy·w: 1 dot = mean c·û, 2 g = r (c − û·dot) (+ du), the gradient of x and of
// the residual alike, 3 dw += dy·û.
template <class T, class R, bool kDu, int N, bool kWide>
__global__ void __launch_bounds__(kRowThreads, 2)
    bwd_kernel(RowPlan plan, Rows<R> g_u, const float* g_w, const float* g_r, Rows<T> g_dy,
               Rows<R> g_du, Rows<T> g_dx, Rows<R> g_dres, float* g_partial) {
  constexpr bool kAhead = fetch_ahead<R, N, kWide>(kDu ? 3 : 2);
  struct Inputs {
    RowValues<R, N> u;
    RowValues<T, N> dy;
    RowValues<R, kDu ? N : 1> du;
    float r;
  } in, next;
  __shared__ float s_sums[2][kRowThreads / 32][1];
  __shared__ alignas(16) float s_columns[kWide ? 1 : kRowThreads * kRowValues];
  RowSums<1> row_sum{s_sums};
  RowWalk<N, kWide> at(plan);
  ColumnSums<N, kWide> dw(g_partial, at);
  float w[kRowValues];
  const float per_value = 1.f / float(at.width);
  const auto load = [&](Inputs& to, int64_t token, int64_t tile) {
    to.u.load(g_u, token, at, tile);
    to.dy.load(g_dy, token, at, tile);
    if constexpr (kDu) to.du.load(g_du, token, at, tile);
    to.r = token < at.tokens ? g_r[at.row(token)] : 0.f;
  };
  if (!kWide) load_columns(w, g_w, at, 0, 1.f);
  if (kAhead) load(next, at.token, 0);
  for (; at.more(); at.step()) {
    if (kAhead) {
      in = next;
      load(next, at.token + at.stride, 0);
    } else if (!kWide) {
      load(in, at.token, 0);
    }
    float dot[1] = {0};
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) {
        load(in, at.token, tile);
        load_columns(w, g_w, at, tile, 1.f);
      }
      each_value([&](int v) { dot[0] += in.dy.at(v) * w[v] * in.u.at(v); });
    }
    row_sum(dot, at);
    in.u.forget_copies(), in.dy.forget_copies();
    const float r = in.r, mean = dot[0] * r * per_value;  // 1
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) {
        load(in, at.token, tile);
        load_columns(w, g_w, at, tile, 1.f);
      }
      const auto g = [&](int v) {  // 2
        float x = r * (in.dy.at(v) * w[v] - in.u.at(v) * r * mean);
        if constexpr (kDu) x += in.du.at(v);
        return x;
      };
      if (g_dx.p) store_row(g_dx, at, tile, g);
      if (g_dres.p) store_row(g_dres, at, tile, g);
      each_value([&](int v) { dw.add(v, in.dy.at(v) * (in.u.at(v) * r)); });  // 3
      dw.end_tile(at, tile);
    }
  }
  dw.finish(at, s_columns);
}

}  // namespace

void rms_norm_fwd(const Tensor& x, const Tensor& residual, const Tensor& w, float eps,
                  const Tensor& y, const Tensor& u, const Tensor& r) {
  if (x.numel() == 0) return;
  RowPlan plan = plan_rows(x, {&x, &residual, &y, &u}, {&w});
  visit_compute(x.dtype(), [&]<class T>() {
    visit_rows<T>(plan, [&]<int N, bool kWide>() {
      const auto launch = [&]<class R, bool kAdd>() {
        constexpr auto kKernel = fwd_kernel<device_t<T>, device_t<R>, kAdd, N, kWide>;
        fill_device<kKernel>(plan, x.device());
        launch_rows<kKernel>(plan, x, rows_of<T>(x), rows_of<R>(residual), ptr<float>(w), eps,
                             rows_of<T>(y), rows_of<R>(u), ptr<float>(r));
      };
      if (!residual)
        launch.template operator()<T, false>();
      else if (residual.dtype() == x.dtype())
        launch.template operator()<T, true>();
      else
        launch.template operator()<float, true>();
    });
  });
}

void rms_norm_bwd(const Tensor& u, const Tensor& w, const Tensor& r, const Tensor& dy,
                  const Tensor& du, const Tensor& dx, const Tensor& dresidual, const Tensor& dw) {
  if (u.numel() == 0) {
    if (dw.defined()) dw.zero_();
    return;
  }
  RowPlan plan = plan_rows(u, {&u, &dy, &du, &dx, &dresidual}, {&w, &dw});
  visit_compute(dy.dtype(), [&]<class T>() {
    visit_rows<T>(plan, [&]<int N, bool kWide>() {
      const auto launch = [&]<class R, bool kDu>() {
        constexpr auto kKernel = bwd_kernel<device_t<T>, device_t<R>, kDu, N, kWide>;
        fill_device<kKernel>(plan, u.device());
        const Tensor partial =
            dw ? Tensor::empty({plan.blocks, u.size(1), u.size(2)}, DType::f32, u.device())
               : Tensor();
        launch_rows<kKernel>(plan, u, rows_of<R>(u), ptr<float>(w), ptr<float>(r), rows_of<T>(dy),
                             rows_of<R>(du), rows_of<T>(dx), rows_of<R>(dresidual),
                             ptr<float>(partial));
        if (dw) sum_partials(partial, dw);
      };
      const auto launch_stream = [&]<class R>() {
        if (du)
          launch.template operator()<R, true>();
        else
          launch.template operator()<R, false>();
      };
      if (u.dtype() == dy.dtype())
        launch_stream.template operator()<T>();
      else
        launch_stream.template operator()<float>();
    });
  });
}

}  // namespace ebb::gpu
