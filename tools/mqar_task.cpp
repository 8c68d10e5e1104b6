#include "tools/mqar_task.h"

#include "tensor/check.h"

namespace ebb::tools {

MqarTask::MqarTask(const TrainConfig& config) : config_(config) {
  const MqarConfig& m = config.data.mqar;
  check(config.seed < (uint64_t(1) << 31),
        "mqar: seed {}: want less than 2^31, beyond it are the test examples", config.seed);
  check(!config.model_folder.empty() || config.model.vocab_size >= m.vocab_size,
        "mqar: the task has {} tokens, the model's vocab_size is {}", m.vocab_size,
        config.model.vocab_size);
  const auto generators = [&](const std::vector<int64_t>& pairs, uint64_t seed) {
    std::vector<MqarGenerator> out;
    for (const int64_t n : pairs)
      out.emplace_back(MqarSpec{.vocab_size = m.vocab_size,
                                .length = config.length,
                                .pairs = n,
                                .power = m.power,
                                .random_non_queries = m.random_non_queries,
                                .seed = seed});
    return out;
  };
  segments_ = generators(m.pairs, config.seed);
  tests_ = generators(m.test_pairs.empty() ? m.pairs : m.test_pairs, mqar_test_seed(config.seed));
  per_segment_ = m.examples / config.sequences;
  check(per_segment_ >= 1, "mqar: {} examples are too few for one batch of {}", m.examples,
        config.sequences);
}

Batch MqarTask::batch(int64_t cursor) const {
  const MqarConfig& m = config_.data.mqar;
  const int64_t B = config_.sequences, T = config_.length;
  const int64_t epoch = cursor / batches_per_epoch();
  int64_t place = cursor % batches_per_epoch();
  if (m.order == SegmentOrder::mixed)
    place = permuted(place, batches_per_epoch(), config_.seed, uint64_t(epoch));
  const int64_t segment = place / per_segment_;
  Batch b{Tensor::empty({B, T}, DType::i64), Tensor::empty({B, T}, DType::i64), {}};
#pragma omp parallel for if (B * T > 65536)
  for (int64_t i = 0; i < B; ++i) {
    int64_t index = place % per_segment_ * B + i;
    if (config_.data.shuffle)
      index = permuted(index, m.examples, config_.seed + uint64_t(segment) + 1, uint64_t(epoch));
    const MqarExample e = segments_[size_t(segment)].example(index);
    std::copy(e.inputs.begin(), e.inputs.end(), b.tokens.data<int64_t>() + i * T);
    std::copy(e.labels.begin(), e.labels.end(), b.labels.data<int64_t>() + i * T);
  }
  return b;
}

Batch MqarTask::next() {
  Batch b = ahead_.valid() && ahead_cursor_ == cursor_ ? ahead_.get() : batch(cursor_);
  if (ahead_.valid()) ahead_.get();  // built for another place: a seek came between
  ahead_cursor_ = ++cursor_;
  ahead_ = std::async(std::launch::async, [this, c = cursor_] { return batch(c); });
  return b;
}

BatchSource MqarTask::source() {
  return {[this] { return next(); }, [this] { return cursor_; },
          [this](int64_t c) {
            check(c >= 0, "mqar: cursor {}", c);
            cursor_ = c;
          }};
}

nlohmann::json MqarTask::validate(const LanguageModel& model) const {
  nlohmann::json out;
  double loss = 0, accuracy = 0;
  for (const MqarGenerator& test : tests_) {
    const MqarScore s = score_mqar(model, test, config_.data.mqar.test_examples);
    loss += s.loss / double(tests_.size());
    accuracy += s.accuracy / double(tests_.size());
    if (tests_.size() > 1) out[fmt::format("accuracy_{}x{}", s.length, s.pairs)] = s.accuracy;
  }
  out["validation_loss"] = loss;
  out["accuracy"] = accuracy;
  return out;
}

}  // namespace ebb::tools
