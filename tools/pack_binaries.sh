#!/usr/bin/env bash
# Collects a build's binaries with the shared libraries they need, to run on another machine:
#   bash tools/pack_binaries.sh BUILD_DIR OUT_DIR
# CUDA's own libraries, the driver and the C and C++ run-times are expected there. Debug sections go.
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
(( $# == 2 )) || { echo "usage: pack_binaries.sh BUILD_DIR OUT_DIR" >&2; exit 2; }
build=$1 out=$2
mkdir -p "$out/tests" "$out/lib"
binaries=()
for name in ebb tests/cuda_tests; do  # what gpu_check.sh runs
  [[ -x "$build/$name" ]] || { echo "pack_binaries: $build/$name is not built" >&2; exit 1; }
  cp "$build/$name" "$out/$name"
  strip --strip-debug "$out/$name"
  binaries+=("$out/$name")
done
ldd "${binaries[@]}" | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u |
  grep -vE '^(libc|libm|libdl|librt|libpthread|ld-linux[^ ]*|libstdc\+\+|libgcc_s|libcuda|libcudart|libcublas|libcublasLt|libnvidia[^ ]*)\.so' |
  while read -r name path; do cp -L "$path" "$out/lib/$name"; done
du -sh "$out" | awk '{print "pack_binaries: " $1 " in " $2}'
