// DART on the GPU: beside the CPU, beside Mamba-2, decoding in windows and steps, bitwise reruns.
#include "autograd/tape.h"
#include "eval/runner.h"
#include "tensor/compare.h"
#include "tensor/random.h"
#include "tests/cuda_fixture.h"
#include "train/step.h"

namespace ebb::testing {
namespace {

class DartCuda : public CudaTest {};

// Sizes of the fast kernels, and of associative recall.
std::vector<ModelConfig> configs() {
  std::vector<ModelConfig> all(3, preset("dart-100m"));
  for (ModelConfig& c : all) {
    c.vocab_size = 256;
    c.hidden_size = 256;  // with fewer heads the gradient of A_log is what is left of large terms
    c.num_hidden_layers = 2;
    c.num_heads = 8;
    c.sma_chunk = 64;
  }
  all[1].state_size = 16;
  all[1].sma_chunk = 16;
  all[2].sma_shared_read = false;
  all[2].sma_chunk = 48;
  return all;
}

std::unique_ptr<LanguageModel> open_model(const ModelConfig& c) {
  auto model = make_model(c);
  init_weights(*model, 21);
  for (const NamedParameter& p : model->named_parameters())
    if (p.name.ends_with("g_proj.weight")) init_normal(p, 5, 0.1);
  return model;
}

std::vector<int64_t> some_ids(int64_t n, int64_t first = 0) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < n; ++i)
    ids.push_back(int64_t(random_word({3, uint64_t(first)}, uint64_t(i)) % 256));
  return ids;
}

// Logits, loss and the gradients of all parameters.
std::vector<std::pair<std::string, Tensor>> results(const LanguageModel& model) {
  const Device at = model.device();
  const Tensor ids = Tensor::from(some_ids(2 * 300), {2, 300}, at),
               labels = Tensor::from(some_ids(2 * 300, 1), {2, 300}, at);
  std::vector<std::pair<std::string, Tensor>> out;
  out.emplace_back("logits", model.logits(model.hidden(ids)).value().cpu());
  const Var loss = model.loss(ids, labels).loss;
  backward(loss);
  out.emplace_back("loss", loss.value().cpu());
  for (const NamedParameter& p : model.named_parameters()) out.emplace_back(p.name, p.grad().cpu());
  return out;
}

TEST_F(DartCuda, IsThatOfTheCpu) {
  for (const ModelConfig& c : configs()) {
    const auto exact = open_model(c);
    for (const NamedParameter& p : exact->named_parameters())
      p.parameter.set_master(p.parameter.master().to(DType::f64));
    const auto want = results(*exact);
    for (const bool bf16 : {false, true}) {
      const auto model = open_model(c);
      model->to(gpu_);
      if (bf16) model->enable_bf16();
      const auto got = results(*model);
      for (size_t i = 0; i < got.size(); ++i) {
        const std::string& name = want[i].first;
        const bool gate = name.ends_with("A_log") || name.ends_with("dt_bias");
        const double limit = i < 2 ? (bf16 ? 3e-2 : 1e-5) : bf16 ? 0.12 : gate ? 1e-4 : 5e-5;
        EXPECT_LE(relative_error(got[i].second, want[i].second), limit)
            << name << " S " << c.sma_chunk << (bf16 ? " bf16" : " f32");
      }
    }
  }
}

TEST_F(DartCuda, AtZeroGateItIsMamba2) {
  for (const int64_t chunk : {64, 16, 100}) {
    ModelConfig c = configs()[0];
    c.sma_chunk = chunk;
    const auto dart = make_model(c);
    c.model_type = "mamba2";
    const auto plain = make_model(c);
    for (const auto& m : {dart.get(), plain.get()}) {
      init_weights(*m, 21);
      m->to(gpu_);
    }
    const auto a = results(*plain), b = results(*dart);
    for (const auto& [name, t] : a)
      for (const auto& [other, u] : b)
        if (name == other) {
          EXPECT_TRUE(bitwise_equal(t, u)) << name << " S " << chunk;
        }
  }
}

// Windows that end anywhere, ragged prompts, steps: the full forward pass.
TEST_F(DartCuda, DecodingIsTheFullForward) {
  const NoGrad off;
  for (const ModelConfig& c : configs())
    for (const bool bf16 : {false, true}) {
      const auto model = open_model(c);
      model->to(gpu_);
      if (bf16) model->enable_bf16();
      const double limit = bf16 ? 3e-2 : 1e-5;
      const std::vector<int64_t> lengths = {1, 300, 64, 17, 201};
      std::vector<std::vector<int64_t>> prompts;
      std::vector<Tensor> full;
      for (size_t i = 0; i < lengths.size(); ++i) {
        const std::vector<int64_t> ids = some_ids(lengths[i] + 70, int64_t(i));
        full.push_back(
            model->logits(model->hidden(Tensor::from(ids, {1, int64_t(ids.size())}, gpu_)))
                .value()
                .select(0, 0)
                .cpu());
        prompts.emplace_back(ids.begin(), ids.begin() + lengths[i]);
      }
      for (const int64_t share : {37, 64, 4000}) {
        DecodeState state;
        Tensor logits = chunked_prefill(*model, prompts, share * 5, &state);
        for (int64_t k = 0; k < 70; ++k) {
          std::vector<int64_t> next;
          for (size_t i = 0; i < lengths.size(); ++i) {
            ASSERT_LE(relative_error(logits.select(0, int64_t(i)).cpu(),
                                     full[i].select(0, lengths[i] - 1 + k)),
                      limit)
                << "S " << c.sma_chunk << " share " << share << " row " << i << " step " << k
                << (bf16 ? " bf16" : " f32");
            next.push_back(some_ids(lengths[i] + 70, int64_t(i))[size_t(lengths[i] + k)]);
          }
          logits = model->step(Tensor::from(next, {5}, gpu_), &state);
        }
      }
    }
}

TEST_F(DartCuda, TrainingStepsRerunBitwise) {
  std::vector<StateDict> runs;
  for (int run = 0; run < 2; ++run) {
    const auto model = open_model(configs()[0]);
    model->to(gpu_);
    model->enable_bf16();
    AdamW optimizer(decay_groups(model->named_parameters(), 0.1), {.clip = 1});
    const std::vector<Batch> batch = {{Tensor::from(some_ids(4 * 200), {4, 200}),
                                       Tensor::from(some_ids(4 * 200, 1), {4, 200}),
                                       {}}};
    for (int i = 0; i < 3; ++i) train_step(*model, optimizer, batch, 1e-3);
    StateDict s;
    for (const auto& [n, t] : model->state_dict()) s.emplace_back(n, t.cpu().clone());
    runs.push_back(std::move(s));
  }
  for (size_t i = 0; i < runs[0].size(); ++i)
    EXPECT_TRUE(bitwise_equal(runs[0][i].second, runs[1][i].second)) << runs[0][i].first;
}

}  // namespace
}  // namespace ebb::testing
