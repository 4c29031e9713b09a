"""Builds an operator library whose CPU operators run the CUDA kernels, on the emulator.

    python tests/cuda_on_cpu/library.py      # writes build/cuda_on_cpu/_ops.so; only what changed is compiled again

With the pytest plugin ``emulated_ops`` it takes the place of ``pymoe._ops``, and tests of operators and layers then
prove the CUDA kernels with the checks and allocations around them:

    PYTHONPATH=tests/cuda_on_cpu python -m pytest -p emulated_ops tests/ops/test_native_equals_reference.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from ninja_library import Source, build_library, operator_sources  # noqa: E402

LIBRARY = ROOT / "build" / "cuda_on_cpu" / "_ops.so"


def build() -> Path:
    """Compile and link what changed; raises RuntimeError with the compiler's output when that fails."""
    emulated = f"-I{ROOT / 'tests'} -DPYMOE_WITH_CUDA=1 -DPYMOE_CUDA_ON_CPU=1"
    sources = [
        *operator_sources(),
        *(Source(file, "-x c++") for file in sorted(ROOT.glob("csrc/kernels/*.cu"))),
        *(Source(ROOT / f"tests/cuda_on_cpu/{name}.cpp", "-O2") for name in ("emulator", "fiber", "probe")),
    ]
    return build_library(LIBRARY.parent, f"-O1 -g0 {emulated}", sources)


if __name__ == "__main__":
    print(build())
