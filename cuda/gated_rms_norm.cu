// RMSNorm with an output gate, both orders, forward and backward (ops/gated_rms_norm.h). Rows are
// slices of the last axis; rows on threads: cuda/norm_rows.cuh.
#include "cuda/norm_sums.cuh"
#include "ops/gated_rms_norm.h"

namespace ebb::gpu {
namespace {

// σ(z) with the hardware's exponential and reciprocal (a few ulp); 0 and 1 at the ends, no NaN.
__device__ __forceinline__ float gate_sigmoid(float z) { return __fdividef(1.f, 1.f + __expf(-z)); }
// act(z) and its derivative, given s = σ(z).
template <GateAct kAct>
__device__ __forceinline__ float act(float z, float s) {
  return kAct == GateAct::silu ? z * s : s;
}
template <GateAct kAct>
__device__ __forceinline__ float act_slope(float z, float s) {
  return kAct == GateAct::silu ? s * (1.f + z * (1.f - s)) : s * (1.f - s);
}

// 1 u = x or x·a, 2 r = 1/sqrt(mean u² + eps), 3 y = u·r·w (·a).
template <class T, GateOrder kOrder, GateAct kAct, int N, bool kWide>
__global__ void __launch_bounds__(kRowThreads, kWide ? 2 : 3)
    fwd_kernel(RowPlan plan, Rows<T> g_x, Rows<T> g_gate, const float* g_w, float eps, Rows<T> g_y,
               float* g_r) {
  constexpr bool kGateFirst = kOrder == GateOrder::gate_first;
  constexpr bool kAhead = fetch_ahead<T, N, kWide>(2);
  struct Inputs {
    RowValues<T, N> x, gate;
  } in, next;
  __shared__ float s_sums[2][kRowThreads / 32][1];
  RowSums<1> row_sum{s_sums};
  RowWalk<N, kWide> at(plan);
  float w[kRowValues], a[kRowValues];
  const float per_value = 1.f / float(at.width);
  const auto load = [&](Inputs& to, int64_t token, int64_t tile) {
    to.x.load(g_x, token, at, tile);
    to.gate.load(g_gate, token, at, tile);
  };
  const auto activate = [&] {
    each_value([&](int v) { a[v] = act<kAct>(in.gate.at(v), gate_sigmoid(in.gate.at(v))); });
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
      activate();
      each_value([&](int v) {  // 1
        const float u = kGateFirst ? in.x.at(v) * a[v] : in.x.at(v);
        sum[0] += u * u;
      });
    }
    row_sum(sum, at);
    const float r = rstd_of(sum[0] * per_value, eps);  // 2
    if (g_r && at.lane == 0 && at.active()) g_r[at.row()] = r;
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {
      if (kWide) {
        load_columns(w, g_w, at, tile, 1.f);
        load(in, at.token, tile);
        activate();
      }
      store_row(g_y, at, tile, [&](int v) { return in.x.at(v) * a[v] * (r * w[v]); });  // 3
    }
  }
}

// One value's part in the backward pass: û = u·r with u as in forward, c = dy·w (·a if the norm
// comes first), mean = mean c·û over the row, g = r (c − û·mean) the gradient of u.
template <GateOrder kOrder, GateAct kAct>
struct GateValue {
  static constexpr bool kGateFirst = kOrder == GateOrder::gate_first;
  float x, z, s, dy, w, r, mean;  // s = σ(z)

  __device__ float a() const { return act<kAct>(z, s); }
  __device__ float hat() const { return (kGateFirst ? x * a() : x) * r; }
  __device__ float g() const { return r * ((kGateFirst ? dy * w : dy * w * a()) - hat() * mean); }
  __device__ float dx() const { return kGateFirst ? g() * a() : g(); }
  __device__ float dgate() const {
    return (kGateFirst ? g() * x : dy * w * hat()) * act_slope<kAct>(z, s);
  }
  __device__ float dw() const { return dy * hat() * (kGateFirst ? 1.f : a()); }
};

// 1 mean c·û, 2 dx, dgate and the row's share of dw, pack by pack: what they have in common lives
// shortly, which keeps the kernel in its registers.
template <class T, GateOrder kOrder, GateAct kAct, int N, bool kWide>
__global__ void __launch_bounds__(kRowThreads, 2)
    bwd_kernel(RowPlan plan, Rows<T> g_x, Rows<T> g_gate, const float* g_w, const float* g_r,
               Rows<T> g_dy, Rows<T> g_dx, Rows<T> g_dgate, float* g_partial) {
  constexpr bool kAhead = fetch_ahead<T, N, kWide>(3);
  struct Inputs {
    RowValues<T, N> x, gate, dy;
    float r;
  } in, next;
  __shared__ float s_sums[2][kRowThreads / 32][1];
  __shared__ alignas(16) float s_columns[kWide ? 1 : kRowThreads * kRowValues];
  RowSums<1> row_sum{s_sums};
  RowWalk<N, kWide> at(plan);
  ColumnSums<N, kWide> dw(g_partial, at);
  const ParkedWeights<N, kWide> weights(g_w, s_columns, at);  // the buffer is free until the end
  float s[kRowValues];
  const float per_value = 1.f / float(at.width);
  const auto load = [&](Inputs& to, int64_t token, int64_t tile) {
    to.x.load(g_x, token, at, tile);
    to.gate.load(g_gate, token, at, tile);
    to.dy.load(g_dy, token, at, tile);
    to.r = token < at.tokens ? g_r[at.row(token)] : 0.f;
  };
  const auto sigmoids = [&] { each_value([&](int v) { s[v] = gate_sigmoid(in.gate.at(v)); }); };
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
      if (kWide) load(in, at.token, tile);
      sigmoids();
      each_pack<N>([&](int p, int v0) {  // c·u is dy·w·a·x in either order
        float w[N];
        weights.get(w, at, tile, p);
        for (int i = 0, v = v0; i < N; ++i, ++v)
          dot[0] += in.dy.at(v) * w[i] * (act<kAct>(in.gate.at(v), s[v]) * in.x.at(v));
      });
    }
    row_sum(dot, at);
    in.x.forget_copies(), in.gate.forget_copies(), in.dy.forget_copies();
    const float r = in.r, mean = dot[0] * r * per_value;  // 1
    for (int64_t tile = 0; tile < at.tiles(); ++tile) {   // 2
      if (kWide) {
        load(in, at.token, tile);
        sigmoids();
      }
      each_pack<N>([&](int p, int v0) {
        float w[N];
        weights.get(w, at, tile, p);
        const auto value = [&](int v) {
          return GateValue<kOrder, kAct>{in.x.at(v), in.gate.at(v), s[v], in.dy.at(v), w[v - v0],
                                         r,          mean};
        };
        if (g_dx.p) store_row_pack(g_dx, at, tile, p, [&](int v) { return value(v).dx(); });
        if (g_dgate.p)
          store_row_pack(g_dgate, at, tile, p, [&](int v) { return value(v).dgate(); });
        for (int v = v0; v < v0 + N; ++v) dw.add(v, value(v).dw());
      });
      dw.end_tile(at, tile);
    }
  }
  dw.finish(at, s_columns);
}

// f.operator()<order, act>()
template <class F>
void visit_options(const GatedRmsNormOptions& o, F&& f) {
  const auto with_order = [&]<GateOrder kOrder>() {
    if (o.act == GateAct::silu)
      f.template operator()<kOrder, GateAct::silu>();
    else
      f.template operator()<kOrder, GateAct::sigmoid>();
  };
  if (o.order == GateOrder::norm_first)
    with_order.template operator()<GateOrder::norm_first>();
  else
    with_order.template operator()<GateOrder::gate_first>();
}

}  // namespace

void gated_rms_norm_fwd(const Tensor& x, const Tensor& gate, const Tensor& w,
                        const GatedRmsNormOptions& options, const Tensor& y, const Tensor& r) {
  if (x.numel() == 0) return;
  RowPlan plan = plan_rows(x, {&x, &gate, &y}, {&w});
  visit_compute(x.dtype(), [&]<class T>() {
    visit_options(options, [&]<GateOrder kOrder, GateAct kAct>() {
      visit_rows<T>(plan, [&]<int N, bool kWide>() {
        constexpr auto kKernel = fwd_kernel<device_t<T>, kOrder, kAct, N, kWide>;
        fill_device<kKernel>(plan, x.device());
        launch_rows<kKernel>(plan, x, rows_of<T>(x), rows_of<T>(gate), ptr<float>(w), options.eps,
                             rows_of<T>(y), ptr<float>(r));
      });
    });
  });
}

void gated_rms_norm_bwd(const Tensor& x, const Tensor& gate, const Tensor& w, const Tensor& r,
                        const Tensor& dy, const GatedRmsNormOptions& options, const Tensor& dx,
                        const Tensor& dgate, const Tensor& dw) {
  if (x.numel() == 0) {
    if (dw.defined()) dw.zero_();
    return;
  }
  RowPlan plan = plan_rows(x, {&x, &gate, &dy, &dx, &dgate}, {&w, &dw});
  visit_compute(x.dtype(), [&]<class T>() {
    visit_options(options, [&]<GateOrder kOrder, GateAct kAct>() {
      visit_rows<T>(plan, [&]<int N, bool kWide>() {
        constexpr auto kKernel = bwd_kernel<device_t<T>, kOrder, kAct, N, kWide>;
        fill_device<kKernel>(plan, x.device());
        const Tensor partial =
            dw ? Tensor::empty({plan.blocks, x.size(1), x.size(2)}, DType::f32, x.device())
               : Tensor();
        launch_rows<kKernel>(plan, x, rows_of<T>(x), rows_of<T>(gate), ptr<float>(w), ptr<float>(r),
                             rows_of<T>(dy), rows_of<T>(dx), rows_of<T>(dgate),
                             ptr<float>(partial));
        if (dw) sum_partials(partial, dw);
      });
    });
  });
}

}  // namespace ebb::gpu
