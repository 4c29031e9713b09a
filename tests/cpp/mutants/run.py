"""Plants faults in the runtime's headers, one at a time, and looks whether the seeded schedules notice.

    python tests/cpp/mutants/run.py [WORD ...]     # those whose name contains one of the words

A fault (faults.py) is compiled into the test file that is to notice it. The unharmed tests must pass first, and every
fault must be noticed. The result is printed and written to build/schedules/mutants.md. Nothing in the source tree is
changed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from faults import FAULTS, Fault

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "schedules"
LEAST_FAULTS = 20
SECONDS = 60
# No optimisation: compiling is most of the time.
COMPILE = [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-w"]
INCLUDES = [f"-I{ROOT / folder}" for folder in ("csrc", "tests/cpp", "tests")]
COMMON = ["tests/cpp/main.cpp", "tests/cpp/simulated.cpp", "tests/cpp/scheduler.cpp", "tests/cuda_on_cpu/fiber.cpp"]
UNHARMED_SEEDS = "500"  # a test case: the C++ tests run all


@dataclass(frozen=True)
class Outcome:
    fault: Fault
    noticed: bool
    by: str
    seconds: float


def command(words: list[str]) -> None:
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)} failed:\n{result.stderr[-3000:]}")


def compile_common(file: str) -> str:
    target = FOLDER / f"{Path(file).stem}.o"
    command([*COMPILE, "-O2", *INCLUDES, "-c", file, "-o", str(target)])
    return str(target)


def build(schedules: str, overlay: Path | None, target: Path, common: list[str]) -> None:
    """Compile the test file ``schedules``, the headers in ``overlay`` before those of the tree."""
    first = [f"-I{overlay}"] if overlay else []
    source = f"tests/cpp/test_schedules_{schedules}.cpp"
    command([*COMPILE, *first, *INCLUDES, source, *common, "-pthread", "-o", str(target)])


def run(program: Path, case: str, seeds: str | None) -> tuple[int, str]:
    """Exit status and output of the test cases with ``case`` in their names; a hang counts as status 124."""
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


def judge(fault: Fault, common: list[str]) -> Outcome:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        changed = Path(place) / fault.file
        changed.parent.mkdir(parents=True)
        changed.write_text(fault.planted((ROOT / fault.file).read_text()))
        program = Path(place) / "tests"
        build(fault.schedules, Path(place) / "csrc", program, common)
        status, output = run(program, fault.case, None)
    found = re.search(r"logged: (.*)\n\s+(seed \d+)", output)
    by = f"{found[1]} ({found[2]})" if found else f"status {status}"
    return Outcome(fault, status != 0, by if status != 0 else "-", time.monotonic() - start)


def main() -> int:
    words = sys.argv[1:]
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        common = list(pool.map(compile_common, COMMON))
        names = sorted({fault.schedules for fault in faults})
        list(pool.map(lambda name: build(name, None, FOLDER / name, common), names))
        for name, (status, output) in zip(
            names, pool.map(lambda name: run(FOLDER / name, "", UNHARMED_SEEDS), names), strict=True
        ):
            if status != 0:
                print(f"error: the unharmed schedules of {name} fail:\n{output[-3000:]}")
                return 1
        outcomes = []
        for one in pool.map(lambda fault: judge(fault, common), faults):
            outcomes.append(one)
            print(
                f"{'noticed ' if one.noticed else 'SURVIVED'} {one.fault.name}: {one.by}, {one.seconds:.0f} s",
                flush=True,
            )
    rows = ["| fault | file | noticed | as |", "|---|---|---|---|"]
    rows += [
        f"| {one.fault.name} | {Path(one.fault.file).name} | {'yes' if one.noticed else 'NO'} | {one.by} |"
        for one in outcomes
    ]
    (FOLDER / "mutants.md").write_text("\n".join(rows) + "\n")
    noticed = sum(one.noticed for one in outcomes)
    enough = noticed == len(outcomes) and (bool(words) or noticed >= LEAST_FAULTS)
    print(f"{'checks passed' if enough else 'error'}: {noticed} of {len(outcomes)} planted faults noticed")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
