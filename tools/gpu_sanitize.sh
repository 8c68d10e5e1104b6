#!/usr/bin/env bash
# One tool of compute-sanitizer over the operator suite's cases on the GPU, as many as the time
# allows: small groups of cases, several at a time, none begun after SECONDS. The last lines say how
# many were checked; exit code 1 where any was reported.
#   bash tools/gpu_sanitize.sh TOOL CUDA_TESTS LOG_FOLDER SECONDS PROCESSES [GTEST_FILTER]
# COMPUTE_SANITIZER=PATH takes another than the installed one: 2026.1 or newer follows all kernels
# (pip download nvidia-cuda-sanitizer-api; a wheel is a zip file).
set -uo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
(( $# == 5 || $# == 6 )) || { echo "usage: $(sed -n '5s/^#   bash //p' "$0")" >&2; exit 2; }
tool=$1 tests=$2 logs=$3 processes=$5 deadline=$(( $(date +%s) + $4 ))
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
# Large cases take minutes under the sanitizer.
filter=${6:-'*OpCuda.F32/*:*OpCuda.Bf16/*:-*big*:*large*:*huge*:*long*'}
group=12

options=(--tool "$tool" --error-exitcode 9)
year=$("$sanitizer" --version 2>/dev/null | sed -n 's/^Version \([0-9]*\)\..*/\1/p')
if [[ "$tool" == racecheck ]] && (( ${year:-0} < 2026 )); then
  # Not checked, since racecheck of CUDA 13.0 reports them though nothing races:
  # - nvjet: cuBLAS kernels, which synchronise through the copy engine. (In some cases that tool then
  #   fails itself, on kernels it leaves alone.)
  # - state_memory_fast_fwd, _tokens(_wide), _memories and dplr_fast_scan: rings of
  #   cuda/mbarrier.cuh. One warp fills a place by bulk copies (and, of a sequence's last tokens,
  #   asynchronous ones of all its lanes), several warps read it. Reported are the copies' writes
  #   against those reads. Between them stand the place's two mbarriers: readers wait for the phase
  #   that the copies' bytes complete (after asynchronous ones the lanes wait for their copies and
  #   for each other before the one arrival); the fetching warp waits for the phase that all reading
  #   warps' arrivals complete, each after its warp's last read and __syncwarp(). Results of
  #   dplr_fast_scan go to the storing warps the same way. The tool follows neither bytes nor
  #   arrivals made by one lane for its warp. Other kernels of those files use no shared memory.
  for kernels in nvjet state_memory_fast_fwd_cu state_memory_fast_tokens \
    state_memory_fast_memories_cu dplr_fast_scan_cu; do
    options+=(--kernel-name-exclude "kernel_substring=$kernels")
  done
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A group is of one kind of operator and one dtype, so that a process has few kernels to prepare for
# the tool; a kind's cases are dealt to its groups like cards. All kinds have a turn before any has
# a second one.
"$tests" --gtest_list_tests --gtest_filter="$filter" | awk -v most="$group" '
  /^[^ ]/ { suite = $1; next }
  { kind = $1; sub(/_.*/, "", kind)  # Bf16/rotary of Bf16/rotary_starts
    if (!(kind in count)) { dtype = kind; sub(/\/.*/, "", dtype); place[kind] = ++kinds[dtype] }
    name[kind, count[kind]++] = suite $1 }
  END {
    for (kind in count) {
      groups = int((count[kind] + most - 1) / most)
      for (g = 0; g < groups; ++g) {
        line = name[kind, g]
        for (i = g + groups; i < count[kind]; i += groups) line = line ":" name[kind, i]
        print g, place[kind], line
      }
    }
  }' | sort -k1,1n -k2,2n -k3,3 | cut -d' ' -f3 >"$work/groups"
total=$(tr ':' '\n' <"$work/groups" | grep -c .)
(( total )) || { echo "gpu_sanitize: no case matches $filter" >&2; exit 1; }

run_group() {  # of cases, joined by ':'
  local now log code
  now=$(date +%s)
  (( now < deadline )) || return 0
  log=$(mktemp "$work/log.XXXXXX")
  OMP_NUM_THREADS=1 timeout $(( deadline + 15 - now )) "$sanitizer" "${options[@]}" "$tests" \
    --gtest_brief=1 "--gtest_filter=$1" >"$log" 2>&1
  code=$?
  if (( code == 0 )); then
    tr ':' '\n' <<<"$1" >>"$work/checked"
  elif (( code == 124 )); then
    echo "cut off by the time limit: $1" >>"$work/cut"
  elif grep -q 'Internal Sanitizer Error' "$log"; then  # of the tool itself
    echo "the tool failed on: $1" >>"$work/cut"
  else
    { echo "== exit code $code: $1"; head -c 20000 "$log"; } >"$(mktemp "$work/reported.XXXXXX")"
  fi
  rm -f "$log"
}
while IFS= read -r cases; do
  while (( $(jobs -rp | wc -l) >= processes )); do wait -n; done
  (( $(date +%s) < deadline )) || break
  run_group "$cases" &
done <"$work/groups"
wait

touch "$work/checked" "$work/cut"
sort "$work/checked" >"$logs/$tool.cases"
cat "$work/cut"
found=$(find "$work" -name 'reported.*')
if [[ -n "$found" ]]; then
  cat "$work"/reported.*
  echo "checked $(wc -l <"$work/checked") of $total cases without a report;" \
    "$(wc -l <<<"$found") groups of up to $group with one"
  exit 1
fi
echo "checked $(wc -l <"$work/checked") of $total cases, nothing reported"
[[ -s "$work/checked" ]]  # else not one group has ended in time
