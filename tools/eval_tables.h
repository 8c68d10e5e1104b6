// What `ebb eval` prints, from the JSON that it writes.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace ebb::tools {

// A line per model, task and length, as each is finished.
void print_score_heading();
void print_score(const std::string& model, const nlohmann::json& score);

// A model's answers to the questions of one file.
void print_choices(const std::string& model, const std::string& task, const nlohmann::json& record);

// All of them at a glance: a row per task and length, a column per model, then the means. Nothing
// where a model has one setting only.
void print_accuracies(const nlohmann::json& result);
// A row per model and length, a column per bin of the distance.
void print_distances(const nlohmann::json& result);

}  // namespace ebb::tools
