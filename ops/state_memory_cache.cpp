#include "ops/state_memory_cache.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/common.h"
#include "ops/state_memory_attention.h"

namespace ebb {

namespace cpu {
namespace {

// A vector over its root mean square, or as it is.
template <class T>
void unit(const T* x, int64_t width, double eps, bool normalize, T* out) {
  T sum = 0;
  for (int64_t j = 0; j < width; ++j) sum += x[j] * x[j];
  const T factor = normalize ? T(1) / std::sqrt(sum / T(width) + T(eps)) : T(1);
  for (int64_t j = 0; j < width; ++j) out[j] = x[j] * factor;
}

// One sequence and head: every memory is read once, row by row, for its scale, key and value.
template <class T>
void attend(const StateMemoryStepProblem& p, int64_t b, int64_t head, T* out) {
  const Tensor& memories = p.memories;
  const int64_t heads = memories.size(2), n = memories.size(3), width = memories.size(4);
  const auto shared = [&](const Tensor& t) {  // the vector this head reads
    const int64_t of = t.size(1), size = t.numel() / (t.size(0) * of);
    return t.data<T>() + (b * of + head / (heads / of)) * size;
  };
  T q[256], e[256], value[256], sum[256] = {};
  unit(shared(p.q), n, p.eps, p.normalize, q);
  unit(shared(p.e), width, p.eps, p.normalize, e);
  const T* c = shared(p.c);
  T largest = -std::numeric_limits<T>::infinity(), total = 0;
  for (int64_t m = 0; m < p.runs.data<int64_t>()[b]; ++m) {
    const T* s = memories.data<T>() + ((b * memories.size(1) + m) * heads + head) * n * width;
    std::fill(value, value + width, T(0));
    T logit = 0;
    for (int64_t i = 0; i < n; ++i) {
      T square = 0, key = 0;
      for (int64_t j = 0; j < width; ++j) {
        const T x = s[i * width + j];
        square += x * x;
        key += x * e[j];
        value[j] += c[i] * x;
      }
      const T rho = p.normalize ? T(1) / std::sqrt(square / T(width) + T(p.eps_row)) : T(1);
      logit += q[i] * rho * key;
    }
    logit *= T(p.scale);
    // A NaN stays in `largest`, so that everything after it is NaN too.
    const T before = largest;
    largest = logit > before || std::isnan(logit) ? logit : before;
    const T keep = before == largest ? T(1) : std::exp(before - largest);
    const T weight = std::exp(logit - largest);
    total = total * keep + weight;
    for (int64_t j = 0; j < width; ++j) sum[j] = sum[j] * keep + weight * value[j];
  }
  const T gate = p.gate ? *shared(p.gate) : T(1);
  const T factor = total != 0 ? gate / total : T(0);
  const T* base = p.base ? p.base.data<T>() + (b * heads + head) * width : nullptr;
  for (int64_t j = 0; j < width; ++j) out[j] = (base ? base[j] : T(0)) + factor * sum[j];
}

}  // namespace

void state_memory_attention_step(const StateMemoryStepProblem& p, const Tensor& o) {
  const int64_t heads = o.size(1), width = o.size(2), work = o.size(0) * heads;
  visit_float(o.dtype(), [&]<class T>() {
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
#pragma omp parallel for schedule(dynamic) if (work > 1)
      for (int64_t i = 0; i < work; ++i)
        attend<T>(p, i / heads, i % heads, o.data<T>() + i * width);
    }
  });
}

}  // namespace cpu

namespace {

constexpr const char* kOp = "state_memory_attention_step";

void check_cache(const char* op, const StateMemoryCache& cache, int64_t memory_chunk) {
  check_defined(op, "memories", cache.memories);
  check(memory_chunk >= 1, "{}: memory_chunk is {}, want at least 1", op, memory_chunk);
  const Tensor& m = cache.memories;
  check(m.dim() == 5 && m.is_contiguous(), "{}: memories is {}, want dense [B,C,H,N,P]", op,
        m.shape());
  check_shape(op, "open", cache.open, {m.size(0), m.size(2), m.size(3), m.size(4)});
  check_shape(op, "position", cache.position, {m.size(0)});
  check(cache.position.dtype() == DType::i64 && !cache.position.on_cuda(),
        "{}: position is {} on {}, want i64 on cpu", op, cache.position.dtype(),
        cache.position.device());
  check(cache.open.device() == m.device(), "{}: open is on {}, memories on {}", op,
        cache.open.device(), m.device());
  for (int64_t b = 0; b < m.size(0); ++b)
    check(cache.position.data<int64_t>()[b] >= 0 && cache.runs(b, memory_chunk) <= m.size(1),
          "{}: row {} is at position {}, the cache has room for {} runs of {}", op, b,
          cache.position.data<int64_t>()[b], m.size(1), memory_chunk);
}

// t is [lead...,*,width] with a divisor of the heads as *; width 0: [lead...,*].
Tensor checked(const char* op, const char* what, const Tensor& t, const Shape& lead,
               const Tensor& memories, int64_t width) {
  check_defined(op, what, t);
  check(t.dtype() == memories.dtype(), "{}: {} is {}, memories {}; want one dtype", op, what,
        t.dtype(), memories.dtype());
  const int64_t heads = memories.size(2), at = int64_t(lead.size());
  check(t.dim() == at + (width ? 2 : 1) && t.shape().first(int(at)) == lead &&
            (!width || t.size(-1) == width) && t.size(int(at)) >= 1 && heads % t.size(int(at)) == 0,
        "{}: {} is {}, want [{},*{}] with a divisor of {} heads as *", op, what, t.shape(),
        fmt::join(lead.begin(), lead.end(), ","), width ? fmt::format(",{}", width) : "", heads);
  return t.contiguous();
}

// All inputs of a step or a window, tokens of shape `lead`.
StateMemoryStepProblem checked_problem(const char* op, const Tensor& q, const Tensor& e,
                                       const Tensor& c, const Shape& lead, const Tensor& m,
                                       const StateMemoryStep& options) {
  check_compute_dtype(op, "memories", m);
  const int64_t H = m.size(2), N = m.size(3), P = m.size(4);
  check(N >= 1 && N <= 256 && P >= 1 && P <= 256, "{}: memories is {}, want N and P in 1...256", op,
        m.shape());
  check(options.eps > 0 && options.eps_row > 0, "{}: eps is {}, eps_row {}; want more than 0", op,
        options.eps, options.eps_row);
  check(std::isfinite(options.scale) && options.scale >= 0,
        "{}: scale is {}, want more than 0, or 0 for 1/sqrt(N)", op, options.scale);
  check_same_device(op, m, {&q, &e, &c, &options.gate, &options.base});
  StateMemoryStepProblem p{.q = checked(op, "q", q, lead, m, N),
                           .e = checked(op, "e", e, lead, m, P),
                           .c = checked(op, "c", c, lead, m, N),
                           .memories = m,
                           .scale = options.scale > 0 ? options.scale : 1 / std::sqrt(double(N)),
                           .eps = options.eps,
                           .eps_row = options.eps_row,
                           .normalize = options.normalize};
  if (options.gate) p.gate = checked(op, "gate", options.gate, lead, m, 0);
  if (options.base) {
    Shape rows = lead;
    rows.push_back(H), rows.push_back(P);
    check_shape(op, "base", options.base, rows);
    check(options.base.dtype() == m.dtype(), "{}: base is {}, memories {}; want one dtype", op,
          options.base.dtype(), m.dtype());
    p.base = options.base.contiguous();
  }
  return p;
}

}  // namespace

StateMemoryCache empty_state_memory_cache(int64_t batch, int64_t heads, int64_t state_dim,
                                          int64_t value_dim, DType dtype, Device device) {
  return {Tensor::zeros({batch, 0, heads, state_dim, value_dim}, dtype, device),
          Tensor::zeros({batch, heads, state_dim, value_dim}, accumulate_type(dtype), device),
          Tensor::zeros({batch}, DType::i64)};
}

StateMemoryCache state_memory_cache(const Tensor& contributions, const SeqLayout& layout,
                                    int64_t batch, int64_t time, int64_t memory_chunk) {
  constexpr const char* op = "state_memory_cache";
  check_defined(op, "contributions", contributions);
  check(memory_chunk >= 1, "{}: memory_chunk is {}, want at least 1", op, memory_chunk);
  layout.check_covers(op, batch, time, contributions.device());
  check(contributions.dim() == 4 &&
            contributions.size(0) == layout.chunk_count(batch, time, memory_chunk),
        "{}: contributions is {}, want [{},H,N,P]", op, contributions.shape(),
        layout.chunk_count(batch, time, memory_chunk));
  const int64_t rows = layout.count(batch);
  int64_t longest = 0;
  for (int64_t n = 0; n < rows; ++n)
    longest = std::max(longest, layout.end(n, time) - layout.begin(n, time));
  const Shape run = contributions.shape().from(1);
  StateMemoryCache out = empty_state_memory_cache(rows, run[0], run[1], run[2],
                                                  contributions.dtype(), contributions.device());
  Shape room = out.memories.shape();
  room[1] = longest / memory_chunk;
  out.memories = Tensor::zeros(room, contributions.dtype(), contributions.device());
  int64_t first = 0;
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t length = layout.end(n, time) - layout.begin(n, time);
    const int64_t whole = length / memory_chunk;
    out.position.data<int64_t>()[n] = length;
    if (whole > 0)
      copy(out.memories.select(0, n).slice(0, 0, whole),
           contributions.slice(0, first, first + whole));
    if (length % memory_chunk != 0)
      copy(out.open.select(0, n), contributions.select(0, first + whole).to(out.open.dtype()));
    first += (length + memory_chunk - 1) / memory_chunk;
  }
  return out;
}

Tensor state_memory_attention_step(const Tensor& q, const Tensor& e, const Tensor& c,
                                   const StateMemoryCache& cache, int64_t memory_chunk,
                                   const StateMemoryStep& options) {
  const OpScope scope(kOp);
  check_cache(kOp, cache, memory_chunk);
  const Tensor& m = cache.memories;
  StateMemoryStepProblem p = checked_problem(kOp, q, e, c, {m.size(0)}, m, options);
  std::vector<int64_t> runs;
  for (int64_t b = 0; b < cache.batch(); ++b) runs.push_back(cache.runs(b, memory_chunk));
  p.runs = Tensor::from(runs, {cache.batch()}, m.device());
  const Tensor o = Tensor::empty({m.size(0), m.size(2), m.size(4)}, m.dtype(), m.device());
  if (kWithCuda && o.on_cuda())
    gpu::state_memory_attention_step(p, o);
  else
    cpu::state_memory_attention_step(p, o);
  return o;
}

void state_memory_advance(StateMemoryCache& cache, int64_t memory_chunk) {
  check_cache("state_memory_advance", cache, memory_chunk);
  cache.position.bump_version();
  cache.open.bump_version();
  int64_t most = 0;
  for (int64_t b = 0; b < cache.batch(); ++b) {
    ++cache.position.data<int64_t>()[b];
    most = std::max(most, cache.runs(b, memory_chunk));
  }
  const int64_t room = cache.memories.size(1);
  if (most > room) {
    Shape shape = cache.memories.shape();
    shape[1] = std::max<int64_t>(most, 2 * room);
    const Tensor wider = Tensor::zeros(shape, cache.memories.dtype(), cache.memories.device());
    if (room > 0) copy(wider.slice(1, 0, room), cache.memories);
    cache.memories = wider;
  }
  for (int64_t b = 0; b < cache.batch(); ++b) {
    if (cache.position.data<int64_t>()[b] % memory_chunk != 0) continue;
    const Tensor full = cache.open.select(0, b);
    copy(cache.memories.select(0, b).select(0, cache.runs(b, memory_chunk) - 1),
         full.to(cache.memories.dtype()));
    full.fill_(0);
  }
}

namespace {

int64_t length_of(const SeqLayout& layout, int64_t n, int64_t time) {
  return layout.end(n, time) - layout.begin(n, time);
}

// A sequence's new tokens: `head` of them belong to the open run.
struct Going {
  int64_t position, length, head;
  Going(const StateMemoryCache& cache, const SeqLayout& layout, int64_t n, int64_t time,
        int64_t memory_chunk)
      : position(cache.position.data<int64_t>()[n]), length(length_of(layout, n, time)) {
    const int64_t open = position % memory_chunk;
    head = open ? std::min(memory_chunk - open, length) : 0;
  }
};

void check_rows(const char* op, const StateMemoryCache& cache, const SeqLayout& layout,
                int64_t batch, int64_t time, int64_t memory_chunk) {
  check_cache(op, cache, memory_chunk);
  layout.check_covers(op, batch, time, cache.open.device());
  check(layout.count(batch) == cache.batch(), "{}: {} sequences, the cache holds {}", op,
        layout.count(batch), cache.batch());
}

}  // namespace

SeqLayout state_memory_pieces(const StateMemoryCache& cache, const SeqLayout& layout, int64_t batch,
                              int64_t time, int64_t memory_chunk) {
  check_rows("state_memory_pieces", cache, layout, batch, time, memory_chunk);
  std::vector<int64_t> cuts{0};
  for (int64_t n = 0; n < cache.batch(); ++n) {
    const Going g(cache, layout, n, time, memory_chunk);
    cuts.push_back(layout.begin(n, time) + g.head);
    cuts.push_back(layout.end(n, time));
  }
  return SeqLayout::packed(cuts, cache.open.device());
}

Tensor state_memory_openings(const StateMemoryCache& cache) {
  Shape shape = cache.open.shape();
  shape[0] *= 2;
  const Tensor out = Tensor::zeros(shape, cache.open.dtype(), cache.open.device());
  for (int64_t n = 0; n < cache.batch(); ++n) copy(out.select(0, 2 * n), cache.open.select(0, n));
  return out;
}

StateMemoryCache state_memory_extend(const StateMemoryCache& cache, const Tensor& contributions,
                                     const Tensor& states, const SeqLayout& layout, int64_t batch,
                                     int64_t time, int64_t memory_chunk) {
  constexpr const char* op = "state_memory_extend";
  check_rows(op, cache, layout, batch, time, memory_chunk);
  check_defined(op, "contributions", contributions);
  check_defined(op, "states", states);
  const SeqLayout pieces = state_memory_pieces(cache, layout, batch, time, memory_chunk);
  Shape shape = cache.memories.shape().from(1);  // [C,H,N,P]
  shape[0] = pieces.chunk_count(batch, time, memory_chunk);
  check_shape(op, "contributions", contributions, shape);
  shape[0] = 2 * cache.batch();
  check_shape(op, "states", states, shape);
  int64_t most = 0;
  for (int64_t n = 0; n < cache.batch(); ++n) {
    const Going g(cache, layout, n, time, memory_chunk);
    most = std::max(most, (g.position + g.length) / memory_chunk);
  }
  StateMemoryCache out{{}, cache.open.clone(), cache.position.clone()};
  shape = cache.memories.shape();
  shape[1] = most;
  out.memories = Tensor::zeros(shape, cache.memories.dtype(), cache.memories.device());
  int64_t first = 0;  // the piece's first contribution
  for (int64_t n = 0; n < cache.batch(); ++n) {
    const Going g(cache, layout, n, time, memory_chunk);
    const Tensor mine = out.memories.select(0, n), open = out.open.select(0, n);
    int64_t runs = cache.runs(n, memory_chunk);
    if (runs > 0) copy(mine.slice(0, 0, runs), cache.memories.select(0, n).slice(0, 0, runs));
    if (g.head > 0) {
      ++first;  // what the head adds to the open run is in its final state
      copy(open, states.select(0, 2 * n));
      if ((g.position + g.head) % memory_chunk == 0) {
        copy(mine.select(0, runs++), open.to(mine.dtype()));
        open.fill_(0);
      }
    }
    const int64_t rest = g.length - g.head, whole = rest / memory_chunk;
    if (whole > 0)
      copy(mine.slice(0, runs, runs + whole), contributions.slice(0, first, first + whole));
    if (rest % memory_chunk != 0)
      copy(open, contributions.select(0, first + whole).to(open.dtype()));
    first += (rest + memory_chunk - 1) / memory_chunk;
    out.position.data<int64_t>()[n] = g.position + g.length;
  }
  return out;
}

Tensor state_memory_attention_window(const Tensor& q, const Tensor& e, const Tensor& c,
                                     const StateMemoryCache& cache, const SeqLayout& layout,
                                     int64_t memory_chunk, const StateMemoryStep& options) {
  constexpr const char* op = "state_memory_attention_window";
  const OpScope scope(op);
  check_defined(op, "q", q);
  check(q.dim() == 4, "{}: q is {}, want [B,T,*,N]", op, q.shape());
  const int64_t batch = q.size(0), time = q.size(1);
  check_rows(op, cache, layout, batch, time, memory_chunk);
  const Tensor& m = cache.memories;
  const StateMemoryStepProblem in = checked_problem(op, q, e, c, {batch, time}, m, options);
  StateMemoryProblem p{.q = in.q,
                       .e = in.e,
                       .c = in.c,
                       .memories = m.view({m.size(0) * m.size(1), m.size(2), m.size(3), m.size(4)}),
                       .gate = in.gate,
                       .base = in.base,
                       .scale = in.scale,
                       .eps = in.eps,
                       .eps_row = in.eps_row,
                       .normalize = in.normalize,
                       .memory_chunk = memory_chunk,
                       .layout = layout,
                       .room = m.size(1)};
  for (int64_t n = 0; n < cache.batch(); ++n) {
    p.before.push_back(cache.position.data<int64_t>()[n] - length_of(layout, n, time));
    check(p.before.back() >= 0, "{}: sequence {} has {} tokens here, the cache has taken in {}", op,
          n, length_of(layout, n, time), cache.position.data<int64_t>()[n]);
  }
  const Tensor o = Tensor::empty({batch, time, m.size(2), m.size(4)}, m.dtype(), m.device());
  const DType wide = accumulate_type(m.dtype());
  const Tensor r = Tensor::empty(o.shape(), wide, m.device());
  const Tensor lse = Tensor::empty(o.shape().first(3), wide, m.device());
  if (kWithCuda && o.on_cuda())
    gpu::state_memory_attention_fwd(p, o, r, lse);
  else
    cpu::state_memory_attention_fwd(p, o, r, lse);
  return o;
}

StateMemoryCacheSize state_memory_cache_size(int64_t length, int64_t memory_chunk,
                                             int64_t state_dim, int64_t value_dim) {
  check(length >= 0 && memory_chunk >= 1 && state_dim >= 1 && value_dim >= 1,
        "state_memory_cache_size: length {}, memory_chunk {}, N {}, P {}", length, memory_chunk,
        state_dim, value_dim);
  return {(length + memory_chunk - 1) / memory_chunk * state_dim * value_dim,
          2 * length * value_dim};
}

}  // namespace ebb
