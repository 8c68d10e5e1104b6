// The decay study's recipes, made small: what they say of the model, in widths for a test.
#pragma once
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "models/config_reader.h"
#include "models/language_model.h"
#include "tensor/random.h"
#include "train/config.h"

namespace ebb::testing {

inline std::string decay_recipe_folder() {  // of the checkout, or where binaries were carried
  const std::string here = EBB_TEST_DATA "/../../recipes/decay";
  return std::filesystem::exists(here) ? here : "recipes/decay";
}

inline std::vector<std::string> decay_recipes() {  // by name, without .json
  std::vector<std::string> names;
  if (std::filesystem::exists(decay_recipe_folder()))
    for (const auto& f : std::filesystem::directory_iterator(decay_recipe_folder()))
      names.push_back(f.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

inline TrainConfig decay_recipe(const std::string& name, bool small) {
  const std::string file = decay_recipe_folder() + "/" + name + ".json";
  nlohmann::json recipe = read_json(file, Comments::allow);
  nlohmann::json& model = recipe["model"];
  if (small) {
    model.update({{"vocab_size", 256},
                  {"hidden_size", 256},
                  {"num_hidden_layers", 2},
                  {"num_heads", 8},
                  {"intermediate_size", 192},
                  {"initializer_range", 0.05}});
    if (name != "llama") model["weight_init"] = "fla";  // no branch that is 0
  }
  return parse_train_config(recipe, file);
}

inline std::unique_ptr<LanguageModel> small_decay_model(const std::string& name) {
  auto model = make_model(decay_recipe(name, true).model);
  init_weights(*model, 23);
  return model;
}

inline Tensor decay_ids(int64_t batch, int64_t time, uint64_t purpose) {
  const Tensor ids = Tensor::empty({batch, time}, DType::i64);
  for (int64_t i = 0; i < ids.numel(); ++i)
    ids.data<int64_t>()[i] = int64_t(random_word({29, purpose}, uint64_t(i)) % 256);
  return ids;
}

inline std::string decay_recipe_test_name(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace ebb::testing
