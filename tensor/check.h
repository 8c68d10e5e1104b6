// check(condition, format, args...): throws ebb::Error with a formatted message. Not for .cu files.
#pragma once
#include <fmt/format.h>

#include "tensor/device.h"
#include "tensor/dtype.h"
#include "tensor/error.h"
#include "tensor/shape.h"

namespace ebb {

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
void check(bool ok, fmt::format_string<Args...> format, Args&&... args) {
  if (!ok) [[unlikely]]
    throw Error(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace ebb

template <>
struct fmt::formatter<ebb::Shape> : fmt::formatter<std::string> {
  auto format(const ebb::Shape& s, format_context& ctx) const {
    return fmt::formatter<std::string>::format(s.str(), ctx);
  }
};
template <>
struct fmt::formatter<ebb::DType> : fmt::formatter<const char*> {
  auto format(ebb::DType t, format_context& ctx) const {
    return fmt::formatter<const char*>::format(ebb::name(t), ctx);
  }
};
template <>
struct fmt::formatter<ebb::Device> : fmt::formatter<std::string> {
  auto format(const ebb::Device& d, format_context& ctx) const {
    return fmt::formatter<std::string>::format(d.str(), ctx);
  }
};
