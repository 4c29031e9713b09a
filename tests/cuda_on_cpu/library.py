"""Builds an operator library whose CPU operators run the CUDA kernels, on the emulator.

    python tests/cuda_on_cpu/library.py [--sanitize]      # writes build/cuda_on_cpu; compiles only what changed

The pytest plugin ``emulated_ops`` replaces ``pymoe._ops`` by it, so that tests of operators and layers test the CUDA
kernels together with the checks and allocations around them:

    PYTHONPATH=tests/cuda_on_cpu python -m pytest -p emulated_ops tests/ops/test_native_equals_reference.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from ninja_library import Source, build_library, kernel_sources, operator_sources  # noqa: E402

FOLDER = ROOT / "build" / "cuda_on_cpu"
EMULATOR = ("emulator", "fiber")
SANITIZE = "-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer"


def build(sanitize: bool = False) -> Path:
    """Compile the changed files and link; raise RuntimeError with the compiler's output if that fails.

    With ``sanitize``, operators and CUDA kernels are instrumented with AddressSanitizer and UBSan
    (tests/sanitized/build.py runs Python with such a library).
    """
    tests = ROOT / "tests" / "cuda_on_cpu"
    unwatched = "-O2 -fno-sanitize=all -DPYMOE_EMULATOR_ADDRESS=1" if sanitize else "-O2"
    sources = [
        *(Source(one.file, "-O0 -fno-sanitize=all") for one in kernel_sources()),  # only a few of them run
        *operator_sources(),
        *(Source(file, "-x c++") for file in sorted(ROOT.glob("csrc/kernels/*.cu"))),
        *(Source(tests / f"{name}.cpp", unwatched) for name in EMULATOR),
        Source(tests / "probe.cpp"),
    ]
    flags = f"-O1 -I{ROOT / 'tests'} -DPYMOE_WITH_CUDA=1 -DPYMOE_CUDA_ON_CPU=1"
    if sanitize:
        return build_library(FOLDER / "sanitized", f"{flags} -g1 {SANITIZE}", sources, SANITIZE)
    return build_library(FOLDER / "plain", f"{flags} -g0", sources)


if __name__ == "__main__":
    print(build("--sanitize" in sys.argv))
