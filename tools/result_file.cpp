#include "tools/result_file.h"

#include <fmt/chrono.h>

#include <filesystem>

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

void write_result(const std::string& path, const nlohmann::json& result) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder);
  write_file_atomically(path, result.dump(1) + "\n");
}

}  // namespace ebb::tools
