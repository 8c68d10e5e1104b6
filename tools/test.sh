#!/usr/bin/env bash
# Set-up, build, formatting and every test. Exits non-zero when any of them fails.
#   bash tools/test.sh [cmake options]        EBB_BUILD_DIR=build by default
# CUDA code is compiled wherever nvcc is; tests that need a GPU skip, saying so, where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
  -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;;
  "" | -*) ;;
  *) echo "test: '$1' is no option of cmake; --help says what there is" >&2; exit 2 ;;
esac
bash tools/setup.sh
build=${EBB_BUILD_DIR:-build}
jobs=$(nproc)

echo "== configure"
cmake -S . -B "$build" -G Ninja "$@"
echo "== build"
cmake --build "$build" --parallel "$jobs"

failed=0
echo "== format"
bash tools/check_format.sh || failed=1
echo "== test"
export OMP_WAIT_POLICY=passive  # tests run side by side: waiting threads must not spin
ctest --test-dir "$build" --output-on-failure --parallel "$jobs" || failed=1
if (( failed )); then
  echo "tools/test.sh: FAILED" >&2
  exit 1
fi
echo "tools/test.sh: everything passed"
