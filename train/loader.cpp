#include "train/loader.h"

#include <algorithm>

#include "tensor/check.h"
#include "tensor/random.h"

namespace ebb {

int64_t permuted(int64_t i, int64_t n, uint64_t seed, uint64_t epoch) {
  int half = 1;
  while ((int64_t(1) << (2 * half)) < n) ++half;
  const uint64_t mask = (uint64_t(1) << half) - 1;
  uint64_t x = uint64_t(i);
  do {
    uint64_t left = x >> half, right = x & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const Philox4 f = philox({seed, (epoch << 3) | round}, right);
      const uint64_t next = left ^ (f.v[0] & mask);
      left = right;
      right = next;
    }
    x = (left << half) | right;
  } while (x >= uint64_t(n));
  return int64_t(x);
}

Loader::Loader(LoaderOptions options, uint64_t vocab_hash) : options_(std::move(options)) {
  check(!options_.shards.empty(), "loader: no shards given");
  check(options_.batch >= 1 && options_.length >= 1, "loader: batch {} of length {}",
        options_.batch, options_.length);
  check(options_.ranks >= 1 && options_.rank >= 0 && options_.rank < options_.ranks,
        "loader: rank {} of {}", options_.rank, options_.ranks);
  for (const std::string& path : options_.shards) {
    shards_.emplace_back(path);
    check(shards_.back().info().vocab_hash == vocab_hash,
          "loader: {} was tokenized with another vocabulary (hash {:016x}, want {:016x})", path,
          shards_.back().info().vocab_hash, vocab_hash);
    starts_.push_back(total_);
    total_ += shards_.back().info().tokens;
  }
  windows_ = (total_ - 1) / options_.length;
  check(windows_ >= 1, "loader: {} tokens are too few for one window of {} + 1", total_,
        options_.length);
}

void Loader::window(int64_t index, int64_t* out) const {
  int64_t at = index * options_.length, left = options_.length + 1;
  size_t s = size_t(std::upper_bound(starts_.begin(), starts_.end(), at) - starts_.begin()) - 1;
  while (left > 0) {
    const int64_t inside = at - starts_[s];
    const int64_t n = std::min(left, shards_[s].info().tokens - inside);
    if (n > 0) shards_[s].read(inside, {out, size_t(n)});
    out += n;
    at += n;
    left -= n;
    ++s;
  }
}

Batch Loader::build(int64_t cursor) const {
  const int64_t B = options_.batch, T = options_.length;
  Batch b{Tensor::empty({B, T}, DType::i64), Tensor::empty({B, T}, DType::i64), {}};
  std::vector<int64_t> row(size_t(T) + 1), cuts{0};
  for (int64_t i = 0; i < B; ++i) {
    const int64_t sample = (cursor * B + i) * options_.ranks + options_.rank;
    const int64_t epoch = sample / windows_, place = sample % windows_;
    const int64_t index =
        options_.shuffle ? permuted(place, windows_, options_.seed, uint64_t(epoch)) : place;
    window(index, row.data());
    std::copy_n(row.begin(), T, b.tokens.data<int64_t>() + i * T);
    std::copy_n(row.begin() + 1, T, b.labels.data<int64_t>() + i * T);
    if (!options_.reset_at_documents) continue;
    // A document begins inside the window: cut there, and predict nothing across the cut.
    const int64_t begin = index * T;
    for (size_t s = 0; s < shards_.size(); ++s) {
      const auto docs = shards_[s].documents();
      const int64_t first = begin - starts_[s] + 1;
      auto it = std::lower_bound(docs.begin(), docs.end(), uint64_t(std::max<int64_t>(first, 0)));
      for (; it != docs.end() && int64_t(*it) + starts_[s] < begin + T; ++it) {
        const int64_t cut = i * T + int64_t(*it) + starts_[s] - begin;
        if (cut <= cuts.back()) continue;
        cuts.push_back(cut);
        b.labels.data<int64_t>()[cut - 1] = -100;
      }
    }
    if (cuts.back() != (i + 1) * T) cuts.push_back((i + 1) * T);
  }
  if (options_.reset_at_documents) b.layout = SeqLayout::packed(cuts);
  return b;
}

Batch Loader::next() {
  Batch b = ahead_.valid() && ahead_cursor_ == cursor_ ? ahead_.get() : build(cursor_);
  ++cursor_;
  if (ahead_.valid()) ahead_.get();  // built for another place: a seek came between
  ahead_cursor_ = cursor_;
  ahead_ = std::async(std::launch::async, [this, c = cursor_] { return build(c); });
  return b;
}

void Loader::seek(int64_t cursor) {
  check(cursor >= 0, "loader: cursor {}", cursor);
  cursor_ = cursor;
}

BatchSource Loader::source() {
  return {[this] { return next(); }, [this] { return cursor(); }, [this](int64_t c) { seek(c); }};
}

}  // namespace ebb
