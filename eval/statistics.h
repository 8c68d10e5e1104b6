// Small statistics for result tables.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ebb {

struct Interval {
  double low = 0, high = 0;
};
// 95% Wilson score interval of `hits` successes in n trials; [0,1] for n = 0.
Interval wilson(double hits, int64_t n);
double pearson(const std::vector<double>& x,
               const std::vector<double>& y);  // NaN when undefined: no spread

// Retrieval by relative distance (DAMI, figure 6): equal bins over (0,1], one boundary moved as
// little as possible when some task has no sample in some bin.
struct DistanceSample {
  double distance = 0;  // (0,1]: (query - value) / (query - context begin), in tokens
  double score = 0;     // 0 or 1
};
struct DistanceTask {
  std::string name;  // "2048/niah_single_1": length, then task
  std::string length;
  std::vector<DistanceSample> samples;
};
struct DistanceBin {
  double center = 0;
  double accuracy = 0;  // mean of the task means; NaN when no task has a sample
  int64_t tasks = 0;    // that have samples here
  // Of each task with this length, in the order given.
  std::vector<int64_t> samples = {};
  std::vector<double> right = {};
  // 95%: Wilson's, with the number of samples at which one proportion would have the variance of
  // this mean of m proportions, m^2 / sum(1/n_i). For one task that is Wilson's own interval.
  Interval interval() const;
};
struct DistanceCurves {
  std::vector<double> edges;    // bins + 1
  int64_t moved_boundary = -1;  // -1: none
  std::vector<std::pair<std::string, std::vector<DistanceBin>>> by_length;
};
DistanceCurves distance_curves(const std::vector<DistanceTask>& tasks, int64_t bins = 16);

}  // namespace ebb
