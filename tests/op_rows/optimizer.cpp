#include "tests/op_table.h"

namespace ebb::testing {

std::vector<OpRow> optimizer_rows(Draw&) { return {}; }

}  // namespace ebb::testing
