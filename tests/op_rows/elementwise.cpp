#include "tests/op_table.h"

namespace ebb::testing {

std::vector<OpRow> elementwise_rows(Draw&) { return {}; }

}  // namespace ebb::testing
