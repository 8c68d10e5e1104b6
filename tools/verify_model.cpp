#include "tools/verify_model.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "autograd/tape.h"
#include "eval/runner.h"
#include "models/checkpoint.h"
#include "models/config_reader.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/device_flags.h"
#include "tensor/file.h"
#include "tensor/safetensors.h"
#include "tools/temporary_folder.h"
#include "tools/verify_limits.h"

namespace ebb::tools {
namespace {

using nlohmann::json;

json read_config(const std::string& folder) {
  const std::string file = folder + "/config.json";
  const json j = parse_python_json(read_file(file), file);
  check(j.is_object(), "{}: not a JSON object", file);
  return j;
}

// Every name the golden file must hold for this model, and no other. -100 marks a label that is
// left out; targets are the labels, each one position earlier.
void check_fits(const SafeTensors& io, const LanguageModel& model) {
  std::set<std::string> want = {
      "input_ids",     "labels",        "targets",       "logits",
      "loss",          "hidden.embed",  "ref64.loss",    "hidden.final_norm",
      "greedy.prompt", "greedy.tokens", "greedy.logits", "greedy.margin"};
  for (int64_t l = 0; l < model.layers(); ++l) want.insert(fmt::format("hidden.block{}", l));
  for (const NamedParameter& p : model.named_parameters()) want.insert("grad." + p.name);
  for (const std::string& name : want) check(io.contains(name), "{}: no {}", io.path(), name);
  for (const std::string& name : io.names()) {
    check(want.count(name), "{}: unexpected tensor {}", io.path(), name);
    check(all_finite(io.get(name)), "{}: {} holds a NaN or infinity", io.path(), name);
  }
  const Shape tokens = io.get("input_ids").shape();
  check(tokens.size() == 2, "{}: input_ids is {}, want [B,T]", io.path(), tokens);
  const auto labels = io.get("labels", DType::i64, tokens).to_vector<int64_t>(),
             targets = io.get("targets", DType::i64, tokens).to_vector<int64_t>();
  const int64_t T = tokens[1];
  for (int64_t i = 0; i < int64_t(labels.size()); ++i)
    check(targets[size_t(i)] == (i % T == T - 1 ? -100 : labels[size_t(i) + 1]),
          "{}: targets are not the labels shifted by one, at token {}", io.path(), i);
}

class ModelCase {
 public:
  ModelCase(const std::string& folder, Device device, DType dtype)
      : io_(folder + "/io.safetensors"),
        model_(load_model(folder)),
        device_(device),
        dtype_(dtype) {
    check_fits(io_, *model_);
    limits_ = model_limits(model_->config().model_type, dtype);
    if (dtype == DType::f64)
      for (const NamedParameter& p : model_->named_parameters())
        p.parameter.set_master(p.parameter.master().to(DType::f64));
    model_->to(device);
    if (dtype == DType::bf16) model_->enable_bf16();
  }

  std::vector<VerifyResult> run() {
    forward();
    loss_and_gradients();
    greedy();
    check_device_flags(device_);
    return std::move(results_);
  }

 private:
  void compare(const std::string& name, const Tensor& x, double limit) {
    results_.push_back({.name = name, .error = relative_error(x, io_.get(name)), .limit = limit});
  }

  void forward() {
    const NoGrad off;
    const Var h = model_->hidden(
        io_.get("input_ids").to(device_), {}, nullptr, nullptr, [&](int64_t l, const Var& x) {
          compare(l < 0 ? "hidden.embed" : fmt::format("hidden.block{}", l), x.value(),
                  limits_.activation);
        });
    compare("hidden.final_norm", h.value(), limits_.activation);
    compare("logits", model_->logits(h).value(), limits_.activation);
  }

  void loss_and_gradients() {
    const Var loss =
        model_->loss(io_.get("input_ids").to(device_), io_.get("targets").to(device_)).loss;
    compare("loss", loss.value(), limits_.loss);
    // The golden loss is f32; this one is the f64 run's, rounded once.
    if (dtype_ == DType::f64) compare("ref64.loss", loss.value(), 1e-7);
    backward(loss);
    for (const NamedParameter& p : model_->named_parameters()) {
      check(p.grad().defined(), "{} received no gradient", p.name);
      const bool gate = p.name.ends_with("A_log") || p.name.ends_with("dt_bias");
      compare("grad." + p.name, p.grad(), gate ? limits_.gate_gradient : limits_.gradient);
    }
  }

  // Prefill, then one step a token. The golden tokens are fed, so that every logit counts even
  // after a different choice.
  void greedy() {
    const auto want = io_.get("greedy.tokens").to_vector<int64_t>();
    std::vector<Tensor> rows;
    DecodeState state;
    Tensor logits =
        chunked_prefill(*model_, {io_.get("greedy.prompt").to_vector<int64_t>()}, 64, &state);
    VerifyResult tokens{.name = "greedy.tokens",
                        .measure = "tokens",
                        .total = int64_t(want.size()),
                        .informative = dtype_ == DType::bf16};
    for (size_t t = 0; t < want.size(); ++t) {
      if (greedy_choice(logits)[0] != want[t]) {
        if (tokens.error == 0) tokens.note = fmt::format("first at {}", t);
        tokens.error += 1;
      }
      rows.push_back(logits.to(DType::f64, Device::cpu()));
      if (t + 1 < want.size())
        logits = model_->step(Tensor::from(std::vector{want[t]}, {1}, device_), &state);
    }
    const Tensor golden = io_.get("greedy.logits");
    Tensor all = Tensor::empty({int64_t(want.size()), logits.shape().back()}, DType::f64);
    for (size_t t = 0; t < rows.size(); ++t)
      copy(all.slice(0, int64_t(t), int64_t(t) + 1), rows[t]);
    compare("greedy.logits", all, limits_.activation);
    results_.push_back(tokens);
  }

  SafeTensors io_;
  std::unique_ptr<LanguageModel> model_;
  Device device_;
  DType dtype_;
  ModelLimits limits_;
  std::vector<VerifyResult> results_;
};

// Every tensor bit-equal, every config field kept.
VerifyResult written_back(const std::string& folder) {
  const TemporaryFolder temporary;
  const std::string copy = temporary.path().string();
  save_model(copy, *load_model(folder));
  const SafeTensors before(folder + "/model.safetensors"), after(copy + "/model.safetensors");
  std::set<std::string> names;
  for (const SafeTensors* f : {&before, &after})
    for (const std::string& name : f->names()) names.insert(name);
  VerifyResult r{.name = "written back", .measure = "tensors and fields"};
  const auto count = [&](const std::string& name, bool equal) {
    ++r.total;
    if (equal) return;
    if (r.error == 0) r.note = "first " + name;
    r.error += 1;
  };
  for (const std::string& name : names)
    count(name, before.contains(name) && after.contains(name) &&
                    bitwise_equal(before.get(name), after.get(name)));
  const json given = read_config(folder), kept = read_config(copy);
  for (const auto& [key, value] : given.items())
    count("config.json/" + key, kept.contains(key) && kept[key] == value);
  return r;
}

// One layer by itself: y of x, the gradient of x and of every parameter, the weights read back.
std::vector<VerifyResult> verify_layer(const std::string& folder, const std::string& model_type,
                                       Device device, DType dtype) {
  json config = read_config(folder);
  config["model_type"] = model_type;
  const std::unique_ptr<Mixer> layer =
      make_mixer(parse_foreign_config(config, folder + "/config.json"), 0);
  const SafeTensors weights(folder + "/model.safetensors"), io(folder + "/io.safetensors");
  StateDict state;
  for (const std::string& name : weights.names()) state.emplace_back(name, weights.get(name));
  layer->load_state_dict(state);
  VerifyResult kept{
      .name = "written back", .measure = "tensors and fields", .total = int64_t(state.size())};
  for (const auto& [name, t] : layer->state_dict())
    if (!bitwise_equal(t, weights.get(name))) kept.error += 1;

  const std::vector<NamedParameter> parameters = layer->named_parameters();
  if (dtype == DType::f64)
    for (const NamedParameter& p : parameters)
      p.parameter.set_master(p.parameter.master().to(DType::f64));
  layer->to(device);
  if (dtype == DType::bf16) layer->enable_bf16();
  const ModelLimits limits = model_limits(model_type, dtype);
  std::vector<VerifyResult> results;
  const auto compare = [&](const std::string& name, const Tensor& x, double limit) {
    results.push_back({.name = name, .error = relative_error(x, io.get(name)), .limit = limit});
  };
  const Var x = Var::leaf(io.get("in.x").to(dtype, device));
  const Var y = layer->forward(x, {}, nullptr, nullptr);
  compare("out.y", y.value(), limits.activation);
  backward({y}, {io.get("dout.y").to(dtype, device)});
  compare("grad.in.x", x.grad(), limits.gradient);
  for (const NamedParameter& p : parameters) {
    check(p.grad().defined(), "{} received no gradient", p.name);
    const bool gate = p.name.ends_with("A_log") || p.name.ends_with("dt_bias");
    compare("grad." + p.name, p.grad(), gate ? limits.gate_gradient : limits.gradient);
  }
  check_device_flags(device);
  results.push_back(kept);
  return results;
}

// "gdn2" of "gdn2_layer": a golden folder that holds one layer; empty for a whole model.
std::string layer_of(const std::string& type) {
  const std::string suffix = "_layer";
  return type.ends_with(suffix) ? type.substr(0, type.size() - suffix.size()) : "";
}

std::string model_type_of(const std::string& folder) {
  const json config = read_config(folder);
  check(config.contains("model_type") && config["model_type"].is_string(),
        "{}/config.json: model_type is missing", folder);
  return config["model_type"];
}

}  // namespace

std::string model_not_implemented(const std::string& folder) {
  const std::string type = model_type_of(folder), layer = layer_of(type);
  const std::vector<std::string>& types = model_types();
  if (std::find(types.begin(), types.end(), layer.empty() ? type : layer) != types.end()) return "";
  return fmt::format("model_type {} is not in this version of ebb", type);
}

std::vector<VerifyResult> verify_model(const std::string& folder, Device device, DType dtype) {
  if (const std::string layer = layer_of(model_type_of(folder)); !layer.empty())
    return verify_layer(folder, layer, device, dtype);
  std::vector<VerifyResult> results = ModelCase(folder, device, dtype).run();
  results.push_back(written_back(folder));
  return results;
}

}  // namespace ebb::tools
