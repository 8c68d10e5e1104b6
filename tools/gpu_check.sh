#!/usr/bin/env bash
# Everything there is to check on a machine with a GPU, in under ten minutes on 16 cores: build, the
# CUDA, operator and unit tests, compute-sanitizer, golden cases in f32 and bf16, the operator
# benchmark. Goes on after a failed step; exits non-zero if any failed, 0 with a clear line when
# there is no GPU.
#   bash tools/gpu_check.sh [options] [golden folder, default tests/data]
#     --prebuilt DIR   binaries (and shared libraries in DIR/lib) built elsewhere; see
#                      tools/pack_binaries.sh
#     --out DIR        logs and benchmark JSON (default: logs in build-gpu/, JSON in docs/results)
#     --filter REGEX   benchmark rows
#     --skip STEPS     comma-separated: tests,sanitizer,verify,bench
set -uo pipefail
cd "$(dirname "$0")/.."

prebuilt="" out="" goldens="" bench_filter="" skip=","
while (( $# )); do
  case "$1" in
    --prebuilt | --out | --filter | --skip)
      (( $# > 1 )) || { echo "gpu_check: $1 wants a value" >&2; exit 2; } ;;&
    --prebuilt) prebuilt=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --filter) bench_filter=$2; shift 2 ;;
    --skip) skip=",$2,"; shift 2 ;;
    -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "gpu_check: unknown option $1" >&2; exit 2 ;;
    *) goldens=$1; shift ;;
  esac
done
goldens=${goldens:-tests/data}
[[ -e "$goldens" ]] || { echo "gpu_check: $goldens does not exist" >&2; exit 2; }
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  echo "gpu_check: SKIPPED, no GPU here (nvidia-smi lists none)"
  exit 0
fi
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
build=${prebuilt:-build-gpu}
logs=${out:-build-gpu}
mkdir -p "$logs"
if [[ -n "$prebuilt" ]]; then
  export LD_LIBRARY_PATH="$prebuilt/lib:/usr/local/cuda/lib64:/usr/local/cuda/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
jobs=$(nproc)
failed=()
summary=()

wanted() { [[ "$skip" != *",$1,"* ]]; }
# step NAME SECONDS COMMAND...: runs it with a time limit; output to NAME.log, its end when it fails.
step() {
  local name=$1 limit=$2 start=$SECONDS code
  shift 2
  timeout "$limit" "$@" >"$logs/$name.log" 2>&1
  code=$?
  local took=$((SECONDS - start)) line
  line=$(grep -E '^\[  PASSED  \]|^\[  FAILED  \] [0-9]+ test|passed, .*failed|ERROR SUMMARY|RACECHECK SUMMARY' \
    "$logs/$name.log" | tail -1)
  if (( code == 0 )); then
    summary+=("ok    $name (${took}s) $line")
  else
    (( code == 124 )) && line="stopped after ${limit}s. $line"
    summary+=("FAIL  $name (${took}s, exit $code) $line")
    failed+=("$name")
    tail -40 "$logs/$name.log"
  fi
  echo "${summary[-1]}"
}
# The same gtest binary as several processes, each with its share of the tests.
sharded() {
  local shards=$1 pids=() code=0 i
  shift
  for (( i = 0; i < shards; ++i )); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i OMP_NUM_THREADS=2 "$@" &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i" || code=1; done
  return $code
}
export -f sharded

echo "== $gpu, $jobs cores, goldens in $goldens"
if [[ -z "$prebuilt" ]]; then
  arch=${EBB_GPU_ARCH:-90a-real}
  step configure 120 cmake -S . -B "$build" -G Ninja -DEBB_CUDA=ON -DEBB_CUDA_ARCHITECTURES="$arch"
  step build 420 cmake --build "$build" --parallel "$jobs"
  (( ${#failed[@]} )) && { echo "gpu_check: FAILED to build"; exit 1; }
fi
"$build/ebb" --version

if wanted tests; then
  step cuda_tests 240 "$build/tests/cuda_tests" --gtest_brief=1
  step unit_tests 120 "$build/tests/unit_tests" --gtest_brief=1
  step op_tests 180 bash -c "sharded $(( jobs > 8 ? 8 : jobs )) '$build/tests/op_tests' --gtest_brief=1"
fi
if wanted sanitizer; then
  if command -v compute-sanitizer >/dev/null; then
    # Small cases of every operator; large ones take minutes under the sanitizer.
    cases='*OpCuda.F32/*:*OpCuda.Bf16/*:Graph.*-*big*:*large*:*huge*:*long*'
    # cuBLAS kernels (nvjet) synchronise through the copy engine, which racecheck does not follow.
    step memcheck 120 bash -c "sharded 4 compute-sanitizer --tool memcheck --error-exitcode 9 \
      '$build/tests/cuda_tests' --gtest_brief=1 '--gtest_filter=$cases'"
    step racecheck 120 bash -c "sharded 4 compute-sanitizer --tool racecheck --kernel-name-exclude kernel_substring=nvjet --error-exitcode 9 \
      '$build/tests/cuda_tests' --gtest_brief=1 '--gtest_filter=$cases'"
  else
    summary+=("skip  sanitizer: compute-sanitizer is not installed")
    echo "${summary[-1]}"
  fi
fi
if wanted verify; then
  for dtype in f32 bf16; do
    step "verify_$dtype" 120 "$build/ebb" verify "$goldens" --device cuda --dtype "$dtype" \
      --json "$logs/verify_$dtype.json"
  done
fi
if wanted bench; then
  results=${out:-docs/results}
  for dtype in bf16 f32; do
    json="$results/ops_${gpu//[^A-Za-z0-9]/_}_$dtype.json"
    step "bench_$dtype" 180 "$build/ebb" bench ops --device cuda --dtype "$dtype" \
      --filter "$bench_filter" --json "$json"
    cat "$logs/bench_$dtype.log"
  done
fi

echo "== summary"
printf '%s\n' "${summary[@]}"
if (( ${#failed[@]} )); then
  echo "gpu_check: FAILED: ${failed[*]}"
  exit 1
fi
echo "gpu_check: everything passed in ${SECONDS}s"
