#!/usr/bin/env bash
# Everything that a GPU machine can say about pymoe, in at most 9 minutes and without network: builds in place, tests,
# compares the device with the emulator, runs compute-sanitizer, measures. Writes build/gpu_NAME/.
#
#     bash benchmarks/gpu_report.sh                    # needs an NVIDIA GPU, torch >= 2.11, nvcc and a C++20 compiler
#     bash benchmarks/gpu_report.sh --device cpu       # the same stages on the CPU, quickly: to see that they work
#     bash benchmarks/gpu_report.sh --help
#
# PYTHON names the interpreter. Exit status: 0 all stages passed, 1 some did not, 3 there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

for python in ${PYTHON:+"$PYTHON"} .venv/bin/python python3 python; do
  if command -v "$python" >/dev/null && "$python" -c 'import torch' >/dev/null 2>&1; then
    exec "$python" -m benchmarks.gpu.report "$@"
  fi
done
echo "gpu_report: no Python with torch was found; name one: PYTHON=... bash benchmarks/gpu_report.sh" >&2
exit 2
