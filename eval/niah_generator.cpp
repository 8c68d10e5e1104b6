#include <algorithm>
#include <cmath>

#include "eval/niah.h"
#include "nn/module.h"
#include "tensor/check.h"
#include "tensor/random.h"

namespace ebb {

namespace {

// Independent uniform draws of one sample.
class Draws {
 public:
  explicit Draws(uint64_t seed, uint64_t stream) : key_{seed, stream} {}
  // Uniform in [0, n), without bias (Lemire's rejection).
  uint64_t below(uint64_t n) {
    for (;;) {
      const unsigned __int128 m = static_cast<unsigned __int128>(word64()) * n;
      if (uint64_t(m) >= -n % n) return uint64_t(m >> 64);
    }
  }
  uint64_t word64() {
    const Philox4 r = philox(key_, next_++);
    return uint64_t(r.v[0]) << 32 | r.v[1];
  }
  // k different numbers of [0, n), in the order drawn.
  std::vector<int64_t> distinct(int64_t k, int64_t n) {
    std::vector<int64_t> out;
    while (int64_t(out.size()) < k) {
      const int64_t v = int64_t(below(uint64_t(n)));
      if (std::find(out.begin(), out.end(), v) == out.end()) out.push_back(v);
    }
    return out;
  }

 private:
  RandomKey key_;
  uint64_t next_ = 0;
};

// 40 even steps from 0 to 100, rounded half to even.
std::vector<int64_t> depth_steps() {
  std::vector<int64_t> out;
  for (int i = 0; i < 40; ++i) out.push_back(int64_t(std::nearbyint(double(i) * 100 / 39)));
  return out;
}

}  // namespace

NiahGenerator::NiahGenerator(const NiahTask& task, const Words& words, const Essay* essay,
                             TokenCount count, const NiahOptions& options)
    : task_(task), words_(words), essay_(essay), count_(std::move(count)), options_(options) {
  check(task.haystack == HaystackKind::noise || essay,
        "niah: {} needs a haystack text (--haystack FILE)", task.name);
  const int64_t u = unit();
  // Probes use streams far from the samples'.
  uint64_t probe = uint64_t(1) << 40;
  const auto fits = [&](int64_t H) { return this->fits(fitted(H, probe++), Sizing::haystack); };
  if (options_.fit == NiahFit::step) {
    int64_t H = u;
    while (fits(H)) H += u;
    haystack_ = std::max(u, H - u);
    return;
  }
  const double per_unit = double(fitted(u, probe++).tokens) / double(u);
  int64_t low = u, high = std::max(int64_t(3 * double(options_.length) / per_unit), 2 * u);
  haystack_ = u;
  while (low <= high) {
    const int64_t middle = (low + high) / 2;
    if (fits(middle)) {
      haystack_ = middle;
      low = middle + 1;
    } else {
      high = middle - 1;
    }
  }
}

int64_t NiahGenerator::unit() const {
  if (task_.haystack == HaystackKind::essay) return 500;
  return options_.length < 4096 ? 5 : 25;
}

NiahDraw NiahGenerator::draw(int64_t H, uint64_t stream) const {
  const uint64_t purpose = name_hash(fmt::format("{}/{}/{}", task_.name, options_.length, stream));
  Draws r(options_.seed, purpose);
  NiahDraw d;
  for (int64_t i = 0; i < task_.needles; ++i) {
    const std::string& a = words_.adjectives[r.below(words_.adjectives.size())];
    d.keys.push_back(a + "-" + words_.nouns[r.below(words_.nouns.size())]);
    if (task_.value == NeedleValue::number) {
      d.values.push_back(std::to_string(1'000'000 + r.below(9'000'000)));
    } else {
      const uint64_t a64 = (r.word64() & ~0xF000ull) | 0x4000ull;
      const uint64_t b64 = (r.word64() & ~(3ull << 62)) | (2ull << 62);
      d.values.push_back(fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", a64 >> 32,
                                     a64 >> 16 & 0xFFFF, a64 & 0xFFFF, b64 >> 48,
                                     b64 & 0xFFFFFFFFFFFFull));
    }
  }
  d.asked = int64_t(r.below(uint64_t(task_.needles)));
  if (task_.haystack == HaystackKind::noise) {
    d.places = r.distinct(task_.needles, H);
  } else {
    static const std::vector<int64_t> kDepths = depth_steps();
    for (int64_t i : r.distinct(task_.needles, int64_t(kDepths.size())))
      d.places.push_back(kDepths[size_t(i)]);
  }
  return d;
}

NiahSample NiahGenerator::fitted(int64_t H, uint64_t stream) const {
  NiahSample s = build_niah(task_, essay_, H, draw(H, stream));
  s.tokens = count_(s.prompt());
  return s;
}

bool NiahGenerator::fits(const NiahSample& s, Sizing what) const {
  const int64_t room = options_.length - options_.allowance;
  if (options_.fit == NiahFit::binary) return s.tokens <= room;
  // The harness's port leaves the prefix out and, while it looks for the size, adds the answer.
  return what == Sizing::haystack ? count_(s.input + s.outputs[0]) <= room
                                  : count_(s.input) <= room;
}

NiahSample NiahGenerator::sample(int64_t index) const {
  const int64_t u = unit();
  int64_t H = haystack_;
  for (uint64_t attempt = 0; H >= task_.needles; ++attempt) {
    NiahSample s = fitted(H, uint64_t(index) + (attempt << 32));
    if (fits(s, Sizing::sample)) {
      s.id = index;
      return s;
    }
    H = H > u ? H - u : H / 2;
  }
  fail("niah: {} does not fit {} tokens with this tokenizer, not even with an empty haystack",
       task_.name, options_.length);
}

}  // namespace ebb
