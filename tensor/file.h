// Files as wholes: atomic replacement and read-only mappings. Everything ebb writes for others to
// read (results, checkpoints, weights) goes through here.
//   write_file_atomically("run/results.json", text);
//   write_file_atomically(path, [&](FileWriter& out) { out.write(data, bytes); });
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace ebb {

// Appends to the file being written; a failed write throws.
class FileWriter {
 public:
  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  int64_t size() const { return size_; }  // bytes so far

 private:
  friend void write_file_atomically(const std::string&, const std::function<void(FileWriter&)>&);
  FileWriter(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  void flush();
  void write_out(const char* data, size_t bytes);

  int fd_;
  std::string path_;  // the final one, for messages
  std::vector<char> buffer_;
  int64_t size_ = 0;
};

// `path` afterwards holds either what `fill` wrote, flushed to the disk, or what it held before: a
// temporary file in the same folder is synced and renamed over it. On any failure (also an
// exception of `fill`) the temporary file is removed and one Error or that exception comes out. A
// symbolic link is followed; the permissions of an existing file are kept. Devices and pipes
// (/dev/null, /dev/stdout) are written to as they are.
void write_file_atomically(const std::string& path, const std::function<void(FileWriter&)>& fill);
void write_file_atomically(const std::string& path, std::string_view bytes);

// Makes the folder and those above it, where they are missing.
void make_folders(const std::string& folder);
// Of the folders that make_folders() made while it exists, those that hold nothing at its end are
// removed: work that fails early leaves nothing behind. One at a time, of the whole process.
//   const NewFolders made;
class NewFolders {
 public:
  NewFolders();
  ~NewFolders();
  NewFolders(const NewFolders&) = delete;
  NewFolders& operator=(const NewFolders&) = delete;
};
// The folder that `path` is to be written into; "." for a bare name.
std::string folder_of(const std::string& path);

// Makes renames and new names in a folder durable.
void sync_folder(const std::string& folder);

std::string read_file(const std::string& path);

// A file mapped into memory, read-only. Must not be truncated by others meanwhile.
class MappedFile {
 public:
  static std::shared_ptr<MappedFile> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const char* data() const { return data_; }  // null when the file is empty
  size_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  MappedFile() = default;
  std::string path_;
  const char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace ebb
