// ebb::Error: the one exception type. Free of fmt so that CUDA sources can throw it too;
// C++ sources throw through check() in tensor/check.h.
#pragma once
#include <stdexcept>
#include <string>

namespace ebb {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what) : std::runtime_error(what) {}
};

}  // namespace ebb
