#include "models/dart.h"

#include "autograd/tape.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "ops/movement.h"
#include "ops/state_memory_attention.h"
#include "tensor/check.h"

namespace ebb {

Dart::Dart(const ModelConfig& c)
    : Mamba2(c, c.sma_shared_read ? 1 : 2),
      on_(c.use_sma),
      normalize_(c.sma_normalize),
      chunk_(c.sma_chunk),
      sma_eps_(c.sma_eps),
      eps_row_(c.sma_eps_row) {
  const int64_t d = c.hidden_size;
  // Not rows of in_proj: its product, and so Mamba-2's numbers, are to stay what they are.
  queries_ =
      register_fused({{"q_proj.weight", {state_size_, d}}, {"e_proj.weight", {head_dim_, d}}}, 8);
  gate_ = register_fused({{"g_proj.weight", {1, d}}}, 8, WeightDecay::off);
}

Dart::Queries Dart::queries(const Var& x) const {
  const Var both = linear(x, queries_.var());
  std::vector<int64_t> sizes = {state_size_, head_dim_};
  const int64_t rest = both.shape().back() - state_size_ - head_dim_;
  if (rest > 0) sizes.push_back(rest);
  const std::vector<Var> parts = split(both, -1, sizes);
  return {unsqueeze(parts[0], -2), unsqueeze(parts[1], -2),
          silu(slice(linear(x, gate_.var()), -1, 0, 1))};
}

Var Dart::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                  MixerState* final) {
  if (!on_) return Mamba2::forward(x, layout, initial, final);
  if (initial) return go_on(x, layout, *initial, final);
  Tensor conv_state;
  const Inputs in = inputs(x, layout, {}, final ? &conv_state : nullptr);
  SsdOptions options = ssd_options();
  options.want_final_state = final != nullptr;
  options.layout = layout;
  options.memory_chunk = chunk_;
  options.wide_contributions = !final;  // a cache holds them as steps will find them
  const SsdOutput r = ssd(in.x, in.dt, A_log_.var(), in.B, in.C, {}, options);
  if (final) {
    const StateMemoryCache cache =
        state_memory_cache(r.contributions.value(), layout, x.shape()[0], x.shape()[1], chunk_);
    final->tensors = {r.ht.value(), conv_state, cache.memories, cache.open, cache.position};
  }
  const Queries s = queries(x);
  const Var o = state_memory_attention(s.q, s.e, read(in), r.contributions, chunk_,
                                       {.gate = s.gate,
                                        .base = r.y,
                                        .eps = sma_eps_,
                                        .eps_row = eps_row_,
                                        .normalize = normalize_,
                                        .layout = layout})
                    .o;
  return finish(o, in);
}

namespace {

StateMemoryCache cache_of(const MixerState& s) {
  check(s.tensors.size() == 5, "dart: a state of {} tensors, want 5", s.tensors.size());
  return {s.tensors[2], s.tensors[3], s.tensors[4]};
}

bool between_runs(const StateMemoryCache& cache, int64_t chunk) {
  for (int64_t n = 0; n < cache.batch(); ++n)
    if (cache.position.data<int64_t>()[n] % chunk != 0) return false;
  return true;
}

}  // namespace

StateMemoryStep Dart::step_options(const Queries& s, const Tensor& base) const {
  return {.gate = s.gate.value(),
          .base = base,
          .eps = sma_eps_,
          .eps_row = eps_row_,
          .normalize = normalize_};
}

// The runs do not begin where the tokens do: unless all rows stand between two runs, a second scan
// over the pieces of runs makes the memories.
Var Dart::go_on(const Var& x, const SeqLayout& layout, const MixerState& initial,
                MixerState* final) {
  check(!grad_enabled(), "dart: going on from a state is for decoding, without gradients");
  const StateMemoryCache before = cache_of(initial);
  const bool aligned = between_runs(before, chunk_);
  Tensor conv_state;
  const Inputs in = inputs(x, layout, initial.tensors[1], final ? &conv_state : nullptr);
  const int64_t B = x.shape()[0], T = x.shape()[1];
  SsdOptions options = ssd_options();
  options.want_final_state = true;
  options.layout = layout;
  if (aligned) options.memory_chunk = chunk_;
  const SsdOutput r = ssd(in.x, in.dt, A_log_.var(), in.B, in.C, Var(initial.tensors[0]), options);
  const Tensor openings = state_memory_openings(before);
  Tensor contributions = r.contributions.value(), states = openings;
  if (!aligned) {
    options.layout = state_memory_pieces(before, layout, B, T, chunk_);
    options.memory_chunk = chunk_;
    const SsdOutput m = ssd(in.x, in.dt, A_log_.var(), in.B, in.C, Var(openings), options);
    contributions = m.contributions.value(), states = m.ht.value();
  }
  const StateMemoryCache cache =
      state_memory_extend(before, contributions, states, layout, B, T, chunk_);
  if (final)
    final->tensors = {r.ht.value(), conv_state, cache.memories, cache.open, cache.position};
  const Queries s = queries(x);
  const Tensor o = state_memory_attention_window(s.q.value(), s.e.value(), read(in).value(), cache,
                                                 layout, chunk_, step_options(s, r.y.value()));
  return finish(o, in);
}

Var Dart::step(const Var& x, MixerState& state) {
  if (!on_) return Mamba2::step(x, state);
  const NoGrad off;
  StateMemoryCache cache = cache_of(state);
  const Inputs in = step_inputs(x, state.tensors[1]);
  const auto scan = [&](const Tensor& into) {
    return ssd_step(in.x.value(), in.dt.value(), A_log_.master(), in.B.value(), in.C.value(), into,
                    ssd_options());
  };
  const Tensor y = scan(state.tensors[0]);
  const Queries s = queries(x);
  const Tensor o = state_memory_attention_step(s.q.value(), s.e.value(), read(in).value(), cache,
                                               chunk_, step_options(s, y));
  scan(cache.open);
  state_memory_advance(cache, chunk_);
  state.tensors[2] = cache.memories;
  return finish(o, in);
}

MixerState Dart::zero_state(int64_t n, DType activations, Device device) const {
  MixerState s = Mamba2::zero_state(n, activations, device);
  if (!on_) return s;
  const StateMemoryCache cache =
      empty_state_memory_cache(n, heads_, state_size_, head_dim_, activations, device);
  for (const Tensor& t : {cache.memories, cache.open, cache.position}) s.tensors.push_back(t);
  return s;
}

}  // namespace ebb
