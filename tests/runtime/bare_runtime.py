"""Uses the native worker pool without the package, in separate processes and in this one."""

from __future__ import annotations

import subprocess
import threading

import processes
from limits import LONG

from pymoe import _runtime
from pymoe._runtime import WorkerPool

# Loads the module from its file, without the package and torch, because their import takes longest.
PRELUDE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("pymoe._runtime", {_runtime.__file__!r})
_runtime = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_runtime)
WorkerPool = _runtime.WorkerPool
"""


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    return processes.run_python(script, PRELUDE)


class Blocker:
    """Occupies every worker of a pool until it is released, so that later tasks stay queued."""

    def __init__(self, pool: WorkerPool) -> None:
        self.event = threading.Event()
        started = threading.Barrier(pool.workers + 1)

        def block() -> None:
            started.wait(LONG)
            self.event.wait(LONG)

        self.futures = [pool.submit(block) for _ in range(pool.workers)]
        started.wait(LONG)

    def release(self) -> None:
        self.event.set()
        for future in self.futures:
            future.result(LONG)
