#include "tools/bench.h"

#include <algorithm>
#include <cmath>

#include "autograd/tape.h"
#include "tensor/check.h"
#include "tensor/device_info.h"
#include "tensor/event.h"
#include "tensor/graph.h"
#include "tensor/random.h"

namespace ebb::tools {
namespace {

constexpr int kMaxCopies = 16;         // of the inputs; on the CPU, where drawing takes long, 3
constexpr double kGraphMs = 2;         // a graph holds about this much work ...
constexpr int kMaxCallsPerGraph = 64;  // ... in at most so many calls
constexpr double kMaxSeconds = 4;      // for the repeats of one measurement

DType stored_dtype(const BenchInput& in, DType dtype) {
  if (in.ids > 0) return DType::i64;
  return in.f32 || in.role == Role::parameter ? accumulate_type(dtype) : dtype;
}

Tensor draw(const BenchInput& in, DType dtype, Device device, RandomKey key) {
  const Tensor t = Tensor::empty(in.shape, stored_dtype(in, dtype), device);
  if (in.ids > 0) {
    const Tensor host = Tensor::empty(in.shape, DType::i64);
    for (int64_t i = 0; i < host.numel(); ++i)
      host.data<int64_t>()[i] = int64_t(random_word(key, uint64_t(i)) % uint64_t(in.ids));
    t.copy_(host);
  } else if (in.high > in.low) {
    fill_uniform(t, key, in.low, in.high);
  } else {
    fill_normal(t, key, in.mean, in.std);
  }
  return t;
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + std::ptrdiff_t(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// Median time of `work` over repeats, in milliseconds.
double median_ms(Device device, int repeats, const std::function<void()>& work) {
  Event start(device), stop(device);
  const auto once = [&] {
    start.record();
    work();
    stop.record();
    return start.milliseconds_until(stop);
  };
  const double first = once();  // also warms up
  const int affordable = int(kMaxSeconds * 1e3 / std::max(first, 1e-3));
  std::vector<double> times;
  for (int i = 0; i < std::clamp(affordable, 3, repeats); ++i) times.push_back(once());
  return median(times);
}

// One row's inputs in several copies, so that consecutive calls touch different memory.
class RowRunner {
 public:
  // copies = 0: as many as it takes to leave the caches.
  RowRunner(const BenchCase& c, const BenchSettings& settings, int copies = 0)
      : case_(c), device_(settings.device) {
    if (copies == 0) copies = copies_for(settings);
    in_.resize(size_t(copies));
    out_.resize(in_.size());
    dy_.resize(in_.size());
    gradients_.resize(in_.size());
    for (size_t i = 0; i < in_.size(); ++i)
      for (size_t j = 0; j < c.inputs.size(); ++j) in_[i].push_back(input(i, j, settings.dtype));
  }

  int copies() const { return int(in_.size()); }

  void forward(int call) {
    const size_t i = size_t(call) % in_.size();
    out_[i].clear();  // outputs stay until their copy's next turn, so that they rotate too
    out_[i] = case_.run(in_[i]);
  }

  // The graph of the copy's last forward is kept, so it may be walked any number of times.
  void backward(int call) {
    const size_t i = size_t(call) % in_.size();
    make_upstream(i);
    gradients_[i].clear();
    ebb::backward(out_[i], dy_[i], {.retain = true});
  }

  // Consumes the graph: the last thing to do with a runner, and with one copy.
  RowMemory memory() {
    forward(0);
    make_upstream(0);
    drop_outputs();
    RowMemory m;
    for (const Var& v : in_[0]) m.tensors += v.value().nbytes();
    for (const Tensor& dy : dy_[0]) m.tensors += dy.nbytes();
    m.given = m.tensors;
    m.peak = m.tensors - memory_stats(device_).current;
    reset_peak_memory(device_);
    forward(0);
    ebb::backward(out_[0], dy_[0]);
    m.peak += memory_stats(device_).peak;
    for (const Var& v : out_[0]) m.tensors += v.value().nbytes();
    for (const Tensor& g : gradients_[0]) m.tensors += g.nbytes();
    for (const Var& v : in_[0])
      if (v.grad()) m.tensors += v.grad().nbytes();
    return m;
  }

  void drop_outputs() {
    for (auto& o : out_) o.clear();
  }
  void drop_gradients() {
    for (auto& g : gradients_) g.clear();
  }

 private:
  void make_upstream(size_t i) {
    if (!dy_[i].empty()) return;
    for (size_t j = 0; j < out_[i].size(); ++j) {
      dy_[i].push_back(Tensor::empty(out_[i][j].shape(), out_[i][j].dtype(), device_));
      fill_normal(dy_[i].back(), {7, 100 * i + j});
    }
  }

  int copies_for(const BenchSettings& settings) const {
    double bytes = 1;
    for (const BenchInput& in : case_.inputs)
      bytes += double(in.shape.numel() * item_size(stored_dtype(in, settings.dtype)));
    const double cache = double(std::max<int64_t>(device_info(settings.device).cache, 32 << 20));
    return std::clamp(int(std::ceil(4 * cache / bytes)), 1,
                      settings.device.is_cuda() ? kMaxCopies : 3);
  }

  Var input(size_t copy, size_t j, DType dtype) {
    const BenchInput& spec = case_.inputs[j];
    // Parameters are the same in every call, as in training.
    const bool shared = spec.role == Role::parameter || spec.role == Role::weight;
    if (shared && copy > 0) return in_[0][j];
    const Tensor t = draw(spec, dtype, device_, {11, 1000 * copy + j});
    if (spec.role == Role::constant || !is_float(t.dtype())) return Var(t);
    if (shared) return Var::leaf(t);
    // Not a leaf, so that its gradient is neither widened nor accumulated: what an operator in the
    // middle of a model hands on.
    auto* kept = &gradients_[copy];
    return record("bench_input", {Var::leaf(Tensor::zeros({1}, DType::f32, device_))}, {}, {t},
                  [kept](BackwardContext& ctx) { kept->push_back(ctx.dy(0)); })[0];
  }

  const BenchCase& case_;
  Device device_;
  std::vector<std::vector<Var>> in_, out_;  // [copy][input or output]
  std::vector<std::vector<Tensor>> dy_;
  std::vector<std::vector<Tensor>> gradients_;
};

// Time per call of call(0), call(1), ... replayed as a CUDA graph.
double graph_ms(Device device, int repeats, int copies, double estimate_ms,
                const std::function<void(int)>& call) {
  const int calls = std::max(
      copies, std::clamp(int(kGraphMs / std::max(estimate_ms, 1e-3)), 1, kMaxCallsPerGraph));
  GraphCapture graph(device);
  graph.capture([&] {
    for (int i = 0; i < calls; ++i) call(i);
  });
  return median_ms(device, repeats, [&] { graph.replay(); }) / calls;
}

PassTiming time_forward(RowRunner& row, const BenchSettings& s) {
  PassTiming t;
  int next = 0;
  for (int i = 0; i < row.copies(); ++i) row.forward(i);  // lazy set-up, memory
  const double single = median_ms(s.device, s.repeats, [&] { row.forward(next++); });
  if (!s.device.is_cuda()) {
    t.ms = single;
    return t;
  }
  t.eager_ms = single;
  t.ms = graph_ms(s.device, s.repeats, row.copies(), single, [&](int i) { row.forward(i); });
  row.drop_outputs();  // they lay in the graph's arena
  return t;
}

PassTiming time_backward(RowRunner& row, const BenchSettings& s) {
  PassTiming t;
  int next = 0;
  for (int i = 0; i < row.copies(); ++i) {
    row.forward(i);
    row.backward(i);
  }
  const double single = median_ms(s.device, s.repeats, [&] { row.backward(next++); });
  if (!s.device.is_cuda()) {
    t.ms = single;
    return t;
  }
  t.eager_ms = single;
  t.ms = graph_ms(s.device, s.repeats, row.copies(), single, [&](int i) { row.backward(i); });
  row.drop_gradients();
  return t;
}

}  // namespace

RowTiming time_row(const BenchRow& row, const BenchSettings& settings) {
  const BenchCase c = row.make(settings.dtype);
  RowTiming t;
  if (c.backward) t.memory = RowRunner(c, settings, 1).memory();
  RowRunner runner(c, settings);
  t.copies = runner.copies();
  t.forward = time_forward(runner, settings);
  t.forward.cost = c.cost(Pass::forward);
  t.has_backward = c.backward;
  if (c.backward) {
    t.backward = time_backward(runner, settings);
    t.backward.cost = c.cost(Pass::backward);
  }
  return t;
}

double floor_ms(const Cost& cost, const Ceilings& ceilings, DType dtype) {
  const double flops = dtype == DType::bf16 ? ceilings.flops_bf16 : ceilings.flops_f32;
  return 1e3 * std::max(cost.bytes / ceilings.bytes_per_second, cost.flops / flops);
}

}  // namespace ebb::tools
