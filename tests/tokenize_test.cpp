// `ebb tokenize`: what it writes, what it counts, and that a failure leaves nothing behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "models/tokenizer.h"
#include "tensor/file.h"
#include "tests/cli.h"
#include "train/shards.h"

namespace ebb::testing {
namespace {

namespace fs = std::filesystem;

class Tokenize : public ::testing::Test {
 protected:
  std::string file(const std::string& name) const { return scratch_.path() + "/" + name; }
  std::string write(const std::string& name, const std::string& text) const {
    write_file_atomically(file(name), text);
    return file(name);
  }
  std::string out() const { return file("out/corpus"); }
  // Everything below out/, hidden names too.
  std::vector<std::string> written() const {
    std::vector<std::string> names;
    if (fs::exists(file("out")))
      for (const auto& f : fs::recursive_directory_iterator(file("out")))
        names.push_back(f.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
  CliResult tokenize(const std::string& inputs, const std::string& options = "") const {
    return run_ebb("tokenize " + inputs + " --tokenizer bytes --out " + out() + " " + options);
  }
  void expect_failure(const CliResult& r, const std::string& text, int code = 1) const {
    EXPECT_EQ(r.code, code) << r.out << r.err;
    EXPECT_EQ(r.out, "");
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    EXPECT_NE(r.err.find(text), std::string::npos) << "want " << text << "\n" << r.err;
  }
  const ScratchFolder scratch_;
};

std::vector<int64_t> tokens_of(const std::string& shard) {
  const Shard s(shard);
  s.verify();
  std::vector<int64_t> ids(size_t(s.info().tokens));
  s.read(0, ids);
  return ids;
}

// What the shard must hold: every text and the separator.
std::vector<int64_t> encoded(const Tokenizer& t, const std::vector<std::string>& texts) {
  std::vector<int64_t> ids;
  for (const std::string& text : texts) {
    for (const int64_t id : t.encode(text)) ids.push_back(id);
    ids.push_back(t.separator());
  }
  return ids;
}

TEST_F(Tokenize, TextAndJsonLinesInOrder) {
  const std::string a = write("a.txt", "one\ntwo"),
                    b = write(
                        "b.jsonl",
                        "{\"text\": \"three\"}\n\n{\"text\": \"\"}\n{\"text\": \"f\\u00fcnf\"}");
  const CliResult r = tokenize(a + " " + b);
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.err, "");
  EXPECT_EQ(written(), std::vector<std::string>{"corpus-00000.bin"});
  const Shard shard(out() + "-00000.bin");
  EXPECT_EQ(tokens_of(shard.path()),
            encoded(Tokenizer::bytes(), {"one\ntwo", "three", "f\xC3\xBCnf"}));
  EXPECT_EQ(shard.info().documents, 3);
  EXPECT_EQ(shard.info().vocab_hash, Tokenizer::bytes().vocab_hash());
  const std::vector<uint64_t> index(shard.documents().begin(), shard.documents().end());
  EXPECT_EQ(index, (std::vector<uint64_t>{0, 8, 14, 20}));
  for (const char* line : {"documents  3, 1 empty left out\n", "tokens     20, ",
                           "text       17 bytes, 1.000 per token\n", "corpus-00000.bin"})
    EXPECT_NE(r.out.find(line), std::string::npos) << line << "\n" << r.out;
  EXPECT_EQ(r.out.find("replaced"), std::string::npos);
}

TEST_F(Tokenize, OtherFieldsAndFormats) {
  const std::string lines = write("lines", "{\"text\": 1, \"body\": \"x\"}\n");
  ASSERT_EQ(tokenize(lines, "--format jsonl --field body").code, 0);
  EXPECT_EQ(tokens_of(out() + "-00000.bin"), encoded(Tokenizer::bytes(), {"x"}));
  const std::string json = write("plain.json", "{not json");
  ASSERT_EQ(tokenize(json, "--format text --overwrite").code, 0);
  EXPECT_EQ(tokens_of(out() + "-00000.bin"), encoded(Tokenizer::bytes(), {"{not json"}));
}

TEST_F(Tokenize, ShardsNeverCutADocument) {
  std::string lines;
  for (int i = 0; i < 50; ++i)
    lines += "{\"text\": \"" + std::string(size_t(i * 7 % 40 + 1), 'a') + "\"}\n";
  ASSERT_EQ(tokenize(write("a.jsonl", lines), "--shard-tokens 64").code, 0);
  int64_t documents = 0, tokens = 0;
  const std::vector<std::string> names = written();
  EXPECT_GT(names.size(), 10u);
  for (const std::string& name : names) {
    const Shard s(file("out/" + name));
    s.verify();
    EXPECT_LE(s.info().tokens, 64);
    EXPECT_EQ(s.token(s.info().tokens - 1), 256);
    documents += s.info().documents;
    tokens += s.info().tokens;
  }
  EXPECT_EQ(documents, 50);
  std::string letters;
  for (const char c : lines) letters += c == 'a' ? "a" : "";
  EXPECT_EQ(tokens, int64_t(letters.size()) + 50);
}

#ifdef EBB_WITH_SENTENCEPIECE
TEST_F(Tokenize, SentencePieceWhateverTheThreads) {
  const std::string folder = std::string(EBB_TEST_DATA) + "/tokenizers/three-men";
  const std::string book =
      read_file(std::string(EBB_TEST_DATA) + "/../../examples/data/three_men_in_a_boat.txt");
  std::vector<std::string> texts;
  std::string lines;
  for (size_t at = 0; at < book.size(); at += 1000) {
    // Cut where a character begins.
    std::string text = book.substr(at, 1000);
    int64_t ignored = 0;
    texts.push_back(replace_invalid_utf8(text, &ignored));
  }
  for (const std::string& t : texts) {
    lines += "{\"text\": \"";
    for (const char c : t)
      lines += c == '\n' ? "\\n" : c == '"' ? "\\\"" : c == '\\' ? "\\\\" : std::string(1, c);
    lines += "\"}\n";
  }
  write("book.jsonl", lines);
  std::vector<std::string> bytes;
  for (const char* threads : {"1", "3"}) {
    setenv("OMP_NUM_THREADS", threads, 1);
    const CliResult r = run_ebb("tokenize " + file("book.jsonl") + " --tokenizer " + folder +
                                " --out " + out() + " --overwrite");
    unsetenv("OMP_NUM_THREADS");
    ASSERT_EQ(r.code, 0) << r.err;
    bytes.push_back(read_file(out() + "-00000.bin"));
  }
  EXPECT_EQ(bytes[0], bytes[1]);
  EXPECT_EQ(tokens_of(out() + "-00000.bin"), encoded(Tokenizer::load(folder), texts));
}
#endif

TEST_F(Tokenize, BadUtf8StopsOrIsReplaced) {
  const std::string a = write("a.jsonl", "{\"text\": \"fine\"}\n{\"text\": \"b\xFF\xFE\"}\n");
  expect_failure(tokenize(a), "a.jsonl:2: byte 11 of the line is not valid UTF-8");
  EXPECT_TRUE(written().empty());
  const CliResult r = tokenize(a, "--bad-utf8 replace");
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("replaced   2 broken UTF-8 parts"), std::string::npos) << r.out;
  EXPECT_EQ(tokens_of(out() + "-00000.bin"),
            encoded(Tokenizer::bytes(), {"fine", "b\xEF\xBF\xBD\xEF\xBF\xBD"}));
}

// The bad line comes after shards have been written.
TEST_F(Tokenize, AFailedRunLeavesNothing) {
  std::string lines;
  for (int i = 0; i < 20; ++i) lines += "{\"text\": \"" + std::string(1 << 20, 'a') + "\"}\n";
  for (const auto& [line, problem] : std::vector<std::pair<std::string, std::string>>{
           {"{\"text\": ", "a.jsonl:21: not a JSON object"},
           {"{\"txt\": \"x\"}", "a.jsonl:21: field \"text\" is missing"},
           {"{\"text\": \"\x80\"}", "a.jsonl:21: byte 10"}}) {
    expect_failure(tokenize(write("a.jsonl", lines + line), "--shard-tokens 1000000"), problem);
    EXPECT_TRUE(written().empty());
  }
}

TEST_F(Tokenize, AnEarlierRunIsReplacedWholeOrNotAtAll) {
  const std::string many = write("many.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"def\"}\n"),
                    one = write("one.txt", "x"), bad = write("bad.txt", "\xFF");
  ASSERT_EQ(tokenize(many, "--shard-tokens 4").code, 0);
  write("out/corpus-notes.bin", "of others");
  write("out/corpus-extra-00000.bin", "of others");
  const std::vector<std::string> before = written();
  EXPECT_EQ(before.size(), 4u);
  expect_failure(tokenize(one), "exists already; --overwrite replaces it and 1 more");
  expect_failure(tokenize(one + " " + bad, "--overwrite"), "not valid UTF-8");
  EXPECT_EQ(written(), before);
  EXPECT_EQ(tokens_of(out() + "-00000.bin"), encoded(Tokenizer::bytes(), {"abc"}));
  ASSERT_EQ(tokenize(one, "--overwrite").code, 0);
  EXPECT_EQ(written(), (std::vector<std::string>{"corpus-00000.bin", "corpus-extra-00000.bin",
                                                 "corpus-notes.bin"}));
  EXPECT_EQ(tokens_of(out() + "-00000.bin"), encoded(Tokenizer::bytes(), {"x"}));
}

TEST_F(Tokenize, WrongInput) {
  const std::string a = write("a.txt", "x"), empty = write("empty.txt", "");
  expect_failure(tokenize(file("nothing.txt")), "nothing.txt does not exist");
  expect_failure(tokenize(scratch_.path()), "is not a file");
  expect_failure(tokenize(empty), "there is no text in the input (1 empty documents)");
  expect_failure(tokenize(write("cut.gz", "\x1F\x8B\x08")), "cut.gz");
  expect_failure(run_ebb("tokenize " + a + " --tokenizer /nowhere --out " + out()), "/nowhere");
  expect_failure(run_ebb("tokenize " + a + " --tokenizer bytes --out " + file("a.txt/b")), "a.txt");
  expect_failure(run_ebb("tokenize " + a + " --tokenizer bytes --out " + file("out/")),
                 "want a folder and the beginning of a name", 2);
  expect_failure(run_ebb("tokenize " + a + " --tokenizer bytes"), "--out is required", 2);
  expect_failure(tokenize(a, "--format html"), "--format", 2);
  expect_failure(tokenize(a, "--bad-utf8 ignore"), "--bad-utf8", 2);
  expect_failure(tokenize(a, "--shard-tokens 0"), "--shard-tokens 0", 2);
  EXPECT_TRUE(written().empty());
}

}  // namespace
}  // namespace ebb::testing
