#include "eval/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tensor/check.h"

namespace ebb {

namespace {

Interval wilson_of(double p, double n) {
  const double z = 1.959963984540054, zz = z * z / n;
  const double center = (p + zz / 2) / (1 + zz);
  const double half = z * std::sqrt(p * (1 - p) / n + zz / (4 * n)) / (1 + zz);
  return {std::max(0.0, center - half), std::min(1.0, center + half)};
}

}  // namespace

Interval wilson(double hits, int64_t n) {
  return n == 0 ? Interval{0, 1} : wilson_of(hits / double(n), double(n));
}

Interval DistanceBin::interval() const {
  double inverse = 0;
  for (int64_t n : samples)
    if (n > 0) inverse += 1 / double(n);
  return tasks == 0 ? Interval{0, 1} : wilson_of(accuracy, double(tasks * tasks) / inverse);
}

double pearson(const std::vector<double>& x, const std::vector<double>& y) {
  check(x.size() == y.size(), "pearson: {} and {} values", x.size(), y.size());
  const double n = double(x.size());
  double mx = 0, my = 0, xy = 0, xx = 0, yy = 0, largest_x = 0, largest_y = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    mx += x[i] / n;
    my += y[i] / n;
    largest_x = std::max(largest_x, std::abs(x[i]));
    largest_y = std::max(largest_y, std::abs(y[i]));
  }
  for (size_t i = 0; i < x.size(); ++i) {
    xy += (x[i] - mx) * (y[i] - my);
    xx += (x[i] - mx) * (x[i] - mx);
    yy += (y[i] - my) * (y[i] - my);
  }
  // A spread that rounding alone explains is none: of a constant, the mean is an ulp away.
  const auto spread = [n](double squares, double largest) {
    return std::sqrt(squares / n) > 1e-12 * largest;
  };
  return spread(xx, largest_x) && spread(yy, largest_y) ? xy / std::sqrt(xx * yy)
                                                        : std::numeric_limits<double>::quiet_NaN();
}

namespace {

// First bin k with d <= edges[k+1].
size_t bin_of(const std::vector<double>& edges, double d) {
  const auto it = std::lower_bound(edges.begin() + 1, edges.end(), d);
  return size_t(std::min<std::ptrdiff_t>(it - edges.begin() - 1, std::ptrdiff_t(edges.size()) - 2));
}

bool every_task_everywhere(const std::vector<double>& edges,
                           const std::vector<DistanceTask>& tasks) {
  for (const DistanceTask& t : tasks) {
    std::vector<bool> seen(edges.size() - 1, false);
    for (const DistanceSample& s : t.samples) seen[bin_of(edges, s.distance)] = true;
    if (std::find(seen.begin(), seen.end(), false) != seen.end()) return false;
  }
  return true;
}

// The single smallest move of an inner boundary that leaves no bin empty for any task, if any.
void move_one_boundary(const std::vector<DistanceTask>& tasks, DistanceCurves* c) {
  double best_move = std::numeric_limits<double>::infinity(), best_value = 0;
  for (size_t k = 1; k + 1 < c->edges.size(); ++k) {
    std::vector<double> candidates;
    for (const DistanceTask& t : tasks)
      for (const DistanceSample& s : t.samples)
        if (s.distance > c->edges[k - 1] && s.distance < c->edges[k + 1]) {
          candidates.push_back(s.distance);                     // joins the left bin
          candidates.push_back(std::nextafter(s.distance, 0));  // joins the right bin
        }
    std::sort(candidates.begin(), candidates.end());
    candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
    for (double value : candidates) {
      const double move = std::abs(value - c->edges[k]);
      if (move >= best_move) continue;  // ties go to the smaller k, then the smaller value
      std::vector<double> edges = c->edges;
      edges[k] = value;
      if (!every_task_everywhere(edges, tasks)) continue;
      best_move = move;
      best_value = value;
      c->moved_boundary = int64_t(k);
    }
  }
  if (c->moved_boundary >= 0) c->edges[size_t(c->moved_boundary)] = best_value;
}

}  // namespace

DistanceCurves distance_curves(const std::vector<DistanceTask>& tasks, int64_t bins) {
  check(bins >= 1, "distance: {} bins", bins);
  DistanceCurves c;
  for (int64_t k = 0; k <= bins; ++k) c.edges.push_back(double(k) / double(bins));
  if (!every_task_everywhere(c.edges, tasks)) move_one_boundary(tasks, &c);

  for (const DistanceTask& t : tasks) {
    if (std::none_of(c.by_length.begin(), c.by_length.end(),
                     [&](const auto& entry) { return entry.first == t.length; }))
      c.by_length.emplace_back(t.length, std::vector<DistanceBin>(size_t(bins)));
  }
  for (auto& [length, curve] : c.by_length) {
    for (const DistanceTask& t : tasks) {
      if (t.length != length) continue;
      std::vector<double> sum(size_t(bins), 0), n(size_t(bins), 0);
      for (const DistanceSample& s : t.samples) {
        const size_t b = bin_of(c.edges, s.distance);
        sum[b] += s.score;
        n[b] += 1;
      }
      for (size_t b = 0; b < curve.size(); ++b) {
        curve[b].samples.push_back(int64_t(n[b]));
        curve[b].right.push_back(sum[b]);
        if (n[b] == 0) continue;
        curve[b].accuracy += sum[b] / n[b];
        ++curve[b].tasks;
      }
    }
    for (size_t b = 0; b < curve.size(); ++b) {
      curve[b].center = 0.5 * (c.edges[b] + c.edges[b + 1]);
      curve[b].accuracy = curve[b].tasks ? curve[b].accuracy / double(curve[b].tasks)
                                         : std::numeric_limits<double>::quiet_NaN();
    }
  }
  return c;
}

}  // namespace ebb
