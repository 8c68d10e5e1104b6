#!/usr/bin/env bash
# The main job end to end, on a fresh Debian or Ubuntu machine: installs what is missing, builds,
# trains the same small GDN from Random, PoST and DAMI on the same data, evaluates needle retrieval
# by length and distance, prints the tables and writes an HTML report. Minutes on two cores.
#   bash tools/demo.sh [run folder, default runs/demo]
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:-runs/demo}

bash tools/setup.sh
cmake --preset release >/dev/null
cmake --build build --target ebb
ebb=build/ebb
# Threads that wait without spinning leave the cores to the ones that work.
export OMP_WAIT_POLICY=passive
started=$SECONDS

data=$runs/data
mkdir -p "$data"
if [[ ! -e $data/train-00000.bin ]]; then
  $ebb demo-data --text examples/data/three_men_in_a_boat.txt --documents 40000 --seed 1 \
    --out "$data/train.jsonl"
  $ebb demo-data --text examples/data/three_men_in_a_boat.txt --documents 1000 --seed 2 \
    --out "$data/validation.jsonl"
  $ebb tokenize "$data/validation.jsonl" --tokenizer bytes --out "$data/validation"
  $ebb tokenize "$data/train.jsonl" --tokenizer bytes --out "$data/train"
fi
models=()
for scheme in random post dami; do
  echo "== training from $scheme"
  $ebb train recipes/demo.json --resume --set init.scheme=$scheme \
    --set "data.train=[\"$data/train\"]" --set "data.validation=[\"$data/validation\"]" \
    --set "out=$runs/$scheme"
  models+=("$runs/$scheme")
done
echo "== retrieval: one number in a haystack, by length"
for scheme in random post dami; do
  $ebb eval --model "$runs/$scheme/final" --task niah_single_1 --lengths 768,1024,1536,2048,4096 \
    --samples 60 --data "$data" --max-new-tokens 16 --out "$runs/$scheme/eval"
done
$ebb report "${models[@]}" --out "$runs/report.html"
echo "demo: $((SECONDS - started)) s after the build; open $runs/report.html"
