"""Runs the PTX of all kernels, and the tests of the interpreter that runs it.

    python tests/cuda_ptx/run_ptx.py [--level=exhaustive] [PYTEST'S OPTIONS ...]

Without nvcc there is no PTX: then only the interpreter's own tests run, and the program says so. At the end of a run
without ``-k`` every kernel of the library must have been launched.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests" / "cuda_ptx"
sys.path.insert(0, str(ROOT / "tests"))
from machine_code import find_nvcc  # noqa: E402

INTERPRETER = ["check_arithmetic.py", "check_machine.py", "check_rules.py"]
# These tests run on operators that pass CPU tensors to the kernels; the second line has thousands of cases.
LAYERS = ["tests/nn/test_moe_values.py", "tests/nn/test_moe_losses.py"]
OPERATORS = ["tests/ops/test_native_equals_reference.py"]
ON_CUDA = "not narrower and not asked_for and not quantize"


def pytest(arguments: list[str], environment: dict[str, str] | None = None) -> bool:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    paths = os.pathsep.join([str(HERE), str(ROOT / "tests")])
    return (
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, **(environment or {})}).returncode
        == 0
    )


def never_launched(folder: Path) -> list[str]:
    """Return the library's kernels that no process has launched; raise RuntimeError if no process left a list."""
    everything, launched = set(), set()
    for path in folder.glob("*.txt"):
        for line in path.read_text().splitlines():
            count, name = line.split()
            everything.add(name)
            if count != "0":
                launched.add(name)
    if not everything:
        raise RuntimeError(f"no process has left in {folder} which kernels it launched")
    return sorted(everything - launched)


def narrowed(options: list[str]) -> tuple[list[str], bool]:
    """Return the options with ``-k``, however it is spelt, narrowed to tests that concern CUDA; also return whether
    ``-k`` was among them.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-k", dest="words")
    own, others = parser.parse_known_args(options)
    words = ON_CUDA if own.words is None else f"({own.words}) and {ON_CUDA}"
    return ["-k", words, *others], own.words is not None


def main() -> int:
    options = sys.argv[1:]
    checks = [str(HERE / name) for name in INTERPRETER]
    if find_nvcc() is None:
        passed = pytest([*options, *checks])
        print("no nvcc: the kernels' PTX was not run" + (" (checks passed: the interpreter's own)" if passed else ""))
        return 0 if passed else 1
    launched = ROOT / "build" / "cuda_ptx" / "launched"
    shutil.rmtree(launched, ignore_errors=True)
    launched.mkdir(parents=True)
    from architectures import kept, others
    from ptx_library import build

    build()  # build once, before several processes need it, as the compile gate does
    kept()
    exhaustive = "--level=exhaustive" in options
    selected = [str(ROOT / name) for name in [*LAYERS, *(OPERATORS if exhaustive else [])]]
    options, some = narrowed(options)
    kernels = ["-p", "ptx_ops", *options, str(HERE / "check_kernels.py"), *selected]
    passed = pytest([*kernels, *checks], {"PYMOE_PTX_LAUNCHED": str(launched)})
    for other in others() if exhaustive else []:
        print(f"the same on the PTX of compute_{other}")
        passed = pytest(kernels, {"PYMOE_PTX_ARCHITECTURE": other}) and passed
    if not some:
        print("operators on CUDA tensors, on two devices and several streams")
        passed = pytest(["-p", "cuda_ops", "-q", "-n", "0", str(HERE / "check_streams.py")]) and passed
    missing = [] if some else never_launched(launched)
    for name in missing:
        print(f"error: no test has launched {re.sub('_GLOBAL__N__.*?_cu_[0-9a-f]{8}', '', name)}")
    if not passed or missing:
        return 1
    print("checks passed: the PTX of the kernels gives what the CPU twins give")
    return 0


if __name__ == "__main__":
    sys.exit(main())
