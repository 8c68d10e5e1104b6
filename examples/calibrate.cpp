// Sets the decay gates of a model by DAMI, from the text it is going to read; all other weights
// keep their values. Works on any folder with config.json, model.safetensors and a tokenizer,
// wherever the model was trained.
//   calibrate FOLDER TEXT NEW_FOLDER [TAU_MAX]
#include <fmt/format.h>

#include "models/calibrate.h"
#include "models/checkpoint.h"
#include "tensor/check.h"
#include "tensor/file.h"

using namespace ebb;

int main(int argc, char** argv) try {
  if (argc < 4) {
    fmt::print(stderr, "usage: calibrate FOLDER TEXT NEW_FOLDER [TAU_MAX]\n");
    return 2;
  }
  const std::string folder = argv[1], text = argv[2], out = argv[3];
  const double tau_max = argc > 4 ? std::stod(argv[4]) : 1024;

  const auto model = load_model(folder);
  const Tokenizer tokenizer = Tokenizer::load(folder);
  model->to(default_device());

  // A few sequences from the head of the text: [4,512].
  std::vector<int64_t> ids = tokenizer.encode(read_file(text));
  check(ids.size() >= 4 * 512, "{} has {} tokens, want {}", text, ids.size(), 4 * 512);
  ids.resize(4 * 512);
  const Tensor tokens = Tensor::from(ids, {4, 512});

  fmt::print("layer head | timescale, tokens: target reached | sensitivity: target reached\n");
  for (const HeadReport& h : calibrate_dami(*model, {.tau_max = tau_max}, tokens))
    fmt::print("{:5} {:4} | {:25.2f} {:7.2f} | {:19.4f} {:7.4f}\n", h.layer, h.head,
               h.target_timescale, h.timescale, h.target_sensitivity, h.sensitivity);

  save_model(out, *model, &tokenizer);
  fmt::print("wrote {}\n", out);
} catch (const std::exception& e) {
  fmt::print(stderr, "calibrate: {}\n", e.what());
  return 1;
}
