// `ebb bench`: how long operators take, against the floor their cost sets.
//   BenchRow row = {"rms_norm", "32768x512", [](DType t) { return BenchCase{...}; }};
//   RowTiming t = time_row(row, settings);
// On a GPU, kernel times come from replayed CUDA graphs over rotating buffers: no launch gaps, and
// no input that still lies in the cache. Eager times come with the launches.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb::tools {

enum class Role {
  activation,  // gradient wanted, in its own dtype
  parameter,   // f32 beside bf16; its gradient accumulates in f32
  weight,      // a matrix in the compute dtype; its gradient accumulates in f32
  constant,    // no gradient
};

struct BenchInput {
  Shape shape = {};
  Role role = Role::activation;
  // How it is drawn: N(mean, std²), or uniform in [low, high) where high > low; integers below
  // `ids` where that is > 0. f32: stays f32 whatever the compute dtype (gates, log decays).
  double mean = 0, std = 1, low = 0, high = 0;
  int64_t ids = 0;
  bool f32 = false;
};

struct BenchCase {
  std::vector<BenchInput> inputs = {};
  // The operator; every output gets an upstream gradient.
  std::function<std::vector<Var>(std::span<const Var>)> run;
  std::function<Cost(Pass)> cost;
  bool backward = true;
};

struct BenchRow {
  std::string op, shape;
  std::function<BenchCase(DType)> make;
  enum class Where { both, cpu, cuda } where = Where::both;
  std::vector<DType> dtypes = {};  // empty: f32 on the CPU, bf16 and f32 on a GPU
};
const std::vector<BenchRow>& bench_rows();  // tools/bench_rows.cpp

// What the device can do at best.
struct Ceilings {
  double bytes_per_second = 0;
  double flops_f32 = 0, flops_bf16 = 0;
  std::string source;  // "known device" or "measured now"
};
Ceilings device_ceilings(Device device);

struct BenchSettings {
  Device device = {};
  DType dtype = DType::f32;
  int repeats = 20;
};

struct PassTiming {
  Cost cost = {};
  double ms = 0;        // median; on a GPU of graph replays
  double eager_ms = 0;  // GPU: median of single calls, launches included; 0 where not measured
};
// Of one forward and backward pass, everything released as early as the tape allows.
struct RowMemory {
  int64_t given = 0;    // bytes of inputs and upstream gradients
  int64_t tensors = 0;  // those, results and gradients
  int64_t peak = 0;     // the most in use at once, those included
};
struct RowTiming {
  PassTiming forward, backward;
  bool has_backward = false;
  int copies = 0;         // of the inputs, visited in turn
  RowMemory memory = {};  // where there is a backward pass
};
RowTiming time_row(const BenchRow& row, const BenchSettings& settings);

// Least time the ceilings allow.
double floor_ms(const Cost& cost, const Ceilings& ceilings, DType dtype);

}  // namespace ebb::tools
