// Recipes as the command line gives them: a file and what --set changes in it.
//   const TrainConfig c = read_recipe("recipes/gdn-100m.json", {"optim.lr=1e-3"});
//   check_trainable(c, "recipes/gdn-100m.json", device);   // without reading the data itself
#pragma once
#include <string>
#include <vector>

#include "tensor/device.h"
#include "train/config.h"

namespace ebb::tools {

// Throws naming the file and everything that is wrong in it.
TrainConfig read_recipe(const std::string& file, const std::vector<std::string>& set);

// What can be said before anything is trained: the shards are there and of the tokenizer's
// vocabulary, the task fits the model, the device computes in that dtype. Throws otherwise.
void check_trainable(const TrainConfig& config, const std::string& file, Device device);

}  // namespace ebb::tools
