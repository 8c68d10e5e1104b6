// One writer for a folder of results.
//   const FolderLock lock("runs/a");   // throws where another process holds it
#pragma once
#include <string>

namespace ebb {

// Held until it is destroyed or the process ends, however that ends: nothing is left behind. The
// folder must exist. File systems that know no locks let everybody pass.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace ebb
