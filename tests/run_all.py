"""Runs the checks of the project one after another, and prints a summary.

    python tests/run_all.py [STEP ...]               # all steps, or those whose name contains a word: ``make test``
    python tests/run_all.py --deep [STEP ...]        # further steps, such as sanitizers: ``make test-deep``
    python tests/run_all.py --quick [STEP ...]       # lint, types, one case of each Python test, C++: ``make check``
    python tests/run_all.py --exhaustive [STEP ...]  # all of it, every case, longer stress: ``make test-all``

tests/selection.py selects the Python tests of each level. Each step's output goes to the terminal and to
build/tests/STEP.log. After a failed step the others still run; the exit status is 1 if any step failed. With
``--seconds S`` nothing runs longer than S seconds after the start: a step that runs then is stopped, and steps that are
left are not run. The summary names both, and they do not count as failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu.stages import end_session  # noqa: E402

RESULTS = ROOT / "build" / "tests"
PYTHON = sys.executable
# Several test processes share the cores. A thread that waits for others of its process must sleep, not spin: a spinning
# thread would hold up the threads for which it waits, and small parallel loops take ten times as long.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", **os.environ}


@dataclass(frozen=True)
class Step:
    name: str
    about: str
    commands: list[list[str]]
    environment: dict[str, str] = field(default_factory=dict)


def pytest_step(name: str, about: str, *arguments: str) -> Step:
    report = f"--junitxml={RESULTS / name}.xml"
    return Step(name, about, [[PYTHON, "-m", "pytest", "--durations=10", report, *arguments]])


def cpp_step(variant: str, about: str, sanitizer: str, seeds: str = "") -> Step:
    folder = f"build/cpp/{variant}"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    jobs = str(os.cpu_count() or 2)
    return Step(
        f"cpp-{variant}",
        about,
        [
            ["cmake", "-S", ".", "-B", folder, *generator, f"-DPYMOE_SANITIZE={sanitizer}"],
            ["cmake", "--build", folder, "-j", jobs],
            ["ctest", "--test-dir", folder, "--output-on-failure", "-j", jobs],
        ],
        {"PYMOE_SEEDS": seeds} if seeds else {},
    )


def clang_format(*options: str) -> list[str]:
    folders = [ROOT / name for name in ("csrc", "tests", "benchmarks", "examples")]
    files = [str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*") if path.suffix in CPP]
    return [str(Path(PYTHON).with_name("clang-format")), *options, *sorted(files)]


CPP = {".cpp", ".h", ".cu"}
XDIST = ["-n", str(min(os.cpu_count() or 1, 8)), "--dist=worksteal"]
# Tests that run on the emulated kernels; only this step collects files that begin with check_.
EMULATED = [
    "tests/cuda_on_cpu/check_emulated.py",
    "tests/ops/test_native_equals_reference.py",
    "tests/nn/test_moe_values.py",
    "tests/nn/test_moe_losses.py",
]
# Runs in a separate process: autograd counts devices before its first backward pass, and the pretended device must
# exist by then.
LAUNCHES = "tests/cuda_on_cpu/check_launches.py"
ON_CUDA = "not narrower and not asked_for and not quantize"  # without tests of the CPU alone or without CUDA kernels


MANY_SEEDS = "20000"
"""Number of interleavings of each simulated scenario in an exhaustive run."""


def steps_of(level: str) -> list[Step]:
    """Return the steps of a run: ``quick``, ``usual``, ``deep`` or ``exhaustive``."""
    if level == "exhaustive":
        return [*usual_steps(level), *deep_steps(level)]
    steps = deep_steps(level) if level == "deep" else usual_steps(level)
    return [step for step in steps if level != "quick" or step.name in QUICK]


QUICK = ("lint", "format", "types", "python", "cpp-plain")


def python_step(level: str) -> Step:
    return pytest_step(
        "python-deep" if level == "deep" else "python",
        "slow tests, and further cases of grids" if level == "deep" else "operators, layers, runtime, pipes, examples",
        *("-m", "not build", f"--level={level}", *XDIST),
    )


def second_device_step(level: str) -> Step:
    """Return the step that finds what tests leave on the CPU; one case of each test shows it."""
    return pytest_step(
        "second-device",
        "layers on a pretended second device: nothing is left on the CPU",
        *("-m", "not build", f"--level={'exhaustive' if level == 'exhaustive' else 'quick'}", *XDIST),
        *("--device=pretended", "tests/nn", "tests/test_bugs.py"),
    )


def packaging_step(name: str, about: str, level: str) -> Step:
    return pytest_step(name, about, "-m", "build", f"--level={level}", "tests/packaging")


def usual_steps(level: str) -> list[Step]:
    """Return the steps that test the package: lint, types, docs, Python and C++ tests, an installation."""
    return [
        Step("lint", "ruff: rules", [[PYTHON, "-m", "ruff", "check", "."]]),
        Step(
            "format",
            "layout: ruff, clang-format",
            [[PYTHON, "-m", "ruff", "format", "--check", "."], clang_format("--dry-run", "--Werror")],
        ),
        Step("types", "mypy --strict", [[PYTHON, "-m", "mypy"]]),
        python_step(level),
        second_device_step(level),
        Step(
            "docs",
            "the documentation, every warning an error; in build/docs/",
            [[PYTHON, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", "build/doctrees", "docs", "build/docs"]],
        ),
        cpp_step(
            "plain", "C++ tests, the CUDA kernels on the CPU among them", "", MANY_SEEDS * (level == "exhaustive")
        ),
        packaging_step("packaging", "sdist, installation into new environments", level),
    ]


def deep_steps(level: str) -> list[Step]:
    """Return the steps that find rare faults: sanitizers, planted faults, aarch64, PTX, all cases of grids."""
    cases = [f"--level={level}"] if level == "exhaustive" else []
    return [
        Step(
            "cuda-compile",
            "CUDA kernels for every GPU that ships, and PTX: no warning, no spill (table in build/cuda/registers.md)",
            [[PYTHON, "tests/cuda_on_cpu/compile_gate.py"]],
        ),
        Step(
            "cuda-static",
            "their machine code: held to bars, faults planted in it noticed",
            [[PYTHON, "tests/cuda_static/check.py"], [PYTHON, "tests/mutants/run.py", "static"]],
        ),
        cpp_step("thread", "C++ tests under ThreadSanitizer, planted races included", "thread"),
        cpp_step("address", "C++ tests under AddressSanitizer and UBSan, planted errors included", "address"),
        Step(
            "aarch64",
            "C++ tests for aarch64, run by an emulator; bits compared with those of this processor",
            [[PYTHON, "tests/aarch64/check.py"]],
        ),
        Step(
            "cuda-mutants",
            "faults planted in the CUDA kernels, one by one: the emulated tests must notice",
            [[PYTHON, "tests/mutants/run.py", "cuda"]],
        ),
        Step(
            "schedule-mutants",
            "faults planted in the runtime, one by one: the seeded schedules must notice",
            [[PYTHON, "tests/mutants/run.py", "schedules"]],
        ),
        Step(
            "cuda-on-cpu",
            "operators and layers on the CUDA kernels, run by the emulator",
            [
                [PYTHON, "-m", "pytest", "-p", "emulated_ops", "-k", ON_CUDA, *cases, *XDIST, *EMULATED],
                [PYTHON, "-m", "pytest", "-p", "emulated_ops", LAUNCHES],
            ],
            {"PYTHONPATH": str(ROOT / "tests" / "cuda_on_cpu")},
        ),
        Step(
            "cuda-ptx",
            "the PTX that nvcc makes of the kernels, run by an interpreter (without nvcc: the interpreter's own tests)",
            [
                [PYTHON, "tests/cuda_ptx/run_ptx.py", "--durations=10", *cases, *XDIST],
                [PYTHON, "tests/mutants/run.py", "streams"],
            ],
        ),
        Step(
            "aarch64-torch",
            "operators and layers with torch for aarch64, run by an emulator; bits compared as well",
            [[PYTHON, "tests/aarch64/operators.py"]],
        ),
        *([python_step(level)] if level == "deep" else []),
        *([packaging_step("packaging-deep", "CUDA kernels, C++ libraries", level)] if level == "deep" else []),
    ]


NO_TIME = "no time was left"
# The line of a log that holds the outcome.
OUTCOME = re.compile(
    r"(\d+ passed|\d+ failed|tests passed|[Cc]hecks passed|already formatted|Success:|^Found \d+|error)"
)


def start_process(command: list[str], environment: dict[str, str], alone: bool) -> subprocess.Popen[str]:
    """Start a command; ``alone``: as the leader of a session, which can be ended with all its processes."""
    return subprocess.Popen(
        command, cwd=ROOT, text=True, errors="replace", stdin=subprocess.DEVNULL, env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=alone,
    )  # fmt: skip


@contextmanager
def until(end: float | None, process: subprocess.Popen[str]) -> Iterator[threading.Event]:
    """End the session of ``process`` at the time ``end`` (None: never), or if the block raises; the event says that the
    time has come.
    """
    late = threading.Event()

    def stop() -> None:
        late.set()
        end_session(process, signal.SIGKILL)

    if end is None:
        yield late
        return
    timer = threading.Timer(end - time.monotonic(), stop)
    timer.daemon = True
    timer.start()
    try:
        yield late
    except BaseException:  # Ctrl-C does not reach other sessions
        stop()
        raise
    finally:
        timer.cancel()


def run(step: Step, end: float | None) -> tuple[bool, str, float]:
    """Run a step, until the time ``end`` at the latest; return whether it passed, its outcome, and its seconds."""
    start = time.monotonic()
    if end is not None and start >= end:
        return True, f"not run: {NO_TIME}", 0.0
    print(f"\n=== {step.name}: {step.about}", flush=True)
    outcome = ""
    passed = True
    with open(RESULTS / f"{step.name}.log", "w") as log:
        for command in step.commands:
            print("$ " + " ".join(command), flush=True)
            try:
                process = start_process(command, step.environment, end is not None)
            except OSError as error:  # a missing tool must not prevent the other steps
                outcome, passed = f"{command[0]}: {error.strerror}", False
                print(outcome, flush=True)
                break
            assert process.stdout is not None
            with until(end, process) as late:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    log.write(line)
                    if OUTCOME.search(line):
                        outcome = line.strip().strip("= ")
                process.wait()
            if late.is_set():
                outcome = f"stopped: {NO_TIME}"
                break
            if process.returncode != 0:
                outcome = f"{outcome} (exit status {process.returncode})".strip()
                passed = False
                break
    return passed, outcome, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    level = parser.add_mutually_exclusive_group()
    for name, about in (
        ("quick", "some minutes: see QUICK"),
        ("deep", "what a run without options leaves out"),
        ("exhaustive", "both, with every case and longer stress"),
    ):
        level.add_argument(f"--{name}", dest="level", action="store_const", const=name, default="usual", help=about)
    parser.add_argument("--seconds", type=float, metavar="S", help="run nothing for longer than this")
    parser.add_argument("words", nargs="*", metavar="STEP", help="a part of the names of the steps to run")
    options = parser.parse_args()
    end = None if options.seconds is None else time.monotonic() + options.seconds
    steps = steps_of(options.level)
    names = [step.name for step in steps]
    unknown = [word for word in options.words if not any(word in name for name in names)]
    if unknown:
        print(f"no step is called {', '.join(unknown)}; the steps are {', '.join(names)}", file=sys.stderr)
        return 2
    steps = [step for step in steps if not options.words or any(word in step.name for word in options.words)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = [(step, *run(step, end)) for step in steps]

    print(f"\n=== summary (logs and reports in {RESULTS.relative_to(ROOT)}/)")
    failed = [step.name for step, passed, *_ in results if not passed]
    left = [step.name for step, _, outcome, _ in results if outcome.endswith(NO_TIME)]
    for step, _, outcome, seconds in results:
        word = "FAIL" if step.name in failed else "left" if step.name in left else "ok"
        print(f"{word:<4} {step.name:<16} {seconds:6.0f} s  {outcome}")
    total = sum(seconds for *_, seconds in results)
    verdict = f"not finished: {', '.join(left)}; no other step failed" if left else f"all {len(results)} steps passed"
    print(f"FAILED: {', '.join(failed)}" if failed else f"{verdict} in {total / 60:.1f} min")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
