"""hivemind, seen from the benchmark's process: one that serves and asks, in an environment of its own."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.runtime.clients import Effort, Sample
from benchmarks.runtime.scenario import Cell

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "hivemind" / "bin" / "python"
WORKER = "benchmarks.runtime.hivemind_worker"
ANSWER_LIMIT_S = 120.0
"""A worker that does not answer for so long is given up."""


class PeerError(RuntimeError):
    """The worker's process ended, or did not answer."""


def version(python: Path, worker: str = WORKER) -> str:
    """The peer's version in that environment; raises :class:`PeerError` where it is not installed."""
    try:
        found = subprocess.run(
            [python, "-m", worker], cwd=ROOT, capture_output=True, text=True, timeout=ANSWER_LIMIT_S, check=False
        )
    except OSError as error:
        raise PeerError(f"no environment of its own ({error.strerror}): make bench-runtime sets it up") from None
    if found.returncode:
        raise PeerError((found.stderr.strip().splitlines() or ["it does not start"])[-1])
    return found.stdout.strip().splitlines()[-1]


class HivemindProcess:
    """A contender whose server and clients live in the worker's process."""

    def __init__(self, expert: str, python: Path, worker: str = WORKER) -> None:
        self.process = subprocess.Popen(
            [python, "-m", worker, expert],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
        )
        self.received = b""

    def ask(self, **request: Any) -> Any:
        """One line to the worker, one line back."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise PeerError("its process ended") from None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.received:
                if not selector.select(ANSWER_LIMIT_S):
                    raise PeerError(f"no answer within {ANSWER_LIMIT_S:.0f} s")
                part = os.read(self.process.stdout.fileno(), 1 << 16)
                if not part:
                    raise PeerError("its process ended")
                self.received += part
        line, _, self.received = self.received.partition(b"\n")
        return json.loads(line)

    def check(self) -> str:
        return str(self.ask(check=True))

    def measure(self, cell: Cell, effort: Effort) -> Sample:
        return Sample(**self.ask(cell=asdict(cell), effort=asdict(effort)))

    def close(self) -> None:
        self.process.communicate(timeout=None if self.process.poll() is not None else 10)
