// The weights of a model folder as public software keeps them: model.safetensors, or the shards
// model-00001-of-00003.safetensors, ... that model.safetensors.index.json lists.
//   const WeightFiles files(folder);
//   model.load_state_dict(files.tensors());
//   save_weights(folder, model.state_dict(), /*shard_bytes=*/5'000'000'000);
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "nn/module.h"
#include "tensor/safetensors.h"

namespace ebb {

class WeightFiles {
 public:
  // Maps the files. Throws naming the file, and of an index all that is wrong with it at once:
  // files that are missing, tensors that are not where it says, or that it does not list.
  explicit WeightFiles(const std::string& folder);

  // Views of the files, in their order: f32, f64, bf16, and f16, which ebb does not compute in, as
  // f32.
  StateDict tensors() const;
  std::vector<std::string> paths() const;

  // Whether a folder holds either.
  static bool there(const std::string& folder);

 private:
  std::vector<SafeTensors> files_;
};

// Each file appears whole or not at all. shard_bytes: most that a file holds, but for a tensor that
// is larger by itself; 0: one file, and no index.
void save_weights(const std::string& folder, const StateDict& tensors, int64_t shard_bytes = 0);

}  // namespace ebb
