#!/usr/bin/env bash
# The main job end to end, on a fresh Debian or Ubuntu machine: installs what is missing, builds,
# trains the same small GDN from Random, PoST and DAMI on the same data, evaluates needle retrieval
# by length and distance, prints the tables and writes an HTML report. Minutes on two cores.
#   bash tools/demo.sh [run folder, default runs/demo]
#   EBB=path/to/ebb bash tools/demo.sh       with that build: no set-up, nothing compiled
# Interrupted, the same command goes on where it was; finished, it evaluates and reports again.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
  -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
  -*) echo "demo: unknown option $1; --help says what there is" >&2; exit 2 ;;
esac
(( $# <= 1 )) || { echo "demo: one run folder at most, got $*" >&2; exit 2; }
runs=${1:-runs/demo}
schemes=(random post dami)

if [[ -n ${EBB:-} ]]; then
  ebb=$EBB
  [[ -x $ebb ]] || { echo "demo: EBB=$ebb is not a program" >&2; exit 1; }
else
  bash tools/setup.sh
  cmake --preset release >/dev/null
  cmake --build build --target ebb
  ebb=build/ebb
fi
# ebb train answers Ctrl-C with a checkpoint and exit code 0: what comes after it must not start.
trap 'echo "demo: stopped; the same command goes on from here" >&2; exit 130' INT TERM
# Threads that wait without spinning leave the cores to the ones that work.
export OMP_WAIT_POLICY=passive
started=$SECONDS

echo "== documents: number lists, needle prompts, pieces of a public-domain book"
data=$runs/data
mkdir -p "$data"
for part in validation train; do
  [[ -e $data/$part-00000.bin ]] && continue
  if [[ $part == train ]]; then documents=40000 seed=1; else documents=1000 seed=2; fi
  "$ebb" demo-data --text examples/data/three_men_in_a_boat.txt --documents $documents \
    --seed $seed --out "$data/$part.jsonl"
  "$ebb" tokenize "$data/$part.jsonl" --tokenizer bytes --out "$data/$part"
done
models=() folders=()
for scheme in "${schemes[@]}"; do
  echo "== training from $scheme"
  "$ebb" train recipes/demo.json --resume --set init.scheme=$scheme \
    --set "data.train=[\"$data/train\"]" --set "data.validation=[\"$data/validation\"]" \
    --set "out=$runs/$scheme"
  [[ -e $runs/$scheme/final/model.safetensors ]] || { echo "demo: $scheme is unfinished" >&2; exit 1; }
  models+=(--model "$scheme=$runs/$scheme/final")
  folders+=("$runs/$scheme")
done
echo "== retrieval: one number in a haystack, by length and distance"
"$ebb" eval "${models[@]}" --task niah_single_1 --lengths 768,1024,1536,2048,4096 --samples 60 \
  --data "$data/needles" --max-new-tokens 16 --device auto --dtype f32 --out "$runs/eval"
echo "== report"
"$ebb" report "${folders[@]}" "$runs/eval" --title "Three starts of one small model" \
  --out "$runs/report.html"
echo "demo: $((SECONDS - started)) s after the build; open $runs/report.html"
