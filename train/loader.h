// Loader: shuffled windows of tokens from shards, resumable by one number.
//   Loader loader({.shards = paths, .batch = 8, .length = 4096, .seed = 42}, vocab_hash);
//   Batch b = loader.next();              // tokens and labels [8,4096]
//   save(loader.cursor());  loader.seek(cursor);
#pragma once
#include <cstdint>
#include <functional>
#include <future>
#include <string>
#include <vector>

#include "ops/seq_layout.h"
#include "tensor/tensor.h"
#include "train/shards.h"

namespace ebb {

struct Batch {
  Tensor tokens;     // i64 [B,T], on the CPU
  Tensor labels;     // i64 [B,T]: the next token, -100 where there is nothing to predict
  SeqLayout layout;  // dense, or the documents inside the windows
};

// Where batches come from, whatever the task: the training loop asks for nothing else.
struct BatchSource {
  std::function<Batch()> next;
  std::function<int64_t()> cursor;    // batches handed out so far
  std::function<void(int64_t)> seek;  // goes on as if that many had been handed out
};

struct LoaderOptions {
  std::vector<std::string> shards = {};
  int64_t batch = 8;
  int64_t length = 1024;  // T; a window reads T + 1 tokens
  uint64_t seed = 42;
  bool shuffle = true;
  bool reset_at_documents = false;  // packed: state starts afresh at each document
  int64_t rank = 0, ranks = 1;      // this process takes every ranks-th sample
};

class Loader {
 public:
  // Throws when there are no shards, too few tokens for one window, or a shard was made with
  // another vocabulary.
  Loader(LoaderOptions options, uint64_t vocab_hash);
  Batch next();
  int64_t cursor() const { return cursor_; }
  void seek(int64_t cursor);
  int64_t windows() const { return windows_; }  // per epoch, over all ranks
  int64_t tokens() const { return total_; }     // in all shards
  BatchSource source();                         // borrows this loader

 private:
  Batch build(int64_t cursor) const;
  void window(int64_t index, int64_t* out) const;

  LoaderOptions options_;
  std::vector<Shard> shards_;
  std::vector<int64_t> starts_;  // first global token of each shard
  int64_t total_ = 0, windows_ = 0, cursor_ = 0;
  std::future<Batch> ahead_;  // the next batch, being built
  int64_t ahead_cursor_ = -1;
};

// The position of item i of n in a shuffle keyed by (seed, epoch): a bijection of [0, n) computed
// without tables (a Feistel network on Philox rounds, walked until it falls inside).
int64_t permuted(int64_t i, int64_t n, uint64_t seed, uint64_t epoch);

}  // namespace ebb
