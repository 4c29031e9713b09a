"""Controls a peer from the benchmark's process; its server and clients run in a separate virtual environment."""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from pathlib import Path

from benchmarks.common.children import ROOT, Child, ChildError
from benchmarks.runtime.clients import Effort, Sample
from benchmarks.runtime.scenario import Cell

PYTHON = ROOT / "build" / "hivemind" / "bin" / "python"
WORKER = "benchmarks.runtime.hivemind_worker"
ANSWER_LIMIT_S = 120.0
"""Maximum seconds to wait for a worker's answer."""


def version(python: Path, worker: str = WORKER) -> str:
    """Return the peer's version in the environment of ``python``; raise :class:`ChildError` if it is not installed."""
    try:
        found = subprocess.run(
            [python, "-m", worker], cwd=ROOT, capture_output=True, text=True, timeout=ANSWER_LIMIT_S, check=False
        )
    except OSError as error:
        raise ChildError(f"no environment of its own ({error.strerror}): make bench-runtime sets it up") from None
    if found.returncode:
        raise ChildError((found.stderr.strip().splitlines() or ["it does not start"])[-1])
    return found.stdout.strip().splitlines()[-1]


class HivemindProcess:
    """A contender whose server and clients live in the worker's process."""

    def __init__(self, expert: str, python: Path, worker: str = WORKER) -> None:
        variables = {"PYTHONWARNINGS": "ignore"}
        self.child = Child([python, "-m", worker, expert], variables, limit=ANSWER_LIMIT_S)

    def check(self) -> str:
        return str(self.child.ask({"check": True}))

    def measure(self, cell: Cell, effort: Effort) -> Sample:
        return Sample(**self.child.ask({"cell": asdict(cell), "effort": asdict(effort)}))

    def close(self) -> None:
        self.child.end()
