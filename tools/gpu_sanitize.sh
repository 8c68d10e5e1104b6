#!/usr/bin/env bash
# One tool of compute-sanitizer over the operator suite's cases on the GPU, as many as the time
# allows: small groups of cases, several at a time, none begun after SECONDS. The last lines say how
# many were checked; exit code 1 where any was reported.
#   bash tools/gpu_sanitize.sh TOOL CUDA_TESTS LOG_FOLDER SECONDS PROCESSES [GTEST_FILTER]
set -uo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
(( $# == 5 || $# == 6 )) || { echo "usage: $(sed -n '5s/^#   bash //p' "$0")" >&2; exit 2; }
tool=$1 tests=$2 logs=$3 processes=$5 deadline=$(( $(date +%s) + $4 ))
# Large cases take minutes under the sanitizer.
filter=${6:-'*OpCuda.F32/*:*OpCuda.Bf16/*:-*big*:*large*:*huge*:*long*'}
group=12

options=(--tool "$tool" --error-exitcode 9)
if [[ "$tool" == racecheck ]]; then
  # Not checked, since racecheck reports them though nothing races:
  # - nvjet: cuBLAS kernels, which synchronise through the copy engine.
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
if [[ "$tool" == synccheck ]]; then
  # Reported as divergent, and not checked: blocks whose warps have roles and meet at barriers with
  # an id and a number of threads (barrier_wait, barrier_arrive of cuda/warpgroup.cuh). All lanes of
  # a warp reach the same one, different warps at different instructions, which PTX allows for
  # bar.sync and the tool takes for __syncthreads() in divergent code.
  for kernels in delta_fast_gradients_cu delta_fast_channel_gradients_cu dplr_fast_prepare_cu \
    linear_attention_fast_fwd_cu; do
    options+=(--kernel-name-exclude "kernel_substring=$kernels")
  done
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Every seventh case first, then those between: whenever time is up, all operators have had a turn.
"$tests" --gtest_list_tests --gtest_filter="$filter" | awk '
  /^[^ ]/ { suite = $1; next }
  { print ++n % 7, n, suite $1 }' | sort -k1,1n -k2,2n | cut -d' ' -f3 >"$work/cases"
total=$(wc -l <"$work/cases")
(( total )) || { echo "gpu_sanitize: no case matches $filter" >&2; exit 1; }
paste -sd "$(printf ':%.0s' $(seq $(( group - 1 ))))\n" "$work/cases" >"$work/groups"

run_group() {  # of cases, joined by ':'
  local now log code
  now=$(date +%s)
  (( now < deadline )) || return 0
  log=$(mktemp "$work/log.XXXXXX")
  OMP_NUM_THREADS=1 timeout $(( deadline + 15 - now )) compute-sanitizer "${options[@]}" "$tests" \
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
    "$(wc -l <<<"$found") groups of $group with one"
  exit 1
fi
echo "checked $(wc -l <"$work/checked") of $total cases, nothing reported"
[[ -s "$work/checked" ]]  # else not one group has ended in time
