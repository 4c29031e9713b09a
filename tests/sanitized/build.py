"""Builds the operator library with AddressSanitizer and UndefinedBehaviorSanitizer, and runs Python with it.

    python tests/sanitized/build.py        # writes build/sanitized/_ops.so; compiles only changed files

The library holds the CPU kernels, the operators and probe.cpp. In the child process that :func:`run` starts, it
replaces ``pymoe._ops`` (see driver.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from ninja_library import Source, build_library, compiler, kernel_sources, operator_sources  # noqa: E402

LIBRARY = ROOT / "build" / "sanitized" / "_ops.so"
SANITIZE = "-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer"


def build():
    """Compile the changed files and link; raise RuntimeError with the compiler's output if that fails."""
    sources = [*kernel_sources(), *operator_sources(), Source(ROOT / "tests/sanitized/probe.cpp")]
    # No optimisation, since compiling takes longer than running the tests.
    return build_library(LIBRARY.parent, f"-O0 -g1 -DPYMOE_WITH_CUDA=0 {SANITIZE}", sources, SANITIZE)


def runtime_library(name):
    command = [compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(*arguments, library=LIBRARY, **environment):
    """Run ``python tests/sanitized/driver.py *arguments`` with a sanitized library; return the finished process."""
    variables = {
        **os.environ,
        # The sanitizer looks up __cxa_throw when it starts, which is before Python would load libstdc++.
        "LD_PRELOAD": f"{runtime_library('libasan.so')} {runtime_library('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:exitcode=66",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=67",
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    command = [sys.executable, str(ROOT / "tests/sanitized/driver.py"), str(library), *arguments]
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    print(build(), f"(torch {torch.__version__})")
