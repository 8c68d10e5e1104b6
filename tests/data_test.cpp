// Text to batches: readers, shards, loader.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "models/tokenizer.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tests/temporary_folder.h"
#include "train/config.h"
#include "train/loader.h"
#include "train/text_reader.h"

namespace ebb {
namespace {

namespace fs = std::filesystem;

class Data : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  void put(const std::string& name, const std::string& text) const {
    write_file_atomically(path(name), text);
  }
  // Shards of one long count 0,1,2,... cut into documents.
  std::vector<std::string> counting(int64_t tokens, int64_t vocab, int64_t per_shard,
                                    int64_t document = 10) const {
    ShardWriter w(path("s"), 7, vocab, per_shard);
    for (int64_t i = 0; i < tokens; i += document) {
      std::vector<int64_t> ids(size_t(std::min(document, tokens - i)));
      std::iota(ids.begin(), ids.end(), i);
      w.add(ids);
    }
    return w.finish();
  }
  static std::string message(const std::function<void()>& f) {
    try {
      f();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }
  testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();
};

TEST_F(Data, ShardsKeepIdsAbove65535) {
  ShardWriter w(path("big"), 1, 131072);
  w.add(std::vector<int64_t>{70000, 3, 131071});
  w.add(std::vector<int64_t>{});
  const Shard s(w.finish().at(0));
  s.verify();
  EXPECT_EQ(s.info().bytes_per_token, 4);
  EXPECT_EQ(s.token(0), 70000);
  EXPECT_EQ(s.token(2), 131071);
  EXPECT_EQ(s.info().documents, 2);
  EXPECT_THROW(w.add(std::vector<int64_t>{131072}), Error);
}

TEST_F(Data, DamagedShardsAreNamed) {
  const std::string file = counting(100, 1000, 1000).at(0);
  const std::string good = read_file(file);
  for (size_t n : {size_t(0), size_t(10), size_t(64), good.size() - 1}) {
    put("cut.bin", good.substr(0, n));
    EXPECT_NE(message([&] { Shard s(path("cut.bin")); }).find("cut.bin"), std::string::npos) << n;
  }
  std::string flipped = good;
  flipped[70] ^= 1;
  put("flip.bin", flipped);
  EXPECT_NE(message([&] { Shard(path("flip.bin")).verify(); }).find("checksum"), std::string::npos);
  put("text.bin", std::string(200, 'x'));
  EXPECT_NE(message([&] { Shard s(path("text.bin")); }).find("not a token shard"),
            std::string::npos);
}

TEST_F(Data, LoaderSeesEveryWindowOncePerEpoch) {
  const auto shards = counting(1000, 2000, 130);
  EXPECT_GT(shards.size(), 3u);
  Loader loader({.shards = shards, .batch = 3, .length = 9, .seed = 5}, 7);
  EXPECT_EQ(loader.windows(), 111);
  std::set<int64_t> first;
  for (int i = 0; i < 37; ++i) {
    const Batch b = loader.next();
    for (int64_t r = 0; r < 3; ++r) {
      const auto t = b.tokens.select(0, r).to_vector<int64_t>(),
                 l = b.labels.select(0, r).to_vector<int64_t>();
      first.insert(t[0]);
      for (int64_t j = 0; j < 9; ++j) {
        EXPECT_EQ(t[size_t(j)], t[0] + j);
        EXPECT_EQ(l[size_t(j)], t[0] + j + 1);
      }
    }
  }
  EXPECT_EQ(first.size(), 111u);
}

TEST_F(Data, CursorResumesExactly) {
  const auto shards = counting(1000, 2000, 130);
  const LoaderOptions o{.shards = shards, .batch = 2, .length = 8, .seed = 9};
  Loader a(o, 7), b(o, 7);
  for (int i = 0; i < 5; ++i) a.next();
  b.seek(a.cursor());
  for (int i = 0; i < 200; ++i)  // across epochs
    EXPECT_EQ(a.next().tokens.to_vector<int64_t>(), b.next().tokens.to_vector<int64_t>());
}

TEST_F(Data, RanksShareTheGlobalBatch) {
  const auto shards = counting(1000, 2000, 1000);
  LoaderOptions one{.shards = shards, .batch = 4, .length = 8};
  LoaderOptions two = one;
  two.batch = 2;
  two.ranks = 2;
  Loader whole(one, 7), left(two, 7);
  two.rank = 1;
  Loader right(two, 7);
  for (int i = 0; i < 10; ++i) {
    std::multiset<int64_t> a, b;
    for (int64_t t : whole.next().tokens.to_vector<int64_t>()) a.insert(t);
    for (Loader* l : {&left, &right})
      for (int64_t t : l->next().tokens.to_vector<int64_t>()) b.insert(t);
    EXPECT_EQ(a, b);
  }
}

TEST_F(Data, DocumentsCutTheLayout) {
  const auto shards = counting(400, 1000, 95, 10);
  Loader loader(
      {.shards = shards, .batch = 2, .length = 24, .shuffle = false, .reset_at_documents = true},
      7);
  for (int i = 0; i < 6; ++i) {
    const Batch b = loader.next();
    const auto tokens = b.tokens.to_vector<int64_t>(), labels = b.labels.to_vector<int64_t>();
    std::vector<int64_t> want{0};
    for (int64_t p = 1; p < 48; ++p)
      if (p == 24 || tokens[size_t(p)] % 10 == 0) want.push_back(p);
    want.push_back(48);
    EXPECT_EQ(b.layout.host(), want);
    for (int64_t p = 0; p < 48; ++p) {
      const bool cut = (p + 1) % 24 != 0 && tokens[size_t(p)] % 10 == 9;
      EXPECT_EQ(labels[size_t(p)], cut ? -100 : tokens[size_t(p)] + 1) << p;
    }
  }
}

TEST_F(Data, LoaderRefusesWhatDoesNotFit) {
  const auto shards = counting(20, 1000, 1000);
  EXPECT_NE(message([&] { Loader({.shards = shards, .length = 8}, 8); }).find("vocabulary"),
            std::string::npos);
  EXPECT_NE(message([&] { Loader({.shards = shards, .length = 20}, 7); }).find("too few"),
            std::string::npos);
  EXPECT_NE(message([&] { Loader({.shards = {}}, 7); }).find("no shards"), std::string::npos);
  EXPECT_NE(message([&] { expand_shards({path("nothing")}); }).find("nothing"), std::string::npos);
}

TEST_F(Data, APrefixStandsForItsOwnShardsOnly) {
  for (const char* name : {"train-00001.bin", "train-00000.bin", "train-extra-00000.bin",
                           "train-.bin", "train-0000.bin", "train-00002.txt"})
    put(name, "");
  EXPECT_EQ(expand_shards({path("train")}),
            (std::vector<std::string>{path("train-00000.bin"), path("train-00001.bin")}));
  put("train-100000.bin", "");  // its own too, and those between are missing
  EXPECT_NE(message([&] { expand_shards({path("train")}); }).find("train-00002.bin is missing"),
            std::string::npos);
}

TEST(Permutation, IsABijectionForEverySize) {
  for (int64_t n : {1, 2, 3, 7, 64, 65, 1000})
    for (uint64_t epoch : {0, 1}) {
      std::set<int64_t> seen;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t p = permuted(i, n, 3, epoch);
        EXPECT_TRUE(p >= 0 && p < n);
        seen.insert(p);
      }
      EXPECT_EQ(int64_t(seen.size()), n);
    }
}

TEST_F(Data, ReadersHandOutDocuments) {
  put("a.jsonl", "{\"text\": \"one\"}\n\n{\"text\": \"\", \"x\": 1}\r\n{\"text\": \"three\\n\"}");
  put("b.txt", "whole file\nof text");
  std::vector<std::string> got;
  const auto keep = [&](std::string_view t) { got.emplace_back(t); };
  ReadCounts c = read_documents(path("a.jsonl"), {}, keep);
  EXPECT_EQ(c.documents, 2);
  EXPECT_EQ(c.empty, 1);
  read_documents(path("b.txt"), {}, keep);
  EXPECT_EQ(got, (std::vector<std::string>{"one", "three\n", "whole file\nof text"}));
}

TEST_F(Data, CompressedTextIsRecognisedByContent) {
  const std::string text = "{\"text\": \"packed\"}\n";
  put("plain.jsonl", text);
  for (const char* tool : {"gzip -c", "zstd -qc"}) {
    const std::string command =
        fmt::format("{} {} > {} 2>/dev/null", tool, path("plain.jsonl"), path("packed.jsonl"));
    if (std::system(command.c_str()) != 0) continue;  // the tool is not installed
    std::string got;
    try {
      read_documents(path("packed.jsonl"), {}, [&](std::string_view t) { got = t; });
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("this build has no"), std::string::npos) << e.what();
      continue;
    }
    EXPECT_EQ(got, "packed") << tool;
    const std::string bytes = read_file(path("packed.jsonl"));
    put("cut.jsonl", bytes.substr(0, bytes.size() - 6));
    EXPECT_NE(message([&] {
                read_documents(path("cut.jsonl"), {}, [](std::string_view) {});
              }).find("cut.jsonl"),
              std::string::npos)
        << tool;
    put("twice.jsonl", bytes + bytes);  // files that were joined
    int documents = 0;
    read_documents(path("twice.jsonl"), {}, [&](std::string_view) { ++documents; });
    EXPECT_EQ(documents, 2) << tool;
    put("tail.jsonl", bytes + "and more");
    EXPECT_NE(message([&] {
                read_documents(path("tail.jsonl"), {}, [](std::string_view) {});
              }).find("tail.jsonl is damaged"),
              std::string::npos)
        << tool;
  }
}

TEST_F(Data, CompressedTextOfManyPieces) {
  std::string text;
  for (int64_t i = 0; i < 400000; ++i) text += std::to_string(i * 7919 % 100003) + " ";
  put("large.txt", text);
  for (const char* tool : {"gzip -1c", "zstd -qc"}) {
    const std::string command =
        fmt::format("{} {} > {} 2>/dev/null", tool, path("large.txt"), path("large.packed"));
    if (std::system(command.c_str()) != 0) continue;  // the tool is not installed
    std::string got;
    int64_t consumed = 0;
    try {
      read_bytes(
          path("large.packed"), [&](std::string_view t) { got += t; },
          [&](int64_t n) { consumed = n; });
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("this build has no"), std::string::npos) << e.what();
      continue;
    }
    EXPECT_EQ(got, text) << tool;
    EXPECT_EQ(consumed, int64_t(read_file(path("large.packed")).size())) << tool;
  }
}

TEST_F(Data, BadTextIsAnErrorOrADocumentedReplacement) {
  put("bad.jsonl", "{\"text\": \"ok\"}\n{\"text\": \"a\xFFz\"}\n");
  std::vector<std::string> got;
  const auto keep = [&](std::string_view t) { got.emplace_back(t); };
  EXPECT_NE(message([&] { read_documents(path("bad.jsonl"), {}, keep); }).find("bad.jsonl:2"),
            std::string::npos);
  got.clear();
  const ReadCounts c = read_documents(path("bad.jsonl"), {.bad_utf8 = BadUtf8::replace}, keep);
  EXPECT_EQ(c.replaced, 1);
  EXPECT_EQ(got.back(), "a\xEF\xBF\xBDz");
  put("broken.jsonl", "{\"text\": \n");
  EXPECT_NE(message([&] { read_documents(path("broken.jsonl"), {}, keep); }).find("broken.jsonl:1"),
            std::string::npos);
  put("field.jsonl", "{\"txt\": \"x\"}\n");
  EXPECT_NE(message([&] { read_documents(path("field.jsonl"), {}, keep); }).find("\"text\""),
            std::string::npos);
  EXPECT_NE(message([&] { read_documents(path("none.txt"), {}, keep); }).find("none.txt"),
            std::string::npos);
}

}  // namespace
}  // namespace ebb
