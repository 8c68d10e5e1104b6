// What the thread sanitizer must and must not see (tests/sanitizer/openmp.cpp):
//   race none      hands numbers from thread to thread as ebb's code does: silence
//   race body      two threads write one element      race barrier  a barrier is left out
#include <cstdio>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  const std::string planted = argc > 1 ? argv[1] : "none";
  const int n = 1000, slots = planted == "body" ? n - 1 : n;
  std::vector<double> a(n, 1), b(n);
  double sum = 0;
  for (int round = 0; round < 100; ++round) {
#pragma omp parallel for schedule(static)
    for (int i = 0; i < n; ++i) a[i % slots] += i;
#pragma omp parallel
    {
      if (planted == "barrier") {
#pragma omp for schedule(dynamic) nowait
        for (int i = 0; i < n; ++i) a[i] *= 1e-3;
      } else {
#pragma omp for schedule(dynamic)
        for (int i = 0; i < n; ++i) a[i] *= 1e-3;
      }
#pragma omp for schedule(static)
      for (int i = 0; i < n; ++i) b[i] += a[n - 1 - i];
#pragma omp for schedule(static)
      for (int i = 0; i < n; ++i) a[i] = b[n - 1 - i];
    }
#pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < n; ++i) sum += a[i];
  }
  std::printf("%g\n", sum);
}
