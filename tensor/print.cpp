// Tensor::str(): values as nested lists, the middle of long dimensions left out.
#include "tensor/check.h"
#include "tensor/tensor.h"

namespace ebb {
namespace {

std::string print_value(const Tensor& t) {
  return visit_any(t.dtype(), [&]<class T>() {
    if constexpr (std::is_integral_v<T>)
      return fmt::format("{}", int64_t(*t.data<T>()));
    else
      return fmt::format("{:.6g}", double(*t.data<T>()));
  });
}

// At most max_items entries of a dimension are shown: the first half and the last.
void print_block(std::string& s, const Tensor& t, int64_t max_items) {
  if (t.dim() == 0) {
    s += print_value(t);
    return;
  }
  s += '[';
  const int64_t n = t.size(0), edge = max_items / 2;
  for (int64_t i = 0; i < n; ++i) {
    if (i) s += ", ";
    if (n > max_items && i == edge) {
      s += "...";
      i = n - edge - 1;
      continue;
    }
    print_block(s, t.select(0, i), max_items);
  }
  s += ']';
}

}  // namespace

std::string Tensor::str(int64_t max_items) const {
  if (!defined()) return "undefined";
  std::string s;
  print_block(s, cpu(), max_items < 2 ? 2 : max_items);
  return fmt::format("{} {} {} {}", s, shape_, dtype_, device());
}

}  // namespace ebb
