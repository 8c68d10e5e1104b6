#include "tests/op_table.h"

namespace ebb::testing {

std::vector<OpRow> matmul_rows(Draw&) { return {}; }

}  // namespace ebb::testing
