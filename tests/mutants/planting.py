"""Plants faults in the sources one at a time, to show that tests detect them.

Each kind of fault (python.py, schedules.py, cuda.py, static.py, streams.py) defines how a fault is built and run, and
how its tests' output is interpreted. This file has the common parts: the classes of faults, the check that a fault's
text occurs exactly once, running several faults at the same time, and the report in ``build/mutants/KIND.md``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "mutants"


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` at its only place in ``file``."""

    name: str
    file: str
    old: str
    new: str

    def planted(self) -> str:
        """Return the text of the file with the fault in it.

        Raises:
            ValueError: ``old`` does not occur exactly once, so the file has changed and the fault needs a new text.
        """
        path = ROOT / self.file
        text = path.read_text() if path.exists() else ""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class PythonFault(Fault):
    """A fault in a CPU kernel or an operator, for pytest."""

    tests: tuple[str, ...]
    """The tests that must notice the fault, narrowed for speed."""


@dataclass(frozen=True)
class ScheduleFault(Fault):
    """A fault in a header of the runtime, for the seeded schedules."""

    schedules: str
    """The test file: ``workers`` for test_schedules_workers.cpp."""
    case: str = ""
    """A part of the test case's name; if empty, the first failing case of the file counts."""


@dataclass(frozen=True)
class CudaFault(Fault):
    """A fault in a CUDA kernel, for the emulated tests."""

    how: str
    """``values`` (also the emulator's own checks), ``address`` or ``thread`` (a sanitizer)."""
    tests: str
    """The test file whose cases are run: ``dispatch`` for test_dispatch.cpp."""


@dataclass(frozen=True)
class StaticFault(Fault):
    """A fault that shows in the machine code, for tests/cuda_static."""

    source: str
    """The file of kernels that is compiled with it."""
    architectures: str
    """The architectures to compile for, as in TORCH_CUDA_ARCH_LIST, including 9.0, for which bars.json has limits."""
    said: str
    """A part of the complaint that must be reported."""


@dataclass(frozen=True)
class PtxFault(Fault):
    """A fault that shows in the PTX alone, for tests/cuda_ptx/check_kernels.py."""

    source: str
    """The file of kernels that is compiled with it, without its suffix."""
    cases: str
    """The test cases that must notice it; ``*`` is any text."""
    said: str
    """A pattern of the message that they must give."""


@dataclass(frozen=True)
class StreamFault(Fault):
    """A fault between a CUDA tensor and a launch, for tests/cuda_ptx/check_streams.py."""

    source: str
    """The source that is compiled with it: a file of kernels, or ``with_torch`` for all operators."""
    word: str
    """A part of the names of the tests that must notice it."""


@dataclass(frozen=True)
class Kind:
    """Faults of one kind, and functions that find out whether tests detect them."""

    name: str
    faults: Sequence[Any]
    prepare: Callable[[Sequence[Any]], Any]
    """Builds the common parts for the chosen faults, and runs the tests without a fault; RuntimeError if they fail."""
    judge: Callable[[Any, Any], tuple[bool, str]]
    """Takes a fault and the result of ``prepare``; returns whether the fault was detected, and the evidence."""
    at_once: int = os.cpu_count() or 1
    """The number of faults that are tried at the same time."""


def chosen(kind: Kind, words: Sequence[str]) -> list[Any]:
    """Return the faults whose name contains one of ``words``; all without words."""
    return [fault for fault in kind.faults if not words or any(word in fault.name for word in words)]


def plant(kind: Kind, words: Sequence[str]) -> bool:
    """Try the chosen faults, print and write the results; return whether all faults were detected."""
    faults = chosen(kind, words)
    rows = ["| fault | file | noticed | as |", "|---|---|---|---|"]

    def judge(fault: Any) -> tuple[Any, bool, str, float]:
        start = time.monotonic()
        try:
            noticed, by = kind.judge(fault, shared)
        except (RuntimeError, ValueError) as error:  # the fault does not fit the sources or does not compile
            noticed, by = False, f"not tried: {error}"
        return fault, noticed, by, time.monotonic() - start

    count = 0
    try:
        for fault in faults:
            fault.planted()
        shared = kind.prepare(faults)
    except LookupError as missing:  # a tool that these faults need
        print(missing)
        return True
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}")
        return False
    with ThreadPoolExecutor(kind.at_once) as pool:
        for fault, noticed, by, seconds in pool.map(judge, faults):
            print(f"{'noticed ' if noticed else 'SURVIVED'} {fault.name}: {by}, {seconds:.0f} s", flush=True)
            rows.append(f"| {fault.name} | {Path(fault.file).name} | {'yes' if noticed else 'NO'} | {by} |")
            count += noticed
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{kind.name}.md").write_text("\n".join(rows) + "\n")
    passed = bool(faults) and count == len(faults)
    print(f"{'checks passed' if passed else 'error'}: {count} of {len(faults)} planted faults noticed")
    return passed
