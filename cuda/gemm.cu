// Products through cuBLASLt (ops/gemm.h) and the table of chosen algorithms.
//
// cuBLASLt is column-major; row-major c = a·b is its C' = B'·A' with the operands' roles swapped,
// each matrix seen transposed, so nothing is ever rearranged.
//
// f32 sums always (CUBLAS_COMPUTE_32F: IEEE single products for f32, never TF32). Split-K schemes
// that reduce through the workspace are allowed; those that reduce in the output buffer are not.
#include <cublasLt.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "cuda/common.cuh"
#include "ops/gemm.h"
#include "ops/matmul.h"
#include "ops/matmul_algorithms.h"

namespace ebb::gpu {
namespace {

constexpr size_t kWorkspace = size_t(32) << 20;
constexpr int kCandidates = 16;  // asked for when timing

void lt_check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(std::string(current_op()) + ": cuBLASLt, " + what + ": " +
                cublasLtGetStatusString(status));
}

struct Choice {
  cublasLtMatmulAlgo_t algo = {};
  size_t workspace = 0;
  bool plain = false;    // cuBLASLt offered nothing
  bool checked = false;  // false: loaded from text, not yet tried on this GPU
};

struct KeyHash {
  size_t operator()(const GemmKey& key) const {
    uint64_t h = 0xcbf29ce484222325u;
    for (const int64_t x : key.v) h = (h ^ uint64_t(x)) * 0x100000001b3u, h ^= h >> 29;
    return size_t(h);
  }
};
using Table = std::unordered_map<GemmKey, Choice, KeyHash>;

struct DeviceLt {
  cublasLtHandle_t handle = nullptr;
  Table* table = nullptr;  // shared by all GPUs of one model
};

// Never destroyed: operators may run in destructors of static objects.
struct Registry {
  std::mutex mutex;
  std::map<std::string, Table> tables;  // by GPU model
  std::map<int, DeviceLt> devices;
};
Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

// The caller holds the mutex; the device is current.
DeviceLt& device_lt(Registry& r, Device device) {
  DeviceLt& d = r.devices[device.index];
  if (!d.handle) {
    cudaDeviceProp prop;
    cuda_check(cudaGetDeviceProperties(&prop, device.index), "read GPU properties");
    d.table = &r.tables[std::string(prop.name) + " with " +
                        std::to_string(prop.multiProcessorCount) + " multiprocessors"];
    lt_check(cublasLtCreate(&d.handle), "create handle");
  }
  return d;
}

// The largest power of two up to 256 that divides every matrix's address.
int64_t alignment(const GemmOperand& o, int64_t batch, DType t) {
  uint64_t bits = reinterpret_cast<uintptr_t>(o.data) | 256;
  if (batch > 1) bits |= uint64_t(o.stride * item_size(t));
  return int64_t(bits & (~bits + 1));
}

GemmKey key_of(const Gemm& g) {
  GemmKey k;
  k.v[GemmKey::m] = g.m, k.v[GemmKey::n] = g.n, k.v[GemmKey::k] = g.k;
  k.v[GemmKey::batch] = g.batch;
  k.v[GemmKey::ld_a] = g.a.ld, k.v[GemmKey::ld_b] = g.b.ld, k.v[GemmKey::ld_c] = g.c.ld;
  if (g.batch > 1) {
    k.v[GemmKey::stride_a] = g.a.stride;
    k.v[GemmKey::stride_b] = g.b.stride;
    k.v[GemmKey::stride_c] = g.c.stride;
  }
  k.v[GemmKey::trans_a] = g.a.transposed, k.v[GemmKey::trans_b] = g.b.transposed;
  k.v[GemmKey::operands] = int64_t(g.operands), k.v[GemmKey::result] = int64_t(g.result);
  k.v[GemmKey::align_a] = alignment(g.a, g.batch, g.operands);
  k.v[GemmKey::align_b] = alignment(g.b, g.batch, g.operands);
  k.v[GemmKey::align_c] = alignment(g.c, g.batch, g.result);
  return k;
}

cudaDataType_t lt_type(DType t) { return t == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

// cuBLASLt's view of one product. No heap: the descriptors live in this object.
class Problem {
 public:
  explicit Problem(const Gemm& g) {
    lt_check(cublasLtMatmulDescInit(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "product");
    set_op(CUBLASLT_MATMUL_DESC_TRANSA, g.b.transposed);
    set_op(CUBLASLT_MATMUL_DESC_TRANSB, g.a.transposed);
    set_layout(&a_, g.b, g.operands, g.k, g.n, g.batch);
    set_layout(&b_, g.a, g.operands, g.m, g.k, g.batch);
    set_layout(&c_, g.c, g.result, g.m, g.n, g.batch);
  }

  // cuBLASLt's suggestions, best guess first; at most `wanted` <= kCandidates.
  std::vector<Choice> candidates(cublasLtHandle_t handle, const GemmKey& key, int wanted) {
    cublasLtMatmulPreferenceOpaque_t pref;
    lt_check(cublasLtMatmulPreferenceInit(&pref), "preference");
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t what, auto value) {
      lt_check(cublasLtMatmulPreferenceSetAttribute(&pref, what, &value, sizeof value),
               "preference");
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(kWorkspace));
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(key.v[GemmKey::align_b]));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(key.v[GemmKey::align_a]));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(key.v[GemmKey::align_c]));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(key.v[GemmKey::align_c]));
    cublasLtMatmulHeuristicResult_t found[kCandidates];
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, &desc_, &a_, &b_, &c_, &c_,
                                                                 &pref, wanted, found, &count);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) lt_check(status, "choose an algorithm");
    std::vector<Choice> usable;
    for (int i = 0; i < count; ++i)
      if (found[i].state == CUBLAS_STATUS_SUCCESS && found[i].workspaceSize <= kWorkspace)
        usable.push_back({found[i].algo, found[i].workspaceSize, false, true});
    return usable;
  }

  // Whether this GPU runs a stored algorithm within the stored workspace.
  bool accepts(cublasLtHandle_t handle, const Choice& choice) {
    cublasLtMatmulHeuristicResult_t r = {};
    return cublasLtMatmulAlgoCheck(handle, &desc_, &a_, &b_, &c_, &c_, &choice.algo, &r) ==
               CUBLAS_STATUS_SUCCESS &&
           r.workspaceSize <= choice.workspace;
  }

  cublasStatus_t run(cublasLtHandle_t handle, const Gemm& g, void* c, const Choice& choice,
                     void* workspace, cudaStream_t stream) {
    const float alpha = 1, beta = g.accumulate ? 1 : 0;
    return cublasLtMatmul(handle, &desc_, &alpha, g.b.data, &a_, g.a.data, &b_, &beta, c, &c_, c,
                          &c_, &choice.algo, workspace, choice.workspace, stream);
  }

 private:
  void set_op(cublasLtMatmulDescAttributes_t what, bool transposed) {
    const cublasOperation_t op = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    lt_check(cublasLtMatmulDescSetAttribute(&desc_, what, &op, sizeof op), "transposition");
  }

  // rows × cols is the operand's logical shape, row-major unless it is transposed.
  void set_layout(cublasLtMatrixLayoutOpaque_t* layout, const GemmOperand& o, DType t, int64_t rows,
                  int64_t cols, int64_t batch) {
    if (o.transposed) std::swap(rows, cols);
    lt_check(cublasLtMatrixLayoutInit(layout, lt_type(t), uint64_t(cols), uint64_t(rows), o.ld),
             "layout");
    if (batch == 1) return;
    const int32_t count = int32_t(batch);
    lt_check(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                              sizeof count),
             "batch");
    lt_check(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                              &o.stride, sizeof o.stride),
             "batch");
  }

  cublasLtMatmulDescOpaque_t desc_;
  cublasLtMatrixLayoutOpaque_t a_, b_, c_;
};

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(stream, &status), "query capture");
  return status != cudaStreamCaptureStatusNone;
}

Tensor workspace_for(size_t bytes, Device device) {
  return bytes ? Tensor::empty({int64_t(bytes)}, DType::u8, device) : Tensor();
}

// Milliseconds of five runs after one to warm up; infinite if the algorithm fails.
float time_of(Problem& problem, cublasLtHandle_t handle, const Gemm& g, void* c,
              const Choice& choice, void* workspace, cudaStream_t stream) {
  if (problem.run(handle, g, c, choice, workspace, stream) != CUBLAS_STATUS_SUCCESS)
    return INFINITY;
  cudaEvent_t begin, end;
  cuda_check(cudaEventCreate(&begin), "create event");
  cuda_check(cudaEventCreate(&end), "create event");
  cuda_check(cudaEventRecord(begin, stream), "record event");
  for (int i = 0; i < 5; ++i) problem.run(handle, g, c, choice, workspace, stream);
  cuda_check(cudaEventRecord(end, stream), "record event");
  cuda_check(cudaEventSynchronize(end), "time a product");
  float ms = 0;
  cuda_check(cudaEventElapsedTime(&ms, begin, end), "time a product");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return ms;
}

Choice choose(Problem& problem, cublasLtHandle_t handle, const Gemm& g, const GemmKey& key,
              Device device, cudaStream_t stream) {
  const bool tune = matmul_autotune() && !is_capturing(stream);
  const auto found = problem.candidates(handle, key, tune ? kCandidates : 1);
  if (found.empty()) return {{}, 0, true, true};
  Choice best = found[0];
  if (!tune || found.size() == 1) return best;
  // Trial runs that accumulate must not touch the real sum.
  const int64_t reach = (g.batch - 1) * g.c.stride + (g.m - 1) * g.c.ld + g.n;
  const Tensor scratch = g.accumulate ? Tensor::empty({reach}, g.result, device) : Tensor();
  size_t most = 0;
  for (const Choice& c : found) most = std::max(most, c.workspace);
  const Tensor workspace = workspace_for(most, device);
  float least = INFINITY;
  for (const Choice& candidate : found) {
    const float ms = time_of(problem, handle, g, scratch ? scratch.raw() : g.c.data, candidate,
                             workspace ? workspace.raw() : nullptr, stream);
    if (ms < least) least = ms, best = candidate;
  }
  return best;
}

// grid (tiles of 32×32, batch), 16×16 threads, 2×2 results each.
// 1 s_a [32,16], s_b [16,32] of the next 16 of K.  2 r_c += s_a·s_b.  3 store.
struct PlainOperand {
  int64_t row, col, batch;  // strides
};
template <class T, class R>
__global__ void __launch_bounds__(256)
    plain_kernel(const T* g_a, PlainOperand a, const T* g_b, PlainOperand b, R* g_c, PlainOperand c,
                 int64_t m, int64_t n, int64_t k, int64_t tiles_n, bool accumulate) {
  __shared__ float s_a[32][17], s_b[16][33];
  const int64_t i0 = blockIdx.x / tiles_n * 32, j0 = blockIdx.x % tiles_n * 32;
  g_a += blockIdx.y * a.batch, g_b += blockIdx.y * b.batch, g_c += blockIdx.y * c.batch;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  float r_c[2][2] = {};
  for (int64_t k0 = 0; k0 < k; k0 += 16) {
    for (int e = threadIdx.x; e < 512; e += 256) {  // 1
      const int64_t i = i0 + e / 16, ka = k0 + e % 16, kb = k0 + e / 32, j = j0 + e % 32;
      s_a[e / 16][e % 16] = i < m && ka < k ? to_float(g_a[i * a.row + ka * a.col]) : 0.f;
      s_b[e / 32][e % 32] = kb < k && j < n ? to_float(g_b[kb * b.row + j * b.col]) : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < 16; ++q)  // 2
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int v = 0; v < 2; ++v) r_c[u][v] += s_a[ty + 16 * u][q] * s_b[q][tx + 16 * v];
    __syncthreads();
  }
  for (int u = 0; u < 2; ++u)  // 3
    for (int v = 0; v < 2; ++v) {
      const int64_t i = i0 + ty + 16 * u, j = j0 + tx + 16 * v;
      if (i >= m || j >= n) continue;
      R* p = g_c + i * c.row + j * c.col;
      *p = from_float<R>(r_c[u][v] + (accumulate ? to_float(*p) : 0.f));
    }
}

PlainOperand plain(const GemmOperand& o) {
  return o.transposed ? PlainOperand{1, o.ld, o.stride} : PlainOperand{o.ld, 1, o.stride};
}

std::string to_hex(const cublasLtMatmulAlgo_t& algo) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(&algo);
  std::string text;
  for (size_t i = 0; i < sizeof algo; ++i) {
    text += "0123456789abcdef"[bytes[i] >> 4];
    text += "0123456789abcdef"[bytes[i] & 15];
  }
  return text;
}

cublasLtMatmulAlgo_t from_hex(const std::string& text) {
  cublasLtMatmulAlgo_t algo;
  if (text.size() != 2 * sizeof algo)
    throw Error("matmul algorithms: an algorithm of " + std::to_string(text.size()) +
                " hexadecimal digits, want " + std::to_string(2 * sizeof algo));
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  unsigned char bytes[sizeof algo];
  for (size_t i = 0; i < sizeof algo; ++i)
    bytes[i] = static_cast<unsigned char>(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
  std::memcpy(&algo, bytes, sizeof algo);
  return algo;
}

}  // namespace

void gemm(const Gemm& g, Device device) {
  const auto stream = static_cast<cudaStream_t>(gpu::current_stream(device).handle);
  const GemmKey key = key_of(g);
  Problem problem(g);
  Registry& r = registry();
  cublasLtHandle_t handle = nullptr;
  Choice choice;
  {
    const std::lock_guard lock(r.mutex);
    const DeviceLt& lt = device_lt(r, device);
    handle = lt.handle;
    auto it = lt.table->find(key);
    if (it == lt.table->end())
      it = lt.table->emplace(key, choose(problem, handle, g, key, device, stream)).first;
    if (!it->second.checked) {
      if (!problem.accepts(handle, it->second))
        throw Error(std::string(current_op()) +
                    ": this GPU refuses the loaded cuBLASLt algorithm for a product of m=" +
                    std::to_string(g.m) + " n=" + std::to_string(g.n) +
                    " k=" + std::to_string(g.k));
      it->second.checked = true;
    }
    choice = it->second;
  }
  if (choice.plain) return gemm_plain(g, device);
  const Tensor workspace = workspace_for(choice.workspace, device);
  lt_check(problem.run(handle, g, g.c.data, choice, workspace ? workspace.raw() : nullptr, stream),
           "product");
}

void gemm_plain(const Gemm& g, Device device) {
  const auto stream = static_cast<cudaStream_t>(gpu::current_stream(device).handle);
  const int64_t tiles_n = ceil_div(g.n, 32), tiles = ceil_div(g.m, 32) * tiles_n;
  if (tiles > INT32_MAX)
    throw Error(std::string(current_op()) + ": a product of " + std::to_string(g.m) + "x" +
                std::to_string(g.n) + " results is too large for the plain kernel");
  const dim3 grid(unsigned(tiles), unsigned(g.batch));
  visit_compute(g.operands, [&]<class T>() {
    visit_compute(g.result, [&]<class R>() {
      using DT = device_t<T>;
      using DR = device_t<R>;
      plain_kernel<DT, DR><<<grid, 256, 0, stream>>>(
          static_cast<const DT*>(g.a.data), plain(g.a), static_cast<const DT*>(g.b.data),
          plain(g.b), static_cast<DR*>(g.c.data), plain(g.c), g.m, g.n, g.k, tiles_n, g.accumulate);
      check_launch();
    });
  });
}

int64_t cublaslt_version() { return int64_t(cublasLtGetVersion()); }

std::vector<MatmulAlgorithm> matmul_algorithms() {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  std::vector<MatmulAlgorithm> all;
  for (const auto& [name, table] : r.tables) {
    const size_t first = all.size();
    for (const auto& [key, c] : table)
      all.push_back({name, key, c.plain ? "" : to_hex(c.algo), int64_t(c.workspace)});
    std::sort(all.begin() + std::ptrdiff_t(first), all.end(),
              [](const auto& x, const auto& y) { return x.key.v < y.key.v; });
  }
  return all;
}

void add_matmul_algorithm(const MatmulAlgorithm& a) {
  Choice c{{}, size_t(a.workspace), a.bytes.empty(), a.bytes.empty()};
  if (!c.plain) c.algo = from_hex(a.bytes);
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  r.tables[a.gpu][a.key] = c;
}

}  // namespace ebb::gpu
