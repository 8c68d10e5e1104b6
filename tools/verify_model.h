// Golden models: a folder of the public library (config.json, model.safetensors) with what that
// library computed (io.safetensors).
#pragma once
#include <string>
#include <vector>

#include "tensor/device.h"
#include "tensor/dtype.h"
#include "tools/verify_result.h"

namespace ebb::tools {

// "" when this ebb implements the folder's model_type, else why it cannot be verified. Throws when
// there is no readable config.json.
std::string model_not_implemented(const std::string& folder);

// Loads the folder and compares hidden states, logits, loss, every parameter's gradient and a
// greedy continuation (prefill, then steps), and what writing the folder back changes. In bf16
// (weights rounded to bf16) the greedy tokens are for information. Throws, naming the file, when
// it is damaged or its parts do not fit together.
std::vector<VerifyResult> verify_model(const std::string& folder, Device device, DType dtype);

}  // namespace ebb::tools
