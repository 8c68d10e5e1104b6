// L2 normalisation, forward and backward (ops/l2_norm.h). Rows on threads: cuda/norm_rows.cuh.
#include "cuda/norm_sums.cuh"
#include "ops/l2_norm.h"

namespace ebb::gpu {
namespace {

// 1 x into registers, 2 r = 1/sqrt(Σx² + eps), 3 y = x·r.
template <class T, int N, bool kWide>
__global__ void __launch_bounds__(kRowThreads, 4)
    fwd_kernel(RowPlan plan, Rows<T> g_x, float eps, Rows<T> g_y, float* g_r) {
  constexpr bool kAhead = fetch_ahead<T, N, kWide>(1);
  __shared__ float s_sums[2][kRowThreads / 32][1];
  RowSums<1> row_sum{s_sums};
  RowWalk<N, kWide> at(plan);
  RowValues<T, N> x, next;
  if (kAhead) next.load(g_x, at.token, at);
  for (; at.more(); at.step()) {
    if (kAhead) {  // 1
      x = next;
      next.load(g_x, at.token + at.stride, at);
    } else if (!kWide) {
      x.load(g_x, at.token, at);
    }
    float sum[1] = {0};
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) x.load(g_x, at.token, at, tile);
      each_value([&](int v) { sum[0] += x.at(v) * x.at(v); });
    }
    row_sum(sum, at);
    const float r = rstd_of(sum[0], eps);  // 2
    if (g_r && at.lane == 0 && at.active()) g_r[at.row()] = r;
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) x.load(g_x, at.token, at, tile);
      store_row(g_y, at, tile, [&](int v) { return x.at(v) * r; });  // 3
    }
  }
}

// 1 y, dy into registers, 2 dot = Σ y·dy, 3 dx = r (dy − y·dot).
template <class T, int N, bool kWide>
__global__ void __launch_bounds__(kRowThreads, 3)
    bwd_kernel(RowPlan plan, Rows<T> g_y, const float* g_r, Rows<T> g_dy, Rows<T> g_dx) {
  constexpr bool kAhead = fetch_ahead<T, N, kWide>(2);
  struct Inputs {
    RowValues<T, N> y, dy;
    float r;
  } in, next;
  __shared__ float s_sums[2][kRowThreads / 32][1];
  RowSums<1> row_sum{s_sums};
  RowWalk<N, kWide> at(plan);
  const auto load = [&](Inputs& to, int64_t token, int64_t tile) {
    to.y.load(g_y, token, at, tile);
    to.dy.load(g_dy, token, at, tile);
    to.r = token < at.tokens ? g_r[at.row(token)] : 0.f;
  };
  if (kAhead) load(next, at.token, 0);
  for (; at.more(); at.step()) {
    if (kAhead) {  // 1
      in = next;
      load(next, at.token + at.stride, 0);
    } else if (!kWide) {
      load(in, at.token, 0);
    }
    float dot[1] = {0};
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) load(in, at.token, tile);
      each_value([&](int v) { dot[0] += in.y.at(v) * in.dy.at(v); });
    }
    row_sum(dot, at);
    in.y.forget_copies(), in.dy.forget_copies();
    // 2
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) load(in, at.token, tile);
      store_row(g_dx, at, tile, [&](int v) { return in.r * (in.dy.at(v) - in.y.at(v) * dot[0]); });
    }  // 3
  }
}

}  // namespace

void l2_norm_fwd(const Tensor& x, float eps, const Tensor& y, const Tensor& r) {
  if (x.numel() == 0) return;
  RowPlan plan = plan_rows(x, {&x, &y}, {});
  visit_compute(x.dtype(), [&]<class T>() {
    visit_rows<T>(plan, [&]<int N, bool kWide>() {
      constexpr auto kKernel = fwd_kernel<device_t<T>, N, kWide>;
      fill_device<kKernel>(plan, x.device());
      launch_rows<kKernel>(plan, x, rows_of<T>(x), eps, rows_of<T>(y), ptr<float>(r));
    });
  });
}

void l2_norm_bwd(const Tensor& y, const Tensor& r, const Tensor& dy, const Tensor& dx) {
  if (y.numel() == 0) return;
  RowPlan plan = plan_rows(y, {&y, &dy, &dx}, {});
  visit_compute(y.dtype(), [&]<class T>() {
    visit_rows<T>(plan, [&]<int N, bool kWide>() {
      constexpr auto kKernel = bwd_kernel<device_t<T>, N, kWide>;
      fill_device<kKernel>(plan, y.device());
      launch_rows<kKernel>(plan, y, rows_of<T>(y), ptr<float>(r), rows_of<T>(dy), rows_of<T>(dx));
    });
  });
}

}  // namespace ebb::gpu
