#include "models/tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "tensor/check.h"
#include "tests/temporary_folder.h"

namespace ebb {
namespace {

TEST(Tokenizer, BytesRoundTripEverything) {
  const Tokenizer t = Tokenizer::load("bytes");
  std::string all;
  for (int i = 0; i < 256; ++i) all += char(i);
  EXPECT_EQ(t.decode(t.encode(all)), all);
  EXPECT_EQ(t.encode("A\xC3\xA9"), (std::vector<int64_t>{65, 0xC3, 0xA9}));
  EXPECT_EQ(t.vocab_size(), 257);
  EXPECT_EQ(t.separator(), 256);
  EXPECT_EQ(t.decode(std::vector<int64_t>{72, 256, 105}), "Hi");  // EOS has no text
  EXPECT_TRUE(t.encode("").empty());
  EXPECT_THROW(t.decode(std::vector<int64_t>{257}), Error);
  EXPECT_THROW(t.decode(std::vector<int64_t>{-1}), Error);
}

TEST(Tokenizer, SpansAreWhereTheIdsComeFrom) {
  const Tokenizer t = Tokenizer::bytes();
  const std::string text = "A\xC3\xA9 b";
  const auto spans = t.encode_spans(text);
  const auto ids = t.encode(text);
  ASSERT_EQ(spans.size(), ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(spans[i].id, ids[i]);
    EXPECT_EQ(spans[i].begin, int64_t(i));
    EXPECT_EQ(spans[i].end, int64_t(i) + 1);
  }
}

TEST(Tokenizer, FolderRoundTrip) {
  const testing::TemporaryFolder temporary;
  const std::string folder = temporary.path();
  Tokenizer::bytes().save(folder);
  EXPECT_EQ(Tokenizer::load(folder).vocab_hash(), Tokenizer::bytes().vocab_hash());
}

TEST(Tokenizer, MissingFilesAreNamed) {
  EXPECT_THROW(Tokenizer::load("/nonexistent/tokenizer.model"), Error);
  EXPECT_THROW(Tokenizer::load(::testing::TempDir()), Error);
}

TEST(Utf8, InvalidBytesAreFoundAndReplaced) {
  EXPECT_EQ(first_invalid_utf8("plain \xE2\x82\xAC \xF0\x9F\x98\x80"), std::string::npos);
  struct Case {
    const char* text;
    size_t at;
    int64_t parts;
  };
  // Lone continuation, overlong, surrogate, beyond U+10FFFF, truncated sequences.
  for (const Case& c :
       {Case{"a\x80", 1, 1}, Case{"\xC0\xAF", 0, 2}, Case{"\xED\xA0\x80", 0, 3},
        Case{"\xF4\x90\x80\x80", 0, 4}, Case{"ab\xE2\x82", 2, 1}, Case{"\xF0\x9F\x98x", 0, 1}}) {
    EXPECT_EQ(first_invalid_utf8(c.text), c.at) << c.text;
    int64_t replaced = 0;
    const std::string fixed = replace_invalid_utf8(c.text, &replaced);
    EXPECT_EQ(replaced, c.parts) << c.text;
    EXPECT_EQ(first_invalid_utf8(fixed), std::string::npos);
  }
}

}  // namespace
}  // namespace ebb
