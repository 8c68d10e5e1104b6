#include "train/step.h"

#include <algorithm>
#include <set>

#include "autograd/tape.h"
#include "ops/elementwise.h"
#include "tensor/check.h"
#include "tensor/device_flags.h"
#include "tensor/memory.h"

namespace ebb {
namespace {

SeqLayout layout_on(const SeqLayout& layout, Device device) {
  return layout.is_packed() ? SeqLayout::packed(layout.host(), device) : SeqLayout();
}

// The positions with a label, where less than half have one (questions between other tokens);
// undefined where all might as well pass the head. (use_l2warp is about the logits of all.)
Tensor labelled_rows(const Tensor& labels, Device device) {
  const std::vector<int64_t> all = labels.to_vector<int64_t>();
  std::vector<int64_t> rows;
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i] != -100) rows.push_back(int64_t(i));
  if (rows.empty() || 2 * rows.size() >= all.size()) return {};
  return Tensor::from(rows, {int64_t(rows.size())}, device);
}

// The loss of one batch as its share of `count` labelled tokens among `positions`.
Var batch_loss(const LanguageModel& model, const Batch& b, const Tensor& count, int64_t positions) {
  const Device device = model.device();
  return model
      .loss(b.tokens.to(device), b.labels.to(device), layout_on(b.layout, device), count,
            model.config().use_l2warp ? Tensor() : labelled_rows(b.labels, device), positions)
      .loss;
}

Tensor count_tensor(int64_t n, Device device) {
  return Tensor::full({}, double(n), DType::i64, device);
}

}  // namespace

int64_t labelled_tokens(const Batch& batch) {
  const std::vector<int64_t> labels = batch.labels.to_vector<int64_t>();
  return int64_t(labels.size()) - std::count(labels.begin(), labels.end(), -100);
}

namespace {

// The parameters in memory, fused and tied ones once.
std::vector<Parameter> distinct_parameters(const LanguageModel& model) {
  std::vector<Parameter> out;
  std::set<const Slot*> seen;
  for (const NamedParameter& p : model.named_parameters())
    if (seen.insert(p.parameter.slot().get()).second) out.push_back(p.parameter);
  return out;
}

int64_t tape_bytes(const LanguageModel& model, const Var& loss) {
  std::vector<Tensor> weights;
  for (const Parameter& p : distinct_parameters(model)) {
    weights.push_back(p.master());
    weights.push_back(p.shadow());
  }
  return saved_bytes(loss, weights);
}

int64_t bytes_of(const Tensor& t) { return t.defined() ? t.nbytes() : 0; }

}  // namespace

TrainingMemory training_memory(const LanguageModel& model, const AdamW& optimizer, int64_t saved) {
  TrainingMemory m{.optimizer = optimizer.state_bytes(),
                   .saved = saved,
                   .workspace = memory_stats(model.device()).workspace};
  for (const Parameter& p : distinct_parameters(model)) {
    m.weights += bytes_of(p.master()) + bytes_of(p.shadow());
    m.gradients += bytes_of(p.grad());
  }
  return m;
}

StepResult train_step(const LanguageModel& model, AdamW& optimizer, std::span<const Batch> batches,
                      double lr, int64_t* saved) {
  StepResult result;
  int64_t positions = 0;
  for (const Batch& b : batches) {
    result.tokens += labelled_tokens(b);
    positions += b.tokens.numel();
  }
  const Tensor count = count_tensor(result.tokens, model.device());
  optimizer.zero_grad();
  optimizer.set_lr(lr);
  Tensor total;  // on the device until the end of the step
  for (const Batch& b : batches) {
    const Var loss = batch_loss(model, b, count, positions);
    if (saved) *saved = std::max(*saved, tape_bytes(model, loss));
    backward(loss);
    const NoGrad off;
    total = total.defined() ? add(total, loss.detach()).value() : loss.value();
  }
  optimizer.step();
  check_device_flags(model.device());
  const AdamWScalars after = optimizer.read();
  result.loss = total.item();
  result.grad_norm = after.grad_norm;
  result.skipped = after.skip != 0;
  return result;
}

double mean_loss(const LanguageModel& model, std::span<const Batch> batches) {
  const NoGrad off;
  int64_t tokens = 0;
  for (const Batch& b : batches) tokens += labelled_tokens(b);
  check(tokens > 0, "validation: no labelled tokens");
  const Tensor count = count_tensor(tokens, model.device());
  double loss = 0;
  for (const Batch& b : batches) loss += batch_loss(model, b, count, 0).value().item();
  check_device_flags(model.device());
  return loss;
}

}  // namespace ebb
