#include "tools/result_file.h"

#include <fmt/chrono.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "tensor/check.h"
#include "tensor/device_info.h"
#include "tensor/file.h"
#include "tools/version.h"

namespace ebb::tools {

nlohmann::json result_header(const std::string& command, Device device) {
  const DeviceInfo info = device_info(device);
  nlohmann::json d = {{"type", device.is_cuda() ? "cuda" : "cpu"},
                      {"name", info.name},
                      {"memory", info.memory},
                      {"processors", info.processors},
                      {"cache", info.cache}};
  if (device.is_cuda()) {
    d["driver"] = info.driver;
    d["capability"] = info.capability;
  }
  return {{"command", command},
          {"ebb", version_number()},
          {"commit", commit()},
          {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
          {"device", d}};
}

void check_result_path(const std::string& path) {
  if (path.empty()) return;
  make_folders(folder_of(path));
  check(!std::filesystem::is_directory(path), "cannot write {}: it is a folder", path);
  check(::access(folder_of(path).c_str(), W_OK) == 0, "cannot write {}: {}; choose another folder",
        path, std::strerror(errno));
}

void write_result(const std::string& path, const nlohmann::json& result) {
  make_folders(folder_of(path));
  write_file_atomically(path, result.dump(1) + "\n");
}

}  // namespace ebb::tools
