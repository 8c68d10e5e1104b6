// What a device can do at best: known for some GPUs, measured at start elsewhere.
#include <cblas.h>

#include <algorithm>

#include "ops/matmul.h"
#include "tensor/device_info.h"
#include "tensor/event.h"
#include "tensor/random.h"
#include "tools/bench.h"

namespace ebb::tools {
namespace {

struct KnownDevice {
  const char* name;  // part of the device's name
  Ceilings ceilings;
};
// H200: what large copies and cuBLAS bf16 products reach; f32 without tensor cores is
// 132 multiprocessors × 128 lanes × 2 × 1.98 GHz.
const KnownDevice kKnown[] = {
    {"H200", {4.3e12, 66.9e12, 790e12, "known device"}},
};

double best_ms(Device device, const std::function<void()>& work) {
  Event start(device), stop(device);
  double best = 1e30;
  for (int i = 0; i < 8; ++i) {
    start.record();
    work();
    stop.record();
    const double ms = start.milliseconds_until(stop);
    if (i > 0) best = std::min(best, ms);
  }
  return best;
}

// Bytes read and written per second by a large copy.
double copy_bandwidth(Device device, int64_t bytes) {
  const Tensor a = Tensor::zeros({bytes / 4}, DType::f32, device);
  const Tensor b = Tensor::zeros({bytes / 4}, DType::f32, device);
  return 2e3 * double(bytes) / best_ms(device, [&] { b.copy_(a); });
}

double cpu_copy_bandwidth(int64_t bytes) {
  const int64_t n = bytes / 4;
  const Tensor a = Tensor::zeros({n}), b = Tensor::zeros({n});
  const float* from = a.data<float>();
  float* to = b.data<float>();
  return 2e3 * double(bytes) / best_ms({}, [&] {
#pragma omp parallel for schedule(static)
           for (int64_t i = 0; i < n; ++i) to[i] = from[i];
         });
}

double cpu_sgemm_flops(int n) {
  const Tensor a = Tensor::full({n, n}, 0.5), b = Tensor::full({n, n}, 0.25);
  const Tensor c = Tensor::zeros({n, n});
  const double ms = best_ms({}, [&] {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1, a.data<float>(), n,
                b.data<float>(), n, 0, c.data<float>(), n);
  });
  return 2e3 * double(n) * n * n / ms;
}

// On random values: zeros run faster.
double gemm_flops(Device device, DType dtype) {
  const int64_t n = 8192;
  Tensor a = Tensor::empty({n, n}, dtype, device), b = Tensor::empty({n, n}, dtype, device);
  fill_normal(a, {1, 1});
  fill_normal(b, {1, 2});
  return 2e3 * double(n) * double(n) * double(n) / best_ms(device, [&] { matmul(a, b); });
}

}  // namespace

Ceilings device_ceilings(Device device) {
  Ceilings c{.source = "measured now"};
  if (!device.is_cuda()) {
    c.bytes_per_second = cpu_copy_bandwidth(int64_t(256) << 20);
    c.flops_f32 = c.flops_bf16 = cpu_sgemm_flops(1536);
    return c;
  }
  const std::string name = device_info(device).name;
  for (const KnownDevice& known : kKnown)
    if (name.find(known.name) != std::string::npos) return known.ceilings;
  c.bytes_per_second = copy_bandwidth(device, int64_t(1) << 30);
  c.flops_f32 = gemm_flops(device, DType::f32);
  c.flops_bf16 = gemm_flops(device, DType::bf16);
  return c;
}

}  // namespace ebb::tools
