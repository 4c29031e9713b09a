"""Plants faults in the runtime's headers, which the seeded schedules must detect.

A fault (faults_schedules.py) is compiled into the test file that must detect it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from faults_schedules import FAULTS
from planting import ROOT, Kind, ScheduleFault

FOLDER = ROOT / "build" / "schedules"
SECONDS = 60
# No optimisation, since most of the time goes into compiling.
COMPILE = [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-w"]
INCLUDES = [f"-I{ROOT / folder}" for folder in ("csrc", "tests/cpp", "tests")]
COMMON = ["tests/cpp/main.cpp", "tests/cpp/simulated.cpp", "tests/cpp/scheduler.cpp", "tests/cuda_on_cpu/fiber.cpp"]
UNHARMED_SEEDS = "500"  # seeds per test case without a fault; the C++ tests run all seeds


def command(words: list[str]) -> None:
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)} failed:\n{result.stderr[-3000:]}")


def compile_common(file: str) -> str:
    target = FOLDER / f"{Path(file).stem}.o"
    command([*COMPILE, "-O2", *INCLUDES, "-c", file, "-o", str(target)])
    return str(target)


def build(schedules: str, overlay: Path | None, target: Path, common: list[str]) -> None:
    """Compile the test file ``schedules``, with headers in ``overlay`` before headers of the tree."""
    first = [f"-I{overlay}"] if overlay else []
    source = f"tests/cpp/test_schedules_{schedules}.cpp"
    command([*COMPILE, *first, *INCLUDES, source, *common, "-pthread", "-o", str(target)])


def run(program: Path, case: str, seeds: str | None) -> tuple[int, str]:
    """Run the test cases with ``case`` in their names; return exit status and output. A hang counts as status 124."""
    environment = {**os.environ, **({"PYMOE_SEEDS": seeds} if seeds else {})}
    try:
        result = subprocess.run(
            [str(program), "--abort-after=1", f"--test-case=*{case}*"],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, "hangs"
    return result.returncode, result.stdout + result.stderr


def prepare(faults: Sequence[Any]) -> list[str]:
    """Compile the objects that all programs share, and run the schedules without a fault."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    names = sorted({fault.schedules for fault in faults})
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        common = list(pool.map(compile_common, COMMON))
        list(pool.map(lambda name: build(name, None, FOLDER / name, common), names))
        results = pool.map(lambda name: run(FOLDER / name, "", UNHARMED_SEEDS), names)
        for name, (status, output) in zip(names, results, strict=True):
            if status != 0:
                raise RuntimeError(f"the unharmed schedules of {name} fail:\n{output[-3000:]}")
    return common


def judge(fault: ScheduleFault, common: list[str]) -> tuple[bool, str]:
    """Build and run the schedules with the fault, which is detected if they fail."""
    with tempfile.TemporaryDirectory() as place:
        changed = Path(place) / fault.file
        changed.parent.mkdir(parents=True)
        changed.write_text(fault.planted())
        program = Path(place) / "tests"
        build(fault.schedules, Path(place) / "csrc", program, common)
        status, output = run(program, fault.case, None)
    if status == 0:
        return False, "-"
    found = re.search(r"logged: (.*)\n\s+(seed \d+)", output)
    return True, f"{found[1]} ({found[2]})" if found else f"status {status}"


KIND = Kind("schedules", FAULTS, prepare, judge)
