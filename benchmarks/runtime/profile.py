"""Breaks down pymoe's time per request: times and sleeps of clients and workers, and the cost of each part alone.

The first part runs the load of a cell and reads the kernel's statistics of every thread: processor time, time spent
runnable without a core, and the number of sleeps. The second part times each step alone, on one thread: submitting,
taking a finished result, the expert's function on a batch of the mean size, and a handover between two Python threads.
The difference between the load's time and the sum of these steps is time spent waiting for the GIL or a core, and
waking up.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.handover import between_threads
from benchmarks.runtime.clients import Effort, summary
from benchmarks.runtime.ours import BackendServer
from benchmarks.runtime.scenario import Cell, Expert, call, prepared
from benchmarks.runtime.serving import load

TASKS = Path("/proc/self/task")
SECONDS = 1.0
REPEATS = 7
HAND_OVER = "part: from one thread to another"


def add(result: dict[str, Any], cells: list[Cell], chosen: bool) -> None:
    """Profile ``cells`` if ``chosen``, otherwise only the cells below a target; write ``profiles`` into ``result``."""
    missed = [Cell(**one["cell"]) for one in result["targets"] if one["met"] is False]
    wanted = [cell for cell in cells if chosen or cell in missed]
    result["profiles"] = [profile(cell) for cell in wanted]


def profile(cell: Cell, seconds: float = SECONDS) -> dict[str, Any]:
    """Return a heading, and rows with a name, a value, its unit and a note."""
    server = BackendServer(Expert(cell.expert))
    try:
        rows = under_load(cell, server, seconds)
    finally:
        server.close()
    found = {one["what"]: one["value"] for one in rows}
    rows += alone(cell, found["mean batch, rows"])
    parts = {one["what"]: one["value"] for one in rows if one["what"].startswith("part: ")}
    hand_over = parts.pop(HAND_OVER)
    sleeps = sum(value for what, value in found.items() if what.endswith("fell asleep"))
    sum_of_parts = sum(parts.values()) + hand_over * sleeps
    note = f"with a hand-over for each of {sleeps:.2f} sleeps; the rest is waiting for the GIL or a core"
    rows.append(row("sum of the parts", sum_of_parts, "us per request", note))
    return {"heading": f"Where the time goes: {cell}", "rows": rows}


def row(what: str, value: float, unit: str, note: str) -> dict[str, Any]:
    return {"what": what, "value": value, "unit": unit, "note": note}


def under_load(cell: Cell, server: BackendServer, seconds: float) -> list[dict[str, Any]]:
    """Return rows with the load's rate, and its threads' processor time, waits for a core and sleeps per request."""
    asked, expected = prepared(cell)
    effort = Effort(0.1, seconds)
    marks: list[dict[int, Usage]] = []
    whose: dict[int, str] = {}

    def cpu() -> float:  # called when the window opens and when it closes
        marks.append(threads_usage())
        whose.update(roles(cell.kind))
        return time.process_time()

    server.runtime.stats()
    window, logs = load(server, cell, asked, effort, cpu)
    pool = next(one for name, one in server.runtime.stats().items() if name.endswith(cell.direction))
    sample = summary(window, logs, expected)
    micro = 1e6 / (sample.rate * (window.end - window.begin))  # seconds of the window to us per request
    rows = [
        row("wall time", 1e6 / sample.rate, "us per request", "of the whole load: the inverse of its rate"),
        row("processor time", sample.cpu * 1e6, "us per request", "all threads"),
        row("mean batch, rows", pool.rows / max(1, pool.batches), "rows", "runtime.stats()"),
        row("queue wait, median", pool.wait.p50 * 1e6, "us", "runtime.stats()"),
        row(
            "expert's function, mean",
            pool.process.mean * 1e6,
            "us per batch",
            "runtime.stats(), GIL and core waits included",
        ),
    ]
    if len(marks) == 2:
        for who in ("clients", "workers", "main thread"):
            own = [
                after - marks[0].get(thread, Usage())
                for thread, after in marks[1].items()
                if whose.get(thread, "workers") == who
            ]
            if own:
                rows += [
                    row(f"{who}: on a core", micro * sum(one.cpu for one in own), "us per request", "schedstat"),
                    row(
                        f"{who}: runnable, no core",
                        micro * sum(one.waited for one in own),
                        "us per request",
                        "schedstat",
                    ),
                    row(
                        f"{who}: fell asleep",
                        micro * 1e-6 * sum(one.slept for one in own),
                        "times per request",
                        "status",
                    ),
                ]
    return rows


class Usage:
    """The kernel's statistics of one thread: seconds on a core, seconds runnable without one, voluntary switches."""

    def __init__(self, cpu: float = 0.0, waited: float = 0.0, slept: int = 0) -> None:
        self.cpu, self.waited, self.slept = cpu, waited, slept

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.cpu - other.cpu, self.waited - other.waited, self.slept - other.slept)


def threads_usage() -> dict[int, Usage]:
    """Return the statistics of every thread of this process by its number; empty without ``/proc``."""
    found = {}
    for folder in TASKS.iterdir() if TASKS.exists() else ():
        try:
            cpu, waited, _ = map(int, (folder / "schedstat").read_text().split())
            status = (folder / "status").read_text()
        except OSError:
            continue  # it has just ended
        slept = next(line.split()[1] for line in status.splitlines() if line.startswith("voluntary"))
        found[int(folder.name)] = Usage(cpu / 1e9, waited / 1e9, int(slept))
    return found


def roles(kind: str) -> dict[int, str]:
    """Return the role of each Python thread by its number; all other threads are pymoe's native workers."""
    clients = {one.native_id: "clients" for one in threading.enumerate() if one.name.startswith("client-")}
    return clients | {os.getpid(): "clients" if kind == "asyncio" else "main thread"}


def alone(cell: Cell, mean_rows: float) -> list[dict[str, Any]]:
    """Return rows with the cost of each part alone."""
    requests = max(1, round(mean_rows / cell.rows))
    submit, take = submit_and_take(cell)
    asked = prepared(cell)[0][0][0]
    expert = Expert(cell.expert)
    batch = tuple(torch.cat([tensor] * requests) for tensor in asked)
    function = median_seconds(lambda: call(expert, batch)) / requests
    hand_over = between_threads(2000)
    note = "by itself, on one thread"
    return [
        row("part: submit_task", submit * 1e6, "us per request", note),
        row("part: result() of a finished request", take * 1e6, "us per request", note),
        row("part: the expert's function", function * 1e6, "us per request", f"{note}, {requests} requests a batch"),
        row(HAND_OVER, hand_over * 1e6, "us each", "two Python threads and two queues"),
    ]


def submit_and_take(cell: Cell, requests: int = 1024) -> tuple[float, float]:
    """Return the median seconds of ``submit_task``, and of ``result()`` of a finished request."""
    from pymoe.runtime import Runtime, TaskPool

    asked = prepared(cell)[0][0][0]
    rows = (requests + 1) * cell.rows  # no batch runs before all requests are submitted, which would disturb the timing
    submitted, taken = [], []
    pool = TaskPool(lambda *tensors: tensors[0], name="alone", min_batch_size=rows, max_batch_size=rows)
    with Runtime([pool]):
        for _ in range(REPEATS):
            begin = time.perf_counter()
            futures = [pool.submit_task(*asked) for _ in range(requests)]
            submitted.append((time.perf_counter() - begin) / requests)
            pool.submit_task(*asked).result()
            for future in futures:
                future.result()  # wait until all requests have finished
            begin = time.perf_counter()
            for future in futures:
                future.result()
            taken.append((time.perf_counter() - begin) / requests)
    return statistics.median(submitted), statistics.median(taken)


def median_seconds(function: Callable[[], object]) -> float:
    """Return the median seconds of one call, over at least twenty calls and 0.1 s."""
    took: list[float] = []
    function()
    start = time.perf_counter()
    while len(took) < 20 or time.perf_counter() - start < 0.1:
        begin = time.perf_counter()
        function()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)
