// The CPU product: BLAS on fixed tiles, one thread per tile.
//
// BLAS itself runs single-threaded and OpenMP spreads the tiles. How OpenBLAS's own threads cut a
// product changes the last bits of the result; tiles that depend on the sizes alone do not, and
// batches of small products and large products share one loop without oversubscribing the cores.
#include <cblas.h>
#include <omp.h>

#include <algorithm>
#include <memory>

#include "ops/gemm.h"
#include "tensor/check.h"

// Whichever BLAS is linked: its own threads are switched off.
extern "C" {
[[gnu::weak]] int openblas_get_parallel();  // 0 no threads, 1 its own, 2 OpenMP's
[[gnu::weak]] void openblas_set_num_threads(int n);
[[gnu::weak]] void MKL_Set_Num_Threads(int n);
[[gnu::weak]] void bli_thread_set_num_threads(long n);
}

namespace ebb {
namespace {

bool blas_uses_openmp() {
  static const bool yes = openblas_get_parallel && openblas_get_parallel() == 2;
  return yes;
}

// OpenBLAS on OpenMP takes as many threads as OpenMP would, whatever it was set to (and its setter
// is OpenMP's own): outside a parallel region one thread has to be asked for at each call.
class OneThread {
 public:
  OneThread() : before_(blas_uses_openmp() && !omp_in_parallel() ? omp_get_max_threads() : 0) {
    if (before_) omp_set_num_threads(1);
  }
  ~OneThread() {
    if (before_) omp_set_num_threads(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

void make_blas_single_threaded() {
  static const bool done = [] {
    if (openblas_set_num_threads && !blas_uses_openmp()) openblas_set_num_threads(1);
    if (MKL_Set_Num_Threads) MKL_Set_Num_Threads(1);
    if (bli_thread_set_num_threads) bli_thread_set_num_threads(1);
    return true;
  }();
  (void)done;
}

CBLAS_TRANSPOSE flag(const GemmOperand& o) { return o.transposed ? CblasTrans : CblasNoTrans; }

void blas_gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, const float* a, int lda,
               const float* b, int ldb, float beta, float* c, int ldc) {
  const OneThread one;
  cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, 1, a, lda, b, ldb, beta, c, ldc);
}
void blas_gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, const double* a,
               int lda, const double* b, int ldb, double beta, double* c, int ldc) {
  const OneThread one;
  cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, 1, a, lda, b, ldb, beta, c, ldc);
}
void blas_gemv(CBLAS_TRANSPOSE t, int rows, int cols, const float* a, int lda, const float* x,
               int incx, float* y, int incy) {
  const OneThread one;
  cblas_sgemv(CblasRowMajor, t, rows, cols, 1, a, lda, x, incx, 1, y, incy);
}
void blas_gemv(CBLAS_TRANSPOSE t, int rows, int cols, const double* a, int lda, const double* x,
               int incx, double* y, int incy) {
  const OneThread one;
  cblas_dgemv(CblasRowMajor, t, rows, cols, 1, a, lda, x, incx, 1, y, incy);
}

// How one product is cut; depends on the sizes alone.
struct Tiles {
  int64_t m = 512, n = 512, k = 0;              // sides of a tile
  int64_t count_m = 1, count_n = 1, parts = 1;  // parts > 1: sums over parts of K, added in order
};

int64_t even_share(int64_t total, int64_t side) {
  const int64_t pieces = (total + side - 1) / side;
  return std::max<int64_t>(16, ((total + pieces - 1) / pieces + 15) / 16 * 16);
}

Tiles tiles_for(const Gemm& g) {
  // Smaller tiles feed more cores but pack their operands again: square ones of 256 cost 5 %, so
  // go below that only for the first eight tasks.
  // f64, where they cost 8 %, makes do with half as many.
  const int64_t wanted = g.operands == DType::f64 ? 8 : 16;
  constexpr int64_t kSquare = 256 * 256, kLeastPart = 2048;
  Tiles t;
  t.m = std::min(t.m, g.m), t.n = std::min(t.n, g.n), t.k = g.k;
  const auto count = [&] {
    t.count_m = (g.m + t.m - 1) / t.m, t.count_n = (g.n + t.n - 1) / t.n;
    return t.count_m * t.count_n * g.batch;
  };
  const auto too_few = [&] { return count() < (t.m * t.n > kSquare ? wanted : 8); };
  const bool long_k = g.k >= 2 * kLeastPart;  // parts of K make tasks more cheaply than small tiles
  const int64_t least = long_k ? kSquare : kSquare / 2;
  while (too_few() && t.m * t.n > least && t.m * t.n * g.k > (int64_t(1) << 23))
    (t.m > t.n ? t.m : t.n) = (std::max(t.m, t.n) + 1) / 2;
  // A small product: two tiles, if each still takes longer than handing it to a thread.
  if (!long_k && count() == 1 && t.m * t.n * g.k > (int64_t(1) << 20))
    (t.m > t.n ? t.m : t.n) = (std::max(t.m, t.n) + 1) / 2;
  t.m = even_share(g.m, t.m), t.n = even_share(g.n, t.n);
  const int64_t tasks = count();
  if (tasks < wanted && long_k) {
    t.parts = std::min((wanted + tasks - 1) / tasks, g.k / kLeastPart);
    t.k = (g.k + t.parts - 1) / t.parts;
    t.parts = (g.k + t.k - 1) / t.k;
  }
  return t;
}

template <class T>
const T* element(const GemmOperand& o, int64_t batch, int64_t row, int64_t col) {
  return static_cast<const T*>(o.data) + batch * o.stride +
         (o.transposed ? row + col * o.ld : row * o.ld + col);
}

// One row or one column of results: a matrix-vector product in blocks of kBlock results.
template <class T>
void gemv(const Gemm& g) {
  constexpr int64_t kBlock = 256;
  const bool row = g.m == 1;  // y = bᵀ·aᵀ, else y = a·b
  const GemmOperand &matrix = row ? g.b : g.a, &vector = row ? g.a : g.b;
  const int64_t results = row ? g.n : g.m, blocks = (results + kBlock - 1) / kBlock;
  const int64_t step = row ? 1 : g.c.ld;                         // between results
  const int64_t inc = vector.transposed == row ? vector.ld : 1;  // between its elements
  const bool results_are_rows = row ? matrix.transposed : !matrix.transposed;  // as stored
#pragma omp parallel for collapse(2) if (g.batch * results * g.k > 65536)
  for (int64_t s = 0; s < g.batch; ++s)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t i0 = block * kBlock, size = std::min(kBlock, results - i0);
      T* y = static_cast<T*>(g.c.data) + s * g.c.stride + i0 * step;
      if (!g.accumulate)
        for (int64_t i = 0; i < size; ++i) y[i * step] = 0;
      const T* x = static_cast<const T*>(vector.data) + s * vector.stride;
      const T* p = row ? element<T>(matrix, s, 0, i0) : element<T>(matrix, s, i0, 0);
      if (results_are_rows)
        blas_gemv(CblasNoTrans, int(size), int(g.k), p, int(matrix.ld), x, int(inc), y, int(step));
      else
        blas_gemv(CblasTrans, int(g.k), int(size), p, int(matrix.ld), x, int(inc), y, int(step));
    }
}

// partial [parts,batch,m,n] → c, in the order of the parts.
template <class T>
void add_parts(const Gemm& g, const T* partial, int64_t parts) {
  const int64_t rows = g.batch * g.m;
#pragma omp parallel for if (rows * g.n > 65536)
  for (int64_t r = 0; r < rows; ++r) {
    T* y = static_cast<T*>(g.c.data) + r / g.m * g.c.stride + r % g.m * g.c.ld;
    if (!g.accumulate) std::fill(y, y + g.n, T(0));
    for (int64_t p = 0; p < parts; ++p) {
      const T* term = partial + (p * rows + r) * g.n;
      for (int64_t j = 0; j < g.n; ++j) y[j] += term[j];
    }
  }
}

template <class T>
void gemm_tiles(const Gemm& g) {
  const Tiles t = tiles_for(g);
  const auto partial =
      std::make_unique_for_overwrite<T[]>(t.parts > 1 ? size_t(t.parts * g.batch * g.m * g.n) : 0);
  const int64_t tasks = t.parts * g.batch * t.count_m * t.count_n;
  const int64_t share = std::max<int64_t>(1, tasks / 1024);
#pragma omp parallel for schedule(dynamic, \
                                  share) if (tasks > 1 && g.batch * g.m * g.n * g.k > 131072)
  for (int64_t task = 0; task < tasks; ++task) {
    int64_t rest = task;
    const int64_t j0 = rest % t.count_n * t.n;
    rest /= t.count_n;
    const int64_t i0 = rest % t.count_m * t.m;
    rest /= t.count_m;
    const int64_t s = rest % g.batch, p = rest / g.batch, k0 = p * t.k;
    const int64_t m = std::min(t.m, g.m - i0), n = std::min(t.n, g.n - j0);
    const bool whole = t.parts == 1;
    T* c = whole ? static_cast<T*>(g.c.data) + s * g.c.stride + i0 * g.c.ld + j0
                 : partial.get() + ((p * g.batch + s) * g.m + i0) * g.n + j0;
    blas_gemm(flag(g.a), flag(g.b), int(m), int(n), int(std::min(t.k, g.k - k0)),
              element<T>(g.a, s, i0, k0), int(g.a.ld), element<T>(g.b, s, k0, j0), int(g.b.ld),
              T(whole && g.accumulate), c, int(whole ? g.c.ld : g.n));
  }
  if (t.parts > 1) add_parts(g, partial.get(), t.parts);
}

}  // namespace

namespace cpu {

void gemm(const Gemm& g) {
  make_blas_single_threaded();
  const auto run = [&]<class T>() { g.m == 1 || g.n == 1 ? gemv<T>(g) : gemm_tiles<T>(g); };
  if (g.operands == DType::f64)
    run.template operator()<double>();
  else
    run.template operator()<float>();
}

}  // namespace cpu

}  // namespace ebb
