#!/usr/bin/env bash
# One tool of compute-sanitizer over the operator suite's cases on the GPU, as many as the time
# allows: small groups of cases, several at a time, none begun after SECONDS. The last lines say how
# many were checked; exit code 1 where any was reported.
#   bash tools/gpu_sanitize.sh TOOL CUDA_TESTS LOG_FOLDER SECONDS PROCESSES [GTEST_FILTER]
# COMPUTE_SANITIZER=PATH takes another than the installed one, e.g. that of PyPI's
# nvidia-cuda-sanitizer-api: from 2026 on racecheck follows all kernels.
set -uo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
(( $# == 5 || $# == 6 )) || { echo "usage: $(sed -n '5s/^#   bash //p' "$0")" >&2; exit 2; }
tool=$1 tests=$2 logs=$3 processes=$5 deadline=$(( $(date +%s) + $4 ))
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
# Large cases take minutes under the sanitizer.
filter=${6:-'*OpCuda.F32/*:*OpCuda.Bf16/*:-*big*:*large*:*huge*:*long*'}

options=(--tool "$tool" --error-exitcode 9)
year=$("$sanitizer" --version 2>/dev/null | sed -n 's/^Version \([0-9]*\)\..*/\1/p')
if [[ "$tool" == racecheck ]]; then
  if (( ${year:-0} >= 2026 )); then
    # It asks every thread that has read a place in shared memory for a fence.proxy.async before the
    # copy engine fills the place again. Reads are done when their thread arrives at the barrier that
    # the copy is asked for after.
    options+=(--racecheck-fence-proxy-async no)
  else
    # Not checked, since racecheck of CUDA 13.0 reports them though nothing races:
    # - nvjet: cuBLAS kernels, which synchronise through the copy engine. (The tool itself then fails
    #   in some cases that use cuBLAS.)
    # - linear_attention_gradients: it loses named barriers at which two groups of warps arrive and
    #   a third one waits.
    for kernels in nvjet linear_attention_gradients_cu; do
      options+=(--kernel-name-exclude "kernel_substring=$kernels")
    done
  fi
fi
if [[ "$tool" == initcheck ]]; then
  # It does not see what tensor copies of the copy engine write to memory, and reports who reads it
  # where the memory has not been in use before. Left out: cases with products of cuBLAS, and the
  # kernels that read the states that linear attention stores in this way.
  [[ "$filter" == *-* ]] || filter+=-
  filter+=':*/matmul_*:*/channel_mix_*:*/linear_cross_entropy_*'
  for kernels in linear_attention_gradients_cu linear_attention_reverse_cu \
    linear_attention_fast_bwd_cu; do
    options+=(--kernel-name-exclude "kernel_substring=$kernels")
  done
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Cases are dealt like cards, one of every kind of operator and dtype after the other, so that all
# have had a turn whenever time is up; to as many decks as there are processes, since a process has
# to prepare each kernel for the tool once. Racecheck says nothing of what it was through with when
# it is cut off: fewer at a time.
most=64
[[ "$tool" == racecheck ]] && most=16
"$tests" --gtest_list_tests --gtest_filter="$filter" | awk -v most="$most" -v decks="$processes" '
  /^[^ ]/ { suite = $1; next }
  { kind = $1; sub(/_.*/, "", kind)  # Bf16/rotary of Bf16/rotary_starts
    if (!(kind in count)) place[kind] = kinds++
    print place[kind] % decks, count[kind]++, place[kind], suite $1 }' |
  sort -k1,1n -k2,2n -k3,3n | awk -v most="$most" '
  BEGIN { deck = -1 }
  $1 != deck { deck = $1; n = 0 }
  { group = int(n / most); ++n; line[group, deck] = line[group, deck] ":" $4
    if (group > groups) groups = group
    if (deck > decks) decks = deck }
  END {
    for (g = 0; g <= groups; ++g)
      for (d = 0; d <= decks; ++d)
        if ((g, d) in line) print substr(line[g, d], 2)
  }' >"$work/groups"
total=$(tr ':' '\n' <"$work/groups" | grep -c .)
(( total )) || { echo "gpu_sanitize: no case matches $filter" >&2; exit 1; }

run_group() {  # of cases, joined by ':'
  local now log code
  now=$(date +%s)
  (( now < deadline )) || return 0
  log=$(mktemp "$work/log.XXXXXX")
  OMP_NUM_THREADS=1 timeout $(( deadline + 15 - now )) "$sanitizer" "${options[@]}" "$tests" \
    "--gtest_filter=$1" >"$log" 2>&1
  code=$?
  if (( code == 0 )); then
    tr ':' '\n' <<<"$1" >>"$work/checked"
  elif (( code == 124 )); then
    echo "cut off by the time limit: ${1:0:200}..." >>"$work/cut"
    # What it was through with counts, unless reports come at the end, as racecheck's do.
    if [[ "$tool" != racecheck ]] && ! grep -q '^========= [^C]' "$log"; then
      sed -n 's/^\[ *\(OK\|SKIPPED\) \] \([^ ,]*\).*/\2/p' "$log" | head -n -1 >>"$work/checked"
    fi
  elif grep -q 'Internal Sanitizer Error' "$log"; then  # of the tool itself
    echo "the tool failed on: $1" >>"$work/cut"
  else
    { echo "== exit code $code: $1"; grep -v "^\[ *\(RUN\|OK\) " "$log" | head -c 20000; } >"$(mktemp "$work/reported.XXXXXX")"
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
    "$(wc -l <<<"$found") groups of up to $most with one"
  exit 1
fi
echo "checked $(wc -l <"$work/checked") of $total cases, nothing reported"
[[ -s "$work/checked" ]]  # else not one group has ended in time
