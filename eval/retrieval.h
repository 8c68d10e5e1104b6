// Needle accuracy of a model: asks every sample of a file, scores by containment, and tabulates by
// length and by distance.
//   RetrievalScores s = ask(data, tokenizer, model_predictor(model, tokenizer, options));
//   json table = s.summary();          // right, accuracy, Wilson interval, ...
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "eval/niah_data.h"
#include "eval/runner.h"
#include "eval/statistics.h"

namespace ebb {

// What a predictor sees: the sample, for oracles, and the ids of its prompt, for models.
struct Question {
  const NiahSample* sample = nullptr;
  std::vector<int64_t> ids = {};
};
struct Answer {
  std::string text = {};
  int64_t tokens = 0;
};
using Predictor = std::function<std::vector<Answer>(const std::vector<Question>&)>;

Predictor model_predictor(const LanguageModel& model, const Tokenizer& tokenizer,
                          const GenerateOptions& options);

struct SampleScore {
  const NiahSample* sample = nullptr;
  std::string prompt_sha256 = {};
  int64_t prompt_tokens = 0;
  Answer answer = {};
  double score = 0;
  std::optional<NeedleDistance> distance = {};
  nlohmann::json record() const;  // one line of samples.jsonl
};

struct RetrievalScores {
  const NiahData* data = nullptr;
  std::vector<SampleScore> samples = {};

  double right() const;  // sum of the scores
  double accuracy() const;
  Interval interval() const;  // 95%, Wilson
  int64_t prompt_tokens(bool longest) const;
  nlohmann::json summary() const;
  DistanceTask by_distance() const;  // samples whose distance is known
};

enum class Bos { leave_out, add };
// Never truncates: a prompt is asked whole or not at all. NaN scores cannot occur. Borrows data.
RetrievalScores ask(const NiahData& data, const Tokenizer& tokenizer, const Predictor& predictor,
                    Bos bos = Bos::leave_out);

// Unweighted mean over the settings, and by task.
nlohmann::json mean_accuracies(const std::vector<RetrievalScores>& settings);
// Edges and, per length, the bins with accuracy, interval and samples per task.
nlohmann::json distance_table(const std::vector<RetrievalScores>& settings, int64_t bins = 16);

}  // namespace ebb
