// TrainConfig: a recipe. Strict JSON: every unknown field and bad value is reported at once.
// docs/guide.md describes each field; recipes/ holds examples.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/config.h"
#include "nn/decay_init.h"
#include "tensor/device.h"
#include "tensor/dtype.h"

namespace ebb {

enum class InitScheme { random, post, dami };
enum class Schedule { constant, cosine, wsd, linear };

struct InitConfig {
  InitScheme scheme = InitScheme::random;
  uint64_t seed = 42;
  int64_t calibration_sequences = 8;  // DAMI: from the head of the training stream
  int64_t calibration_length = 4096;
  double post_length = 4096;  // PoST: A_log spans 0 ... ln(this)
  DamiOptions dami = {};
};

struct OptimConfig {
  double lr = 6e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, clip = 1.0;
  Schedule schedule = Schedule::cosine;
  double warmup = 0.01;    // fraction of the steps
  double final_lr = 0.1;   // fraction of lr at the end
  double decay = 0.2;      // wsd: fraction of the steps that decay at the end
  bool decay_all = false;  // weight decay on gates, norms and biases too
  // Parameters learn at the rate that their model gives them: RWKV-7's decay biases twice as fast.
  bool lr_factors = false;
};

enum class DataKind { shards, mqar };
enum class SegmentOrder { listed, mixed };

// data.mqar: multi-query associative recall, made while training. A segment is the examples of one
// number of pairs; an epoch goes through all segments, and no batch mixes them.
struct MqarConfig {
  int64_t vocab_size = 8192;
  std::vector<int64_t> pairs;           // of the training segments
  std::vector<int64_t> test_pairs;      // of the validation; {}: as the training
  int64_t examples = int64_t(1) << 18;  // of a segment
  int64_t test_examples = 3000;         // of a segment
  double power = 0.01;
  bool random_non_queries = true;
  SegmentOrder order = SegmentOrder::listed;  // mixed: their batches shuffled
};

struct DataConfig {
  DataKind kind = DataKind::shards;
  MqarConfig mqar = {};  // kind mqar; the rest but for shuffle belongs to shards
  std::vector<std::string> train = {}, validation = {};  // shard files, or prefixes of them
  std::string tokenizer = "bytes";
  bool reset_at_documents = false;
  bool shuffle = true;
};

struct TrainConfig {
  ModelConfig model = {};
  std::string model_folder = "";  // start from this checkpoint folder instead of `model`
  InitConfig init = {};
  DataConfig data = {};
  OptimConfig optim = {};
  int64_t steps = 1000;
  int64_t sequences = 8;      // per micro-batch and rank
  int64_t length = 1024;      // tokens per sequence
  int64_t accumulate = 1;     // micro-batches per step
  DType dtype = DType::bf16;  // activations; on the CPU f32 only
  bool recompute = false;     // activation checkpointing per block
  uint64_t seed = 42;         // data order
  int64_t log_every = 10;
  int64_t checkpoint_every = 500, keep_last = 3;
  int64_t validate_every = 0, validation_batches = 16;  // 0: only at the end, if there is data
  std::string out = "";                                 // run folder

  nlohmann::json resolved() const;  // every field, as written beside the run
};

// The keys of two recipes that make another run of it: not how long it is kept, what it prints and
// where it is written. `file` is a recipe as resolved() wrote it; keys that an earlier version did
// not know had their defaults. "": none.
std::string recipe_difference(const std::string& file, const TrainConfig& now);

// `what` names the recipe file in messages.
TrainConfig parse_train_config(const nlohmann::json& recipe, const std::string& what);
// Applies "a.b.c=value" (value: JSON, else a string) to a recipe before parsing.
void set_path(nlohmann::json* recipe, const std::string& assignment);

InitConfig parse_init_config(class ConfigReader reader);

// Learning rate of step 0 ... steps-1, as a fraction of the peak.
double schedule_factor(const OptimConfig& o, int64_t step, int64_t steps);

// Shards behind files or prefixes ("corpus/train" stands for corpus/train-00000.bin, ...), sorted;
// throws when an entry matches nothing.
std::vector<std::string> expand_shards(const std::vector<std::string>& entries);

}  // namespace ebb
