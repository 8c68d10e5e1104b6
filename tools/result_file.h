// Result files: what every machine-readable result says about where it comes from.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "tensor/device.h"

namespace ebb::tools {

// {"command", "ebb", "commit", "date" (UTC), "device": {name, memory, ...}}
nlohmann::json result_header(const std::string& command, Device device);
// Makes the folder and throws where no file can be written ("" is no file): before the work, so
// that none is lost.
void check_result_path(const std::string& path);
// Replaces the file atomically; folders are made.
void write_result(const std::string& path, const nlohmann::json& result);

}  // namespace ebb::tools
