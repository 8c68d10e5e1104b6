#include "tests/op_table.h"

namespace ebb::testing {

std::vector<OpRow> delta_rule_rows(Draw&) { return {}; }

}  // namespace ebb::testing
