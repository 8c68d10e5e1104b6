#!/usr/bin/env bash
# Everything there is to check on a machine with a GPU, in under ten minutes on 16 cores: build (of
# what the checks need), the CUDA tests, compute-sanitizer (memcheck, racecheck, synccheck,
# initcheck), golden cases in f32 and bf16, the operator benchmark. Every step has a time limit and
# none is begun that would end after --minutes. Goes on after a failed step; exits non-zero if any
# failed, 0 with a clear line when there is no GPU. CPU tests: tools/test.sh.
#   bash tools/gpu_check.sh [options] [golden folder, default tests/data]
#     --prebuilt DIR   binaries (and shared libraries in DIR/lib) built elsewhere; see
#                      tools/pack_binaries.sh
#     --out DIR        logs and benchmark JSON (default: logs in build-gpu/, JSON in docs/results)
#     --filter REGEX   benchmark rows
#     --skip STEPS     comma-separated: tests,sanitizer,verify,bench
#     --minutes N      for everything (default 9.8)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

prebuilt="" out="" goldens="" bench_filter="" skip="," minutes=9.8
while (( $# )); do
  case "$1" in
    --prebuilt | --out | --filter | --skip | --minutes)
      (( $# > 1 )) || { echo "gpu_check: $1 wants a value" >&2; exit 2; } ;;&
    --prebuilt) prebuilt=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --filter) bench_filter=$2; shift 2 ;;
    --skip) skip=",$2,"; shift 2 ;;
    --minutes) minutes=$2; shift 2 ;;
    -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "gpu_check: unknown option $1" >&2; exit 2 ;;
    *) goldens=$1; shift ;;
  esac
done
budget=$(awk -v m="$minutes" 'BEGIN { print int(60 * m) }')
(( budget > 0 )) || { echo "gpu_check: --minutes wants a number above 0, not $minutes" >&2; exit 2; }
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
say() { summary+=("$1"); echo "$1"; }
left_out=()
out_of_time() { left_out+=("$1"); say "skip  $1: no time left"; }
# What a step may take of `limit` seconds before time is up for everything; 0: not worth beginning.
allowed() {
  local left=$(( budget - SECONDS ))
  (( left < $1 )) || left=$1
  (( left >= 15 )) && echo "$left" || echo 0
}
# report NAME CODE SECONDS LIMIT: one line of the summary from NAME.log, its end when it failed.
report() {
  local name=$1 code=$2 took=$3 limit=$4 line
  line=$(grep -aE '^\[  PASSED  \]|^\[  FAILED  \] [0-9]+ test|passed, .*failed|^checked ' \
    "$logs/$name.log" | tail -1)
  if (( code == 0 )); then
    say "ok    $name (${took}s) $line"
  else
    (( code == 124 )) && line="stopped after ${limit}s. $line"
    failed+=("$name")
    tail -40 "$logs/$name.log"
    say "FAIL  $name (${took}s, exit $code) $line"
  fi
}
# step NAME LIMIT COMMAND...
step() {
  local name=$1 limit start=$SECONDS
  limit=$(allowed "$2")
  shift 2
  (( limit )) || { out_of_time "$name"; return 0; }
  timeout "$limit" "$@" >"$logs/$name.log" 2>&1
  report "$name" $? $(( SECONDS - start )) "$limit"
}
# begin NAME LIMIT COMMAND... several times, then finish: steps side by side.
begun=()
begin() {
  local name=$1 limit
  limit=$(allowed "$2")
  shift 2
  (( limit )) || { out_of_time "$name"; return 0; }
  timeout "$limit" "$@" >"$logs/$name.log" 2>&1 &
  begun+=("$name $! $limit $SECONDS")
}
finish() {
  local one name pid limit start
  for one in "${begun[@]}"; do
    read -r name pid limit start <<<"$one"
    wait "$pid"
    report "$name" $? $(( SECONDS - start )) "$limit"
  done
  begun=()
}
# sharded N REPORTS COMMAND...: the same gtest binary as several processes, each with its share of the
# tests and its report REPORTS<number>.xml.
sharded() {
  local shards=$1 reports=$2 pids=() code=0 i
  shift 2
  for (( i = 0; i < shards; ++i )); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive "$@" \
      --gtest_output="xml:$reports$i.xml" &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i" || code=1; done
  return $code
}
export -f sharded
# Names of the tests that these reports call skipped, joined by ':'.
skipped_in() {
  sed -n 's/.*<testcase name="\([^"]*\)".* result="skipped".* classname="\([^"]*\)".*/\2.\1/p' "$@" |
    paste -sd:
}

echo "== $gpu, $jobs cores, goldens in $goldens"
if [[ -z "$prebuilt" ]]; then
  arch=${EBB_GPU_ARCH:-90a-real}
  step configure 60 cmake -S . -B "$build" -G Ninja -DEBB_CUDA=ON -DEBB_EXAMPLES=OFF \
    -DEBB_CUDA_ARCHITECTURES="$arch"
  step build 300 cmake --build "$build" --parallel "$jobs" --target ebb cuda_tests
  (( ${#failed[@]} )) && { echo "gpu_check: FAILED to build"; exit 1; }
fi
"$build/ebb" --version

if wanted tests; then
  rm -f "$logs"/cuda_tests_*.xml
  step cuda_tests 110 bash -c "sharded $(( jobs > 10 ? 10 : jobs )) '$logs/cuda_tests_' '$build/tests/cuda_tests' --gtest_brief=1"
  # Tests that want tens of gigabytes skip where another process has them: once more, by themselves.
  again=$(skipped_in "$logs"/cuda_tests_*.xml 2>/dev/null)
  if [[ -n "$again" ]]; then
    step cuda_tests_alone 60 "$build/tests/cuda_tests" --gtest_brief=1 --gtest_filter="$again" \
      --gtest_output="xml:$logs/cuda_tests_alone.xml"
    say "      skipped: $(skipped_in "$logs/cuda_tests_alone.xml")"
  fi
fi
if wanted sanitizer && ! command -v "${COMPUTE_SANITIZER:-compute-sanitizer}" >/dev/null; then
  say "skip  sanitizer: compute-sanitizer is not installed"
elif wanted sanitizer; then
  # Groups of cases that have begun take up to 25 s more, verify and bench what else is kept back.
  seconds=$(( budget - SECONDS - 70 ))
  (( seconds < 70 )) || seconds=70
  (( seconds >= 15 )) || { out_of_time sanitizer; seconds=0; }
  for share in 2:memcheck 8:racecheck 2:synccheck 4:initcheck; do  # of 16 cores, as each needs
    (( seconds )) || break
    each=$(( jobs * ${share%%:*} / 16 )) tool=${share#*:}
    begin "$tool" $(( seconds + 25 )) bash tools/gpu_sanitize.sh "$tool" "$build/tests/cuda_tests" \
      "$logs" "$seconds" $(( each > 0 ? each : 1 ))
  done
  finish
fi
if wanted verify; then
  for dtype in f32 bf16; do
    begin "verify_$dtype" 60 "$build/ebb" verify "$goldens" --device cuda --dtype "$dtype" \
      --json "$logs/verify_$dtype.json"
  done
  finish
fi
if wanted bench; then
  results=${out:-docs/results}
  for dtype in bf16 f32; do
    json="$results/ops_${gpu//[^A-Za-z0-9]/_}_$dtype.json"
    step "bench_$dtype" 100 "$build/ebb" bench ops --device cuda --dtype "$dtype" \
      --filter "$bench_filter" --json "$json"
    [[ -f "$logs/bench_$dtype.log" ]] && cat "$logs/bench_$dtype.log"
  done
fi

echo "== summary"
printf '%s\n' "${summary[@]}"
if (( ${#failed[@]} )); then
  echo "gpu_check: FAILED: ${failed[*]}"
  exit 1
fi
if (( ${#left_out[@]} )); then
  echo "gpu_check: what was reached passed in ${SECONDS}s; no time was left for: ${left_out[*]}"
else
  echo "gpu_check: everything passed in ${SECONDS}s"
fi
