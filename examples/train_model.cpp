// Trains a small Gated DeltaNet on a text file, saves it and lets it write.
//   train_model TEXT FOLDER [STEPS]
// FOLDER becomes a model folder: `ebb generate --model FOLDER` and `ebb eval` read it.
#include <fmt/format.h>

#include "eval/runner.h"
#include "models/calibrate.h"
#include "models/checkpoint.h"
#include "train/step.h"
#include "train/text_reader.h"

using namespace ebb;

int main(int argc, char** argv) try {
  if (argc < 3) {
    fmt::print(stderr, "usage: train_model TEXT FOLDER [STEPS]\n");
    return 2;
  }
  const std::string text = argv[1], folder = argv[2];
  const int steps = argc > 3 ? std::stoi(argv[3]) : 200;

  // Text becomes shards of token ids, shards become shuffled windows.
  const Tokenizer tokenizer = Tokenizer::bytes();
  ShardWriter shards(folder + "/tokens", tokenizer.vocab_hash(), tokenizer.vocab_size());
  read_documents(text, {}, [&](std::string_view document) {
    shards.add(tokenizer.encode_document(document));
  });
  Loader loader({.shards = shards.finish(), .batch = 8, .length = 128}, tokenizer.vocab_hash());

  // A fresh model; DAMI sets its decay gates from a sample of the data.
  auto model = make_model({.vocab_size = tokenizer.vocab_size(),
                           .hidden_size = 64,
                           .num_hidden_layers = 2,
                           .num_heads = 2,
                           .head_dim = 32});
  init_weights(*model, /*seed=*/1);
  model->to(default_device());
  calibrate_dami(*model, {.tau_max = 128}, loader.next().tokens);

  AdamW optimizer(decay_groups(model->named_parameters(), /*weight_decay=*/0.1), {.clip = 1.0});
  for (int step = 1; step <= steps; ++step) {
    const StepResult r = train_step(*model, optimizer, loader.next(), /*lr=*/3e-3);
    if (step % 20 == 0 || step == 1)
      fmt::print("step {:4} | loss {:.3f} | norm {:.2f}\n", step, r.loss, r.grad_norm);
  }
  save_model(folder, *model, &tokenizer);

  const GenerateOptions options{.max_new_tokens = 120, .sampling = {.temperature = 0.7, .seed = 1}};
  fmt::print("\nThe {}\n", generate(*model, tokenizer, "The ", options).text);
} catch (const std::exception& e) {
  fmt::print(stderr, "train_model: {}\n", e.what());
  return 1;
}
