// Rotary position embedding, forward and backward (ops/rotary.h). A thread has V neighbouring
// channels j of the lower half of one token, works out their angles once and then goes through the
// heads, each with channels j and j + P/2.
#include <cmath>

#include "cuda/common.cuh"
#include "ops/rotary.h"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxHalf = int(kMaxRotaryWidth) / 2;

struct Frequencies {
  double theta[kMaxHalf];
};

template <class T>
struct Rotary {
  const T* in;
  T* out;
  int64_t in_stride, out_stride;  // of a token
  int64_t tokens, offset;
  const int64_t* start;  // [N] or null
  SequenceCursor first;
  int heads, half;
};

// Angle modulo 2π in f64, then f32.
__device__ __forceinline__ void sine_cosine(double angle, float& s, float& c) {
  constexpr double kTurn = 6.283185307179586476925;
  sincosf(float(angle - kTurn * rint(angle / kTurn)), &s, &c);
}

// grid: tokens × groups of V channels, one a thread. BACKWARD: the adjoint of FORM.
template <class T, int V, RotaryForm FORM, bool BACKWARD>
__global__ void __launch_bounds__(kThreads)
    rotary_kernel(Rotary<T> p, const __grid_constant__ Frequencies f) {
  const int groups = p.half / V;
  const int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= p.tokens * groups) return;
  const int64_t token = item / groups;
  const int j = int(item % groups) * V, width = 2 * p.half;
  SequenceCursor at = p.first;
  at.seek(token);
  const int64_t position = token - at.begin + p.offset + (p.start ? p.start[at.n] : 0);
  float s[V], c[V];
#pragma unroll
  for (int v = 0; v < V; ++v) sine_cosine(double(position) * f.theta[j + v], s[v], c[v]);
  const T* in = p.in + token * p.in_stride + j;
  T* out = p.out + token * p.out_stride + j;
  constexpr bool kCosine = FORM == RotaryForm::cosine;
  for (int h = 0; h < p.heads; ++h) {
    float low[V], high[V];
    load_pack(low, in), load_pack(high, in + p.half);
    if constexpr (kCosine && BACKWARD) {
      float sine_part[V];  // the lower half's; the upper half's is times 0
      load_pack(sine_part, in + width);
#pragma unroll
      for (int v = 0; v < V; ++v) low[v] = low[v] * c[v] + sine_part[v] * s[v];
      store_pack(out, low), store_pack(out + p.half, high);
    } else if constexpr (kCosine) {
      float sine_part[V], zero[V] = {};
#pragma unroll
      for (int v = 0; v < V; ++v) sine_part[v] = low[v] * s[v], low[v] *= c[v];
      store_pack(out, low), store_pack(out + p.half, high);
      store_pack(out + width, sine_part), store_pack(out + width + p.half, zero);
    } else {
      float a[V], b[V];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const float sine = BACKWARD ? -s[v] : s[v];
        a[v] = low[v] * c[v] - high[v] * sine;
        b[v] = high[v] * c[v] + low[v] * sine;
      }
      store_pack(out, a), store_pack(out + p.half, b);
    }
    in += kCosine && BACKWARD ? 2 * width : width;
    out += kCosine && !BACKWARD ? 2 * width : width;
  }
}

template <bool BACKWARD>
void run(const RotaryProblem& problem, const Tensor& out) {
  Frequencies f;
  for (int64_t j = 0; j < problem.width / 2; ++j)
    f.theta[j] = std::pow(problem.base, -2 * double(j) / double(problem.width));
  visit_compute(out.dtype(), [&]<class Host>() {
    using T = device_t<Host>;
    const bool wide_out = problem.form == RotaryForm::cosine && !BACKWARD;
    Rotary<T> p{ptr<Host>(problem.x.t),
                ptr<Host>(out),
                problem.x.stride,
                problem.heads * problem.width * (wide_out ? 2 : 1),
                problem.x.count,
                problem.offset,
                problem.start ? problem.start.data<int64_t>() : nullptr,
                problem.first,
                int(problem.heads),
                int(problem.width / 2)};
    constexpr int kWide = sizeof(T) == 2 ? 8 : 4;
    const auto address = reinterpret_cast<uintptr_t>(out.raw());
    const bool wide = p.half % kWide == 0 && rows_aligned(problem.x, kWide) && address % 16 == 0;
    const auto launch = [&]<int V, RotaryForm FORM>() {
      const int64_t blocks = ceil_div(p.tokens * (p.half / V), kThreads);
      if (blocks >= int64_t(1) << 31) throw Error("rotary: more tokens than one launch takes");
      rotary_kernel<T, V, FORM, BACKWARD><<<unsigned(blocks), kThreads, 0, stream_of(out)>>>(p, f);
      check_launch();
    };
    if (problem.form == RotaryForm::rotate)
      wide ? launch.template operator()<kWide, RotaryForm::rotate>()
           : launch.template operator()<1, RotaryForm::rotate>();
    else
      wide ? launch.template operator()<kWide, RotaryForm::cosine>()
           : launch.template operator()<1, RotaryForm::cosine>();
  });
}

}  // namespace

void rotary_fwd(const RotaryProblem& p, const Tensor& y) { run<false>(p, y); }
void rotary_bwd(const RotaryProblem& p, const Tensor& dx) { run<true>(p, dx); }

}  // namespace ebb::gpu
