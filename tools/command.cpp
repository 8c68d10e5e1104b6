#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <sstream>

#include "tensor/check.h"
#include "tools/commands.h"

namespace ebb::tools {
namespace {

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t(0));
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& description,
                      const std::string& examples) {
  CLI::App* c = app.add_subcommand(name, description);
  std::string footer = "Examples:";
  std::istringstream lines(examples);
  for (std::string line; std::getline(lines, line);) footer += "\n  " + line;
  c->footer(footer);
  return c;
}

Device usable_device(const std::string& text) {
  if (text == "auto") return default_device();
  Device device;
  try {
    device = Device::parse(text);
  } catch (const Error& e) {
    throw UsageError(fmt::format("--device: {}", e.what()));
  }
  if (!device.is_cuda()) return device;
  const int count = cuda_device_count();
  check(count > 0, "no GPU: {}", cuda_unavailable_reason());
  check(device.index < count, "no GPU {}: there {} {} here", device, count == 1 ? "is" : "are",
        count);
  return device;
}

DType parse_dtype(const std::string& text, const std::vector<DType>& allowed) {
  std::string names;
  for (const DType t : allowed) {
    if (text == name(t)) return t;
    names += (names.empty() ? "" : ", ") + std::string(name(t));
  }
  throw UsageError(fmt::format("--dtype '{}': want one of {}", text, names));
}

std::string grouped(int64_t n) {
  std::string digits = std::to_string(n < 0 ? -n : n);
  for (int64_t at = int64_t(digits.size()) - 3; at > 0; at -= 3) digits.insert(size_t(at), ",");
  return n < 0 ? "-" + digits : digits;
}

std::string closest(const std::string& word, const std::vector<std::string>& candidates) {
  std::string best;
  size_t least = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& c : candidates) {
    const size_t d = edit_distance(word, c);
    if (d < least) {
      least = d;
      best = c;
    }
  }
  return best;
}

}  // namespace ebb::tools
