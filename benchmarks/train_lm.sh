#!/usr/bin/env bash
# Trains the example's three models (MoE on the native operators, MoE on the reference, dense of equal FLOPs per token)
# one after another on an otherwise idle machine, and leaves their records and pictures in benchmarks/results/train_lm.
#
#     benchmarks/train_lm.sh [flags of examples/train_lm.py for all three]
#
# PYTHON names the interpreter (default: python3); pymoe and the packages of its "examples" extra must be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
results=benchmarks/results/train_lm
mkdir -p "$results"

"$python" examples/train_lm.py --out "$runs/moe-native" "$@"
"$python" examples/train_lm.py --backend reference --out "$runs/moe-reference" "$@"
"$python" examples/train_lm.py --ffn dense --out "$runs/dense" "$@"
for run in moe-native moe-reference dense; do
    cp "$runs/$run/record.json" "$results/$run.json"
done
cp "$runs/moe-native/loss.png" "$runs/moe-native/experts.png" "$results"
"$python" examples/plot_runs.py "$results"/{moe-native,dense}.json --output "$results/moe-dense.png"
"$python" examples/plot_runs.py "$results"/{moe-native,moe-reference}.json --output "$results/native-reference.png"
