#include "tools/model_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <set>

#include "ops/state_memory_cache.h"
#include "tensor/check.h"
#include "tools/commands.h"

namespace ebb::tools {
namespace {

using nlohmann::json;

// "model.layers.12.attn.A_log" -> 12 and "attn.A_log"; false for what stands outside the layers.
bool split_name(const std::string& name, int64_t* layer, std::string* rest) {
  const std::string mark = "layers.";
  const size_t at = name.find(mark);
  if (at == std::string::npos) return false;
  const size_t dot = name.find('.', at + mark.size());
  *layer = std::stoll(name.substr(at + mark.size(), dot));
  *rest = name.substr(dot + 1);
  return true;
}

void add_to_group(const NamedParameter& p, std::vector<OptimizerGroup>* groups) {
  auto g = std::find_if(groups->begin(), groups->end(), [&](const OptimizerGroup& known) {
    return known.decay == p.decay && known.lr_factor == p.lr_factor;
  });
  if (g == groups->end())
    g = groups->insert(g, OptimizerGroup{.decay = p.decay, .lr_factor = p.lr_factor});
  ++g->tensors;
  g->elements += p.shape.numel();
  int64_t layer = 0;
  std::string name = p.name;
  split_name(p.name, &layer, &name);
  if (std::find(g->names.begin(), g->names.end(), name) == g->names.end()) g->names.push_back(name);
}

void count_parameters(const LanguageModel& model, ModelReport* r) {
  std::set<const Slot*> seen;
  for (const NamedParameter& p : model.named_parameters()) {
    r->parameters += p.shape.numel();
    add_to_group(p, &r->groups);
    int64_t layer = 0;
    std::string name;
    if (!split_name(p.name, &layer, &name)) {
      r->outside.push_back({p.name, p.shape});
    } else {
      if (r->layers.empty() || r->layers.back().last != layer)
        r->layers.push_back({layer, layer, {}, 0});
      r->layers.back().parameters.push_back({name, p.shape});
      r->layers.back().per_layer += p.shape.numel();
    }
    if (!seen.insert(p.parameter.slot().get()).second) continue;
    const Tensor& master = p.parameter.master();  // fused ones may hold padding rows
    const bool shadow = master.dim() >= 2 && p.parameter.uses_shadow();
    r->training_bytes += master.numel() * (16 + (shadow ? 2 : 0));
  }
  r->weight_bytes = 4 * r->parameters;
  std::vector<LayerGroup> merged;
  for (LayerGroup& g : r->layers) {
    if (!merged.empty() && merged.back().parameters == g.parameters)
      merged.back().last = g.last;
    else
      merged.push_back(std::move(g));
  }
  r->layers = std::move(merged);
}

void measure_state(const LanguageModel& model, ModelReport* r) {
  const auto add = [&](const auto& part) {
    std::vector<ModelReport::State> states;
    for (const Tensor& t : part.zero_state(1, DType::f32, Device::cpu()).tensors) {
      states.push_back({fmt::format("{} {}", t.dtype(), t.shape().from(1)), t.numel(), t.nbytes()});
      r->state_bytes_f32 += t.nbytes();
    }
    for (const Tensor& t : part.zero_state(1, DType::bf16, Device::cpu()).tensors)
      r->state_bytes_bf16 += t.nbytes();
    return states;
  };
  if (model.positions()) r->position_state = add(*model.positions());
  for (int64_t l = 0; l < model.layers(); ++l) r->state.push_back(add(model.block(l)));
}

// Keys and values of softmax attention grow with the text: rows for `context` tokens, or for the
// window, where a fresh state has a few.
void measure_cache(const ModelConfig& c, int64_t context, ModelReport* r) {
  if (c.model_type != "transformer") return;
  r->cached_tokens = c.window_size.value_or(context);
  const Shape rows{r->cached_tokens, c.key_heads(), c.hidden_size / c.num_heads};
  for (auto& layer : r->state)
    for (ModelReport::State* s : {&layer.at(0), &layer.at(1)}) {
      const int64_t more = rows.numel() - s->elements;
      *s = {fmt::format("{} {}", DType::f32, rows), rows.numel(), 4 * rows.numel()};
      r->state_bytes_f32 += 4 * more;
      r->state_bytes_bf16 += 2 * more;
    }
}

void measure_memories(const ModelConfig& c, int64_t context, ModelReport* r) {
  if (!c.is_dart() || !c.use_sma) return;
  const StateMemoryCacheSize size =
      state_memory_cache_size(context, c.sma_chunk, c.state_size, c.head_dim);
  const int64_t all = size.memories * c.num_heads * c.num_hidden_layers;
  r->memories = {.context = context,
                 .chunk = c.sma_chunk,
                 .runs = (context + c.sma_chunk - 1) / c.sma_chunk,
                 .state_size = c.state_size,
                 .head_dim = c.head_dim,
                 .per_head = size.memories,
                 .attention_per_head = size.attention,
                 .bytes_f32 = 4 * all,
                 .bytes_bf16 = 2 * all};
}

json lines_to_json(const std::vector<ParameterLine>& lines) {
  json out = json::array();
  for (const ParameterLine& p : lines)
    out.push_back({{"name", p.name},
                   {"shape", std::vector<int64_t>(p.shape.begin(), p.shape.end())},
                   {"elements", p.shape.numel()}});
  return out;
}

void print_line(int indent, const std::string& name, int64_t n, const std::string& rest = "") {
  fmt::print("{:<46}{:>16}{}\n", std::string(size_t(indent), ' ') + name, grouped(n),
             rest.empty() ? "" : "  " + rest);
}

// The tensors of one layer, those of one module (attn, mlp) below its sum.
void print_layer(const std::vector<ParameterLine>& lines) {
  const auto module = [](const ParameterLine& p) { return p.name.substr(0, p.name.find('.')); };
  for (auto begin = lines.begin(); begin != lines.end();) {
    const auto end = std::find_if(begin, lines.end(),
                                  [&](const auto& p) { return module(p) != module(*begin); });
    const bool alone = end - begin == 1;
    int64_t sum = 0;
    for (auto p = begin; p != end; ++p) sum += p->shape.numel();
    if (!alone) print_line(4, module(*begin), sum);
    for (; begin != end; ++begin)
      print_line(alone ? 4 : 6, alone ? begin->name : begin->name.substr(module(*begin).size() + 1),
                 begin->shape.numel(), begin->shape.str());
  }
}

// Layers that carry the same state as the first are not repeated.
void print_state(const ModelReport& r) {
  const auto equal = [](const auto& a, const auto& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const auto& x, const auto& y) { return x.shape == y.shape; });
  };
  const bool same = std::all_of(r.state.begin(), r.state.end(),
                                [&](const auto& layer) { return equal(layer, r.state[0]); });
  for (const ModelReport::State& s : r.position_state)
    print_line(2, "positions " + s.shape, s.bytes, grouped(s.elements) + " elements");
  for (size_t l = 0; l < (same ? 1 : r.state.size()); ++l)
    for (const ModelReport::State& s : r.state[l])
      print_line(2, (same ? "each layer " : fmt::format("layer {} ", l)) + s.shape, s.bytes,
                 grouped(s.elements) + " elements");
}

void print_groups(const ModelReport& r) {
  fmt::print("\noptimizer groups\n");
  for (const OptimizerGroup& g : r.groups) {
    std::string title = g.decay == WeightDecay::on ? "weight decay" : "no weight decay";
    if (g.lr_factor != 1) title += fmt::format(", learning rate x {:.4g}", g.lr_factor);
    print_line(2, title, g.elements,
               g.lr_factor != 1 ? fmt::format("{}; with optim.lr_factors", fmt::join(g.names, ", "))
                                : fmt::format("{} tensors", grouped(g.tensors)));
  }
}

void print_memories(const ModelReport::Memories& m) {
  fmt::print("\n");
  print_line(0, fmt::format("memories after {} tokens, elements a head", grouped(m.context)),
             m.per_head,
             fmt::format("{} of {} tokens, N {}, P {}", m.runs, m.chunk, m.state_size, m.head_dim));
  print_line(0, "keys and values of token attention, a head", m.attention_per_head,
             fmt::format("{:.4g} of them; N/(2S) = {:.4g}", m.ratio(), m.long_ratio()));
  print_line(0, "bytes of a sequence's memories, f32", m.bytes_f32);
  print_line(0, "bytes of a sequence's memories, bf16", m.bytes_bf16);
}

}  // namespace

ModelReport report_model(const LanguageModel& model, int64_t context) {
  ModelReport r;
  count_parameters(model, &r);
  measure_state(model, &r);
  measure_cache(model.config(), context, &r);
  measure_memories(model.config(), context, &r);
  return r;
}

void print_report(const ModelReport& r) {
  print_line(0, "parameters", r.parameters);
  const auto print_outside = [&](bool before) {
    for (const ParameterLine& p : r.outside)
      if ((p.name.find("embed") != std::string::npos) == before)
        print_line(2, p.name, p.shape.numel(), p.shape.str());
  };
  print_outside(true);
  for (const LayerGroup& g : r.layers) {
    const int64_t n = g.last - g.first + 1;
    if (n > 1)
      print_line(2, fmt::format("layers {}-{}, each {}", g.first, g.last, grouped(g.per_layer)),
                 n * g.per_layer);
    else
      print_line(2, fmt::format("layer {}", g.first), g.per_layer);
    print_layer(g.parameters);
  }
  print_outside(false);
  print_groups(r);
  fmt::print("\n");
  print_line(0, "bytes of the weights in f32", r.weight_bytes);
  print_line(0, "bytes of a training run before activations", r.training_bytes,
             "f32 master, gradient, two moments; bf16 shadows");
  fmt::print("\n");
  print_line(
      0, "bytes of a sequence's decoding state, f32", r.state_bytes_f32,
      r.cached_tokens ? fmt::format("keys and values of {} tokens", grouped(r.cached_tokens)) : "");
  print_line(0, "bytes of a sequence's decoding state, bf16", r.state_bytes_bf16);
  print_state(r);
  if (r.memories) print_memories(*r.memories);
}

json to_json(const ModelReport& r) {
  json layers = json::array(), state = json::array(), groups = json::array();
  const auto states_to_json = [](const std::vector<ModelReport::State>& states) {
    json out = json::array();
    for (const ModelReport::State& s : states)
      out.push_back({{"tensor", s.shape}, {"elements", s.elements}, {"bytes", s.bytes}});
    return out;
  };
  for (const OptimizerGroup& g : r.groups)
    groups.push_back({{"weight_decay", g.decay == WeightDecay::on},
                      {"lr_factor", g.lr_factor},
                      {"tensors", g.tensors},
                      {"elements", g.elements},
                      {"names", g.names}});
  for (const LayerGroup& g : r.layers)
    layers.push_back({{"first", g.first},
                      {"last", g.last},
                      {"elements_per_layer", g.per_layer},
                      {"parameters", lines_to_json(g.parameters)}});
  for (const auto& layer : r.state) state.push_back(states_to_json(layer));
  json out = {
      {"parameters", r.parameters},
      {"outside_layers", lines_to_json(r.outside)},
      {"layers", layers},
      {"optimizer_groups", groups},
      {"weight_bytes_f32", r.weight_bytes},
      {"training_bytes", r.training_bytes},
      {"state",
       {{"layers", state}, {"bytes_f32", r.state_bytes_f32}, {"bytes_bf16", r.state_bytes_bf16}}}};
  if (!r.position_state.empty()) out["state"]["positions"] = states_to_json(r.position_state);
  if (r.cached_tokens) out["state"]["tokens"] = r.cached_tokens;
  if (r.memories)
    out["memories"] = {{"context", r.memories->context},
                       {"chunk", r.memories->chunk},
                       {"runs", r.memories->runs},
                       {"elements_per_head", r.memories->per_head},
                       {"attention_elements_per_head", r.memories->attention_per_head},
                       {"ratio", r.memories->ratio()},
                       {"state_size_over_two_chunks", r.memories->long_ratio()},
                       {"bytes_f32", r.memories->bytes_f32},
                       {"bytes_bf16", r.memories->bytes_bf16}};
  return out;
}

void print_targets(const std::vector<HeadReport>& gates) {
  const auto cell = [](double v, const char* format) {
    return v > 0 ? fmt::format(fmt::runtime(format), v) : std::string("-");
  };
  fmt::print("{:>5} {:>5} {:>12} {:>10} {:>12} {:>8} {:>10} {:>10}\n", "layer", "head", "timescale",
             "target", "sensitivity", "target", "A_log", "dt_bias");
  for (const HeadReport& g : gates)
    fmt::print("{:>5} {:>5} {:>12} {:>10} {:>12} {:>8} {:>10.4f} {:>10.4f}\n", g.layer, g.head,
               cell(g.timescale, "{:.6g}"), cell(g.target_timescale, "{:.6g}"),
               cell(g.sensitivity, "{:.5f}"), cell(g.target_sensitivity, "{:.4f}"), g.A_log,
               g.dt_bias);
}

void print_gates(const std::vector<HeadReport>& gates) {
  int64_t heads = 0;
  for (const HeadReport& g : gates) heads = std::max(heads, g.head + 1);
  const auto table = [&](const char* title,
                         const std::function<std::string(const HeadReport&)>& cell) {
    fmt::print("\n{}\nlayer", title);
    for (int64_t h = 0; h < heads; ++h) fmt::print("{:>10}", fmt::format("head {}", h));
    for (const HeadReport& g : gates) {
      if (g.head == 0) fmt::print("\n{:>5}", g.layer);
      fmt::print("{:>10}", cell(g));
    }
    fmt::print("\n");
  };
  table("timescale, tokens: 1 / mean decay per token",
        [](const HeadReport& g) { return fmt::format("{:.5g}", g.timescale); });
  table("sensitivity: mean slope of the softplus in the gate",
        [](const HeadReport& g) { return fmt::format("{:.4f}", g.sensitivity); });
}

void print_decays(const DecayUse& use) {
  fmt::print("{:>5} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}\n", "layer", "1st quart.",
             "median", "3rd quart.", "mean", "deviation", "least", "most");
  const auto row = [](const std::string& layer, const DecaySpread& s) {
    fmt::print("{:>5} {:>10.6f} {:>10.6f} {:>10.6f} {:>10.6f} {:>10.6f} {:>10.3g} {:>10.6f}\n",
               layer, s.lower_quartile, s.median, s.upper_quartile, s.mean, s.deviation, s.least,
               s.most);
  };
  for (size_t l = 0; l < use.layers.size(); ++l) row(std::to_string(l), use.layers[l]);
  row("all", use.all);
}

}  // namespace ebb::tools
