#include "train/text_reader.h"

#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "models/tokenizer.h"
#include "tensor/check.h"

#ifdef EBB_WITH_ZLIB
#include <zlib.h>
#endif
#ifdef EBB_WITH_ZSTD
#include <zstd.h>
#endif

namespace ebb {
namespace {

constexpr size_t kPiece = 1 << 20;
using Piece = std::function<void(std::string_view)>;
using Consumed = std::function<void(int64_t)>;
using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

File open_file(const std::string& path) {
  File f(std::fopen(path.c_str(), "rb"), std::fclose);
  check(f != nullptr, "read: cannot open {}: {}", path, std::strerror(errno));
  return f;
}

void read_plain(const std::string& path, const Piece& piece, const Consumed& consumed) {
  const File f = open_file(path);
  std::vector<char> buffer(kPiece);
  int64_t read = 0;
  while (const size_t n = std::fread(buffer.data(), 1, kPiece, f.get())) {
    piece({buffer.data(), n});
    if (consumed) consumed(read += int64_t(n));
  }
  check(!std::ferror(f.get()), "read: {} failed: {}", path, std::strerror(errno));
}

#ifdef EBB_WITH_ZLIB
// inflate itself, for zlib's file functions pass over whatever follows the last member.
struct Inflate {
  z_stream z = {};
  Inflate() { check(inflateInit2(&z, 15 + 16) == Z_OK, "read: zlib does not start"); }
  ~Inflate() { inflateEnd(&z); }
  Inflate(const Inflate&) = delete;
  Inflate& operator=(const Inflate&) = delete;
};

void read_gzip(const std::string& path, const Piece& piece, const Consumed& consumed) {
  const File f = open_file(path);
  Inflate stream;
  z_stream& z = stream.z;
  std::vector<char> in(kPiece), out(kPiece);
  int state = Z_OK;  // Z_STREAM_END after a member; another may follow
  int64_t read = 0;
  while (const size_t n = std::fread(in.data(), 1, in.size(), f.get())) {
    z.next_in = reinterpret_cast<Bytef*>(in.data());
    z.avail_in = unsigned(n);
    do {
      if (state == Z_STREAM_END && z.avail_in > 0) inflateReset(&z);
      z.next_out = reinterpret_cast<Bytef*>(out.data());
      z.avail_out = unsigned(out.size());
      state = inflate(&z, Z_NO_FLUSH);
      check(state == Z_OK || state == Z_STREAM_END || state == Z_BUF_ERROR,
            "read: {} is damaged gzip, or something else follows it: {}", path,
            z.msg ? z.msg : "no more is known");
      if (const size_t made = out.size() - z.avail_out) piece({out.data(), made});
    } while (z.avail_in > 0 || z.avail_out == 0);
    if (consumed) consumed(read += int64_t(n));
  }
  check(!std::ferror(f.get()), "read: {} failed: {}", path, std::strerror(errno));
  check(state == Z_STREAM_END, "read: {} ends in the middle of a gzip stream: truncated", path);
}
#endif

#ifdef EBB_WITH_ZSTD
void read_zstd(const std::string& path, const Piece& piece, const Consumed& consumed) {
  const File f = open_file(path);
  const std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> stream(ZSTD_createDStream(),
                                                                        ZSTD_freeDStream);
  std::vector<char> in(kPiece), out(kPiece);
  size_t state = 0;
  int64_t read = 0;
  while (const size_t n = std::fread(in.data(), 1, in.size(), f.get())) {
    ZSTD_inBuffer source{in.data(), n, 0};
    bool full = false;
    while (source.pos < source.size || full) {
      ZSTD_outBuffer target{out.data(), out.size(), 0};
      state = ZSTD_decompressStream(stream.get(), &target, &source);
      check(!ZSTD_isError(state), "read: {} is damaged zstd: {}", path, ZSTD_getErrorName(state));
      if (target.pos) piece({out.data(), target.pos});
      full = target.pos == target.size && state != 0;
    }
    if (consumed) consumed(read += int64_t(n));
  }
  check(!std::ferror(f.get()), "read: {} failed: {}", path, std::strerror(errno));
  check(state == 0, "read: {} ends in the middle of a zstd frame: truncated", path);
}
#endif

// Splits the stream into lines without holding more than one.
class Lines {
 public:
  explicit Lines(std::function<void(std::string_view, int64_t)> line) : line_(std::move(line)) {}
  void feed(std::string_view piece) {
    size_t at = 0;
    for (size_t end; (end = piece.find('\n', at)) != std::string_view::npos; at = end + 1) {
      rest_.append(piece, at, end - at);
      emit();
    }
    rest_.append(piece, at);
  }
  void finish() {
    if (!rest_.empty()) emit();
  }

 private:
  void emit() {
    ++number_;
    if (!rest_.empty() && rest_.back() == '\r') rest_.pop_back();
    line_(rest_, number_);
    rest_.clear();
  }
  std::function<void(std::string_view, int64_t)> line_;
  std::string rest_;
  int64_t number_ = 0;
};

bool looks_like_jsonl(const std::string& path) {
  return path.find(".json", path.rfind('/') + 1) != std::string::npos;  // also .jsonl.zst
}

}  // namespace

void read_bytes(const std::string& path, const Piece& piece, const Consumed& consumed) {
  unsigned char magic[4] = {};
  {
    const File f = open_file(path);
    if (std::fread(magic, 1, 4, f.get()) < 4 && std::ferror(f.get()))
      fail("read: {} failed: {}", path, std::strerror(errno));
  }
  if (magic[0] == 0x1F && magic[1] == 0x8B) {
#ifdef EBB_WITH_ZLIB
    return read_gzip(path, piece, consumed);
#else
    fail("read: {} is gzip, but this build has no zlib (install zlib1g-dev and configure again)",
         path);
#endif
  }
  if (magic[0] == 0x28 && magic[1] == 0xB5 && magic[2] == 0x2F && magic[3] == 0xFD) {
#ifdef EBB_WITH_ZSTD
    return read_zstd(path, piece, consumed);
#else
    fail("read: {} is zstd, but this build has no zstd (install libzstd-dev and configure again)",
         path);
#endif
  }
  read_plain(path, piece, consumed);
}

ReadCounts read_documents(const std::string& path, const ReadOptions& options,
                          const std::function<void(std::string_view)>& document) {
  ReadCounts counts;
  const auto hand_out = [&](std::string_view text, const std::string& where) {
    std::string mended;
    if (const size_t bad = first_invalid_utf8(text); bad != std::string_view::npos) {
      check(options.bad_utf8 == BadUtf8::replace,
            "{}: byte {} of the text is not valid UTF-8 (--bad-utf8 replace puts U+FFFD there)",
            where, bad);
      mended = replace_invalid_utf8(text, &counts.replaced);
      text = mended;
    }
    if (text.empty()) {
      ++counts.empty;
      return;
    }
    ++counts.documents;
    counts.bytes += int64_t(text.size());
    document(text);
  };
  const bool jsonl = options.format == TextFormat::jsonl ||
                     (options.format == TextFormat::automatic && looks_like_jsonl(path));
  if (!jsonl) {
    std::string all;
    read_bytes(
        path, [&](std::string_view piece) { all += piece; }, options.consumed);
    hand_out(all, path);
    return counts;
  }
  Lines lines([&](std::string_view line, int64_t number) {
    if (line.find_first_not_of(" \t") == std::string_view::npos) return;
    const std::string where = fmt::format("{}:{}", path, number);
    // The parser refuses broken UTF-8 itself, so it is mended or reported first.
    std::string mended;
    if (const size_t bad = first_invalid_utf8(line); bad != std::string_view::npos) {
      check(options.bad_utf8 == BadUtf8::replace,
            "{}: byte {} of the line is not valid UTF-8 (--bad-utf8 replace puts U+FFFD there)",
            where, bad);
      mended = replace_invalid_utf8(line, &counts.replaced);
      line = mended;
    }
    const nlohmann::json j = nlohmann::json::parse(line, nullptr, false);
    check(j.is_object(), "{}: not a JSON object", where);
    check(j.contains(options.field) && j[options.field].is_string(),
          "{}: field \"{}\" is missing or not a string", where, options.field);
    hand_out(j[options.field].get_ref<const std::string&>(), where);
  });
  read_bytes(
      path, [&](std::string_view piece) { lines.feed(piece); }, options.consumed);
  lines.finish();
  return counts;
}

}  // namespace ebb
