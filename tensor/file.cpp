#include "tensor/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <utility>

#include "tensor/check.h"

namespace ebb {
namespace {

constexpr size_t kBuffer = size_t(1) << 20;
constexpr size_t kMaxWrite = size_t(1) << 30;  // the kernel takes at most 2 GiB at a time

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

const char* advice(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "; free some space or choose another disk";
    case EFBIG:
      return "; the file size limit (ulimit -f) is too low";
    case EACCES:
    case EPERM:
    case EROFS:
      return "; choose a folder you may write to";
    case ENOENT:
    case ENOTDIR:
      return "; create the folder first";
    default:
      return "";
  }
}

[[noreturn]] void fail_to_write(const std::string& path, int error) {
  const bool existed = ::access(path.c_str(), F_OK) == 0;
  fail("cannot write {}: {}{}{}", path, std::strerror(error), advice(error),
       existed ? " (the existing file is unchanged)" : "");
}

// A new file beside the target, removed again unless it has been renamed.
class Temporary {
 public:
  explicit Temporary(const std::string& target) {
    static std::atomic<int> serial{0};
    for (;;) {
      path_ = fmt::format("{}.tmp-{}-{}", target, ::getpid(), serial++);
      fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd_ >= 0) return;
      if (errno != EEXIST) fail_to_write(target, errno);
    }
  }
  ~Temporary() {
    if (fd_ >= 0) ::close(fd_);
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  int fd() const { return fd_; }
  bool close() { return ::close(std::exchange(fd_, -1)) == 0; }
  bool rename_to(const std::string& target) {
    if (::rename(path_.c_str(), target.c_str()) != 0) return false;
    path_.clear();
    return true;
  }

 private:
  std::string path_;
  int fd_ = -1;
};

// Absolute paths of what make_folders() has made, outer folders first, while somebody asks.
struct MadeFolders {
  std::mutex mutex;
  bool asked = false;
  std::vector<std::filesystem::path> paths;
};
MadeFolders& made_folders() {
  static MadeFolders made;
  return made;
}

}  // namespace

void FileWriter::write(const void* data, size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  size_ += int64_t(bytes);
  if (buffer_.size() + bytes <= kBuffer) {
    buffer_.insert(buffer_.end(), p, p + bytes);
    return;
  }
  flush();
  write_out(p, bytes);
}

void FileWriter::flush() {
  write_out(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void FileWriter::write_out(const char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, data, std::min(bytes, kMaxWrite));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_to_write(path_, errno);
    data += n;
    bytes -= size_t(n);
  }
}

void write_file_atomically(const std::string& path, const std::function<void(FileWriter&)>& fill) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (struct stat now = {}; ::stat(path.c_str(), &now) == 0 && !S_ISREG(now.st_mode) &&
                            !S_ISDIR(now.st_mode)) {  // a device or a pipe: nothing to replace
    const FileDescriptor fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    if (fd.get() < 0) fail_to_write(path, errno);
    FileWriter out(fd.get(), path);
    fill(out);
    out.flush();
    return;
  }
  std::string target = path;
  if (fs::is_symlink(path, ignored)) {
    const fs::path real = fs::weakly_canonical(path, ignored);
    if (!real.empty()) target = real.string();
  }
  check(!fs::is_directory(target, ignored), "cannot write {}: it is a folder", path);

  Temporary file(target);
  struct stat old = {};
  if (::stat(target.c_str(), &old) == 0 && ::fchmod(file.fd(), old.st_mode & 07777) != 0)
    fail_to_write(target, errno);
  FileWriter out(file.fd(), target);
  fill(out);
  out.flush();
  if (::fsync(file.fd()) != 0) fail_to_write(target, errno);
  if (!file.close()) fail_to_write(target, errno);
  if (!file.rename_to(target)) fail_to_write(target, errno);
  sync_folder(folder_of(target));
}

void write_file_atomically(const std::string& path, std::string_view bytes) {
  write_file_atomically(path, [&](FileWriter& out) { out.write(bytes); });
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

void make_folders(const std::string& folder) {
  check(!folder.empty(), "a folder without a name cannot be made");
  namespace fs = std::filesystem;
  MadeFolders& made = made_folders();
  const std::lock_guard lock(made.mutex);
  std::error_code error, ignored;
  std::vector<fs::path> missing;  // inner folders first
  for (fs::path p = fs::absolute(folder, ignored); made.asked && !fs::exists(p, ignored);
       p = p.parent_path())
    missing.push_back(p);
  fs::create_directories(folder, error);
  made.paths.insert(made.paths.end(), missing.rbegin(), missing.rend());
  const char* more = error.value() == ENOTDIR  ? "; a part of the path is a file"
                     : error.value() == ENOENT ? ""
                                               : advice(error.value());
  check(!error, "cannot make the folder {}: {}{}", folder, error.message(), more);
}

NewFolders::NewFolders() {
  MadeFolders& made = made_folders();
  const std::lock_guard lock(made.mutex);
  check(!std::exchange(made.asked, true), "folders are being watched already");
}
NewFolders::~NewFolders() {
  MadeFolders& made = made_folders();
  const std::lock_guard lock(made.mutex);
  for (auto p = made.paths.rbegin(); p != made.paths.rend(); ++p) ::rmdir(p->c_str());
  made.paths.clear();
  made.asked = false;
}

void sync_folder(const std::string& folder) {
  const FileDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0 && errno == EACCES) return;  // writable but not readable: nothing to sync with
  check(fd.get() >= 0, "cannot open folder {}: {}", folder, std::strerror(errno));
  // Some network file systems have no such operation; renames are durable there on their own terms.
  if (::fsync(fd.get()) != 0 && errno != EINVAL && errno != ENOTSUP)
    fail("cannot flush folder {}: {}", folder, std::strerror(errno));
}

std::string read_file(const std::string& path) {
  const FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  check(fd.get() >= 0, "cannot read {}: {}", path, std::strerror(errno));
  std::string text;
  std::vector<char> buffer(kBuffer);
  for (;;) {
    const ssize_t n = ::read(fd.get(), buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    check(n >= 0, "cannot read {}: {}", path, std::strerror(errno));
    if (n == 0) return text;
    text.append(buffer.data(), size_t(n));
  }
}

std::shared_ptr<MappedFile> MappedFile::open(const std::string& path) {
  const FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  check(fd.get() >= 0, "cannot read {}: {}", path, std::strerror(errno));
  struct stat info = {};
  const bool known = ::fstat(fd.get(), &info) == 0;
  check(known, "cannot read {}: {}", path, std::strerror(errno));
  check(S_ISREG(info.st_mode), "cannot read {}: not a regular file", path);
  std::shared_ptr<MappedFile> file(new MappedFile);
  file->path_ = path;
  if (info.st_size == 0) return file;
  void* p = ::mmap(nullptr, size_t(info.st_size), PROT_READ, MAP_PRIVATE, fd.get(), 0);
  check(p != MAP_FAILED, "cannot map {}: {}", path, std::strerror(errno));
  file->data_ = static_cast<const char*>(p);
  file->size_ = size_t(info.st_size);
  return file;
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<char*>(data_), size_);
}

}  // namespace ebb
