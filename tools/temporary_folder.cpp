#include "tools/temporary_folder.h"

#include <stdlib.h>

#include <cerrno>
#include <cstring>

#include "tensor/check.h"
#include "tensor/file.h"

namespace ebb::tools {

TemporaryFolder::TemporaryFolder(const std::filesystem::path& parent, const std::string& name) {
  make_folders(parent.string());
  std::string pattern = (parent / ("." + name + ".partial-XXXXXX")).string();
  check(::mkdtemp(pattern.data()) != nullptr, "cannot make {} in {}: {}", name, parent.string(),
        std::strerror(errno));
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace ebb::tools
