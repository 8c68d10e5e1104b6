// A fresh folder that is gone at the end of the scope, for work that must appear whole or not at
// all: write below path(), then rename.
#pragma once
#include <filesystem>
#include <string>

namespace ebb::tools {

class TemporaryFolder {
 public:
  TemporaryFolder() : TemporaryFolder(std::filesystem::temp_directory_path(), "ebb") {}
  // A hidden folder in `parent` (made when missing), so that a rename out of it stays on one disk.
  TemporaryFolder(const std::filesystem::path& parent, const std::string& name);
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace ebb::tools
