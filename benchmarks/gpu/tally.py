"""A pytest plugin that writes the counts of outcomes during the run, so that they survive a run that is cut off.

TALLY=FILE.json python -m pytest -p benchmarks.gpu.tally ...
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import write_json

EVERY_SECONDS = 2.0
MOST_FAILURES = 40
counts: Counter[str] = Counter()
failures: list[dict[str, str]] = []
last = 0.0
worker = False
"""Whether this is a worker process of pytest-xdist."""


def keep(finished: bool) -> None:
    """Write the counts and the first failures to the file that ``TALLY`` names."""
    result = {"counts": dict(counts), "finished": finished, "failures": failures[:MOST_FAILURES]}
    write_json(Path(os.environ["TALLY"]), result)


def pytest_configure(config: Any) -> None:
    """Find out the role of this process: with pytest-xdist, only the controller counts, for all workers."""
    global worker
    worker = hasattr(config, "workerinput")


def pytest_runtest_logreport(report: Any) -> None:
    """Count a test."""
    global last
    if worker:
        return
    if report.when == "call" or report.outcome != "passed":
        counts[report.outcome] += 1
    if report.outcome == "failed":
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
        failures.append({"test": report.nodeid, "error": crash.splitlines()[0][:300] if crash else ""})
    if time.monotonic() - last > EVERY_SECONDS:
        last = time.monotonic()
        keep(finished=False)


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    """Write the last counts."""
    if not worker:
        keep(finished=True)
