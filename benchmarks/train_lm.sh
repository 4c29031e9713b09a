#!/usr/bin/env bash
# Trains the example's three models (MoE on the native operators, MoE on the reference, dense of equal FLOPs per token)
# one after another on an otherwise idle machine, and leaves their records, pictures and a table in build/train_lm.
#
#     benchmarks/train_lm.sh [flags of examples/train_lm.py for all three]
#
# PYTHON names the interpreter (default: python3); pymoe and the packages of its "examples" extra must be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
results=build/train_lm
rm -rf "$results"

"$python" examples/train_lm.py --out "$results/moe-native" "$@"
"$python" examples/train_lm.py --backend reference --out "$results/moe-reference" "$@"
"$python" examples/train_lm.py --ffn dense --out "$results/dense" "$@"
"$python" examples/plot_runs.py "$results"/{moe-native,dense} --output "$results/moe-dense.png"
"$python" examples/plot_runs.py "$results"/{moe-native,moe-reference} --output "$results/native-reference.png"
"$python" examples/plot_runs.py "$results"/{moe-native,moe-reference,dense} --output "$results/all.png" | tee "$results/runs.txt"
