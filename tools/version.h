// What this binary is and can do.
#pragma once
#include <string>

namespace ebb::tools {

std::string version_text();  // several lines, for --version
std::string version_number();
std::string commit();  // of the sources; "-dirty" when they were changed, "unknown" without git

}  // namespace ebb::tools
