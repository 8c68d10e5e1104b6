#!/usr/bin/env bash
# Checks the formatting of every tracked C++ and CUDA source outside vendor/ with clang-format 14
# (other versions format differently). `--fix` rewrites instead.
set -euo pipefail
case "${1:-}" in
  "" | --fix) ;;
  -h | --help) sed -n '2,3s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) echo "format: unknown option $1; --help says what there is" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
tool=""
for candidate in clang-format-14 clang-format; do
  if command -v "$candidate" >/dev/null && "$candidate" --version | grep -q 'version 14\.'; then
    tool=$candidate
    break
  fi
done
if [[ -z "$tool" ]]; then
  echo "format: SKIPPED, clang-format 14 is not installed"
  exit 0
fi
if ! git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  echo "format: SKIPPED, not a git checkout"
  exit 0
fi
mode=(--dry-run -Werror)
[[ "${1:-}" == --fix ]] && mode=(-i)
git ls-files -z -- '*.h' '*.cpp' '*.cu' '*.cuh' ':!vendor' |
  xargs -0 -r "$tool" "${mode[@]}"
echo "format: $(git ls-files -- '*.h' '*.cpp' '*.cu' '*.cuh' ':!vendor' | wc -l) files are formatted"
