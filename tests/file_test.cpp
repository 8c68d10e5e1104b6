// Atomic writing under every kind of failure, and reading.
#include "tensor/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "tensor/hash.h"
#include "tests/temporary_folder.h"

namespace ebb::testing {
namespace {

namespace fs = std::filesystem;

template <class F>
std::string message(F fn) {
  try {
    fn();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string pattern(size_t bytes) {
  std::string s(bytes, ' ');
  for (size_t i = 0; i < bytes; ++i) s[i] = char(i * 31 + i / 997);
  return s;
}

TEST(File, WritesAndReplaces) {
  const TemporaryFolder folder;
  const std::string path = folder.file("results.json");
  write_file_atomically(path, "first");
  EXPECT_EQ(read_file(path), "first");
  write_file_atomically(path, "");
  EXPECT_EQ(read_file(path), "");
  const std::string zeros("a\0b", 3);
  write_file_atomically(path, zeros);
  EXPECT_EQ(read_file(path), zeros);
  EXPECT_EQ(folder.names(), std::vector<std::string>{"results.json"});
}

TEST(File, ManyWritesOfAllSizes) {
  const TemporaryFolder folder;
  const std::string path = folder.file("big");
  std::string want;
  write_file_atomically(path, [&](FileWriter& out) {
    for (const size_t n : {1u, 0u, 1048575u, 1u, 1048576u, 1048577u, 3000000u, 5u}) {
      const std::string part = pattern(n);
      out.write(part);
      want += part;
      EXPECT_EQ(out.size(), int64_t(want.size()));
    }
  });
  EXPECT_TRUE(read_file(path) == want);
}

TEST(File, RelativePaths) {
  const TemporaryFolder folder;
  const fs::path before = fs::current_path();
  fs::current_path(folder.path());
  write_file_atomically("here", "x");
  fs::current_path(before);
  EXPECT_EQ(read_file(folder.file("here")), "x");
}

TEST(File, KeepsPermissionsAndFollowsLinks) {
  const TemporaryFolder folder;
  const std::string path = folder.file("secret"), link = folder.file("link");
  write_file_atomically(path, "old");
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  fs::create_symlink(path, link);
  write_file_atomically(link, "new");
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(read_file(path), "new");
  struct stat info = {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
}

TEST(File, PipesAndDevicesAreWrittenToNotReplaced) {
  const TemporaryFolder folder;
  const std::string pipe = folder.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int reader = ::open(pipe.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  write_file_atomically(pipe, "through");
  char text[16] = {};
  EXPECT_EQ(::read(reader, text, sizeof text), 7);
  EXPECT_STREQ(text, "through");
  ::close(reader);
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_EQ(folder.names(), std::vector<std::string>{"pipe"});
}

TEST(File, ExceptionLeavesTheOldFile) {
  const TemporaryFolder folder;
  const std::string path = folder.file("f");
  write_file_atomically(path, "old");
  EXPECT_EQ(message([&] {
              write_file_atomically(path, [](FileWriter& out) {
                out.write(pattern(2000000));
                throw Error("stop");
              });
            }),
            "stop");
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"f"});
}

TEST(File, MissingFolder) {
  const TemporaryFolder folder;
  const std::string path = folder.file("none/f");
  EXPECT_EQ(message([&] { write_file_atomically(path, "x"); }),
            "cannot write " + path + ": No such file or directory; create the folder first");
  write_file_atomically(folder.file("f"), "x");
  EXPECT_TRUE(contains(message([&] { write_file_atomically(folder.file("f/g"), "x"); }),
                       "Not a directory"));
  EXPECT_EQ(message([&] { write_file_atomically(folder.path(), "x"); }),
            "cannot write " + folder.path() + ": it is a folder");
}

// Root may write anywhere, so there the test becomes nobody for a moment.
class Unprivileged {
 public:
  Unprivileged() : root_(::geteuid() == 0) {
    if (root_ && ::seteuid(65534) != 0) ok_ = false;
  }
  ~Unprivileged() {
    if (root_ && ::seteuid(0) != 0) std::abort();
  }
  bool ok() const { return ok_; }

 private:
  bool root_, ok_ = true;
};

TEST(File, UnwritableFolder) {
  const TemporaryFolder folder;
  const std::string path = folder.file("f");
  write_file_atomically(path, "old");
  ASSERT_EQ(::chmod(folder.path().c_str(), 0555), 0);
  {
    const Unprivileged user;
    if (!user.ok()) GTEST_SKIP() << "cannot give up root";
    EXPECT_EQ(message([&] { write_file_atomically(path, "new"); }),
              "cannot write " + path +
                  ": Permission denied; choose a folder you may write to (the existing file is "
                  "unchanged)");
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"f"});
}

TEST(File, SizeLimitWhileWriting) {
  const TemporaryFolder folder;
  const std::string path = folder.file("f");
  write_file_atomically(path, "old");
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {1 << 20, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = message([&] { write_file_atomically(path, pattern(3 << 20)); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(contains(text, "cannot write " + path + ": File too large")) << text;
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"f"});
}

TEST(File, FullDisk) {
  const TemporaryFolder folder;
  if (::mount("none", folder.path().c_str(), "tmpfs", 0, "size=256k") != 0)
    GTEST_SKIP() << "may not mount a small file system here";
  const std::string path = folder.file("f");
  write_file_atomically(path, "old");
  const std::string text = message([&] { write_file_atomically(path, pattern(1 << 20)); });
  const std::string kept = read_file(path);
  const std::vector<std::string> names = folder.names();
  EXPECT_EQ(::umount(folder.path().c_str()), 0);
  EXPECT_EQ(text, "cannot write " + path +
                      ": No space left on device; free some space or choose another disk (the "
                      "existing file is unchanged)");
  EXPECT_EQ(kept, "old");
  EXPECT_EQ(names, std::vector<std::string>{"f"});
}

TEST(File, Mapping) {
  const TemporaryFolder folder;
  const std::string path = folder.file("f"), text = pattern(10000);
  write_file_atomically(path, text);
  const std::shared_ptr<MappedFile> file = MappedFile::open(path);
  write_file_atomically(path, "replaced");  // the mapping keeps the old contents
  ASSERT_EQ(file->size(), text.size());
  EXPECT_TRUE(std::string(file->data(), file->size()) == text);
  write_file_atomically(path, "");
  EXPECT_EQ(MappedFile::open(path)->size(), 0u);
}

TEST(File, NewFoldersThatStayEmptyAreRemoved) {
  const TemporaryFolder folder;
  const auto exists = [&](const char* name) {
    return std::filesystem::is_directory(folder.file(name));
  };
  make_folders(folder.file("old/inner"));
  {
    const NewFolders made;
    EXPECT_THROW(NewFolders(), Error);
    make_folders(folder.file("a/b/c/"));
    make_folders(folder.file("a/b/d"));
    make_folders(folder.file("old/inner"));  // was there before
    make_folders(folder.file("kept/empty"));
    write_file_atomically(folder.file("kept/f"), "text");
    EXPECT_TRUE(exists("a/b/c") && exists("a/b/d") && exists("kept/empty"));
  }
  EXPECT_FALSE(exists("a"));
  EXPECT_TRUE(exists("old/inner"));
  EXPECT_FALSE(exists("kept/empty"));
  EXPECT_EQ(read_file(folder.file("kept/f")), "text");
  const NewFolders again;
}

TEST(File, ReadingWhatIsNotThere) {
  const TemporaryFolder folder;
  const std::string path = folder.file("none");
  const std::string want = "cannot read " + path + ": No such file or directory";
  EXPECT_EQ(message([&] { read_file(path); }), want);
  EXPECT_EQ(message([&] { MappedFile::open(path); }), want);
  EXPECT_EQ(message([&] { MappedFile::open(folder.path()); }),
            "cannot read " + folder.path() + ": not a regular file");
  EXPECT_EQ(message([&] { read_file(folder.path()); }),
            "cannot read " + folder.path() + ": Is a directory");
  EXPECT_THROW(sync_folder(path), Error);
}

// FIPS 180-4 examples, and every length around the padding's edges against a known hash of hashes.
TEST(Hash, Sha256) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  std::string all;
  for (size_t n = 0; n < 200; ++n) all += sha256(std::string(n, char(n)));
  EXPECT_EQ(sha256(all), "c86ce814ed1233ab1d4b273da1b6b13765cd39e72e81ce941452479e70ff1b10");
}

}  // namespace
}  // namespace ebb::testing
