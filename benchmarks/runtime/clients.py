"""Runs closed-loop clients, threads or coroutines: each sends its next request when it has its last answer.

The clients run before, during and after the measurement window, so that the load inside the window is constant. A
client's rate is computed between its first and its last answer in the window, and the load's rate is the sum over
clients. Answers arrive in batches, so counting the answers in a fixed interval would be off by up to a batch.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from benchmarks.runtime.scenario import Request, is_right

Ask = Callable[..., Tensor]
AskAsync = Callable[..., Awaitable[Tensor]]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Effort:
    """The length of a measurement window."""

    warm_up: float
    """Seconds before the window; it opens later if a client has no answer by then."""
    seconds: float
    cycles: int = 2
    """Minimum number of cycles, from answer to answer, of each client in the window, which is extended if necessary."""
    limit: float = 8.0
    """Maximum seconds to wait for the first answers, and maximum length of the window in seconds."""


@dataclass(frozen=True)
class Sample:
    """The measurements of one window."""

    rate: float
    """Requests per second."""
    p50: float
    """Median seconds between consecutive answers to a client, which is the latency of a request."""
    p99: float
    cpu: float
    """Processor seconds per request, of clients and system together."""
    requests: int
    wrong: int = 0
    """Number of clients whose last answer was wrong."""
    starved: int = 0
    """Number of clients with fewer than two answers inside the window; their rate counts as 0."""
    error: str = ""


@dataclass
class Log:
    """The record of one client: the times of its answers, its last answer, and its error."""

    stamps: list[float] = field(default_factory=list)
    last: object = None
    variant: int = 0
    error: BaseException | None = None


@dataclass
class Window:
    """A measurement window: its begin and end, its processor seconds, and the flag that stops the clients."""

    cpu: Clock
    begin: float = 0.0
    end: float = 0.0
    cpu_seconds: float = 0.0
    stopped: bool = False

    def open(self) -> None:
        self.cpu_seconds = -self.cpu()
        self.begin = time.perf_counter()

    def close(self) -> None:
        self.end = time.perf_counter()
        self.cpu_seconds += self.cpu()
        self.stopped = True


def with_threads(
    ask: Ask, asked: list[list[Request]], effort: Effort, cpu: Clock = time.process_time
) -> tuple[Window, list[Log]]:
    """Measure one window, with one thread per client."""
    window, logs = Window(cpu), [Log() for _ in asked]
    together = threading.Barrier(len(asked) + 1)

    def client(own: list[Request], log: Log) -> None:
        now, note, n = time.perf_counter, log.stamps.append, 0
        together.wait()
        try:
            while not window.stopped:
                log.variant = n % len(own)
                log.last = ask(*own[log.variant])
                note(now())
                n += 1
        except BaseException as error:
            log.error = error

    threads = [
        threading.Thread(target=client, args=pair, name=f"client-{i}", daemon=True)
        for i, pair in enumerate(zip(asked, logs, strict=True))
    ]
    for thread in threads:
        thread.start()
    together.wait()
    for pause in phases(window, logs, effort):
        time.sleep(pause)
    for thread in threads:
        thread.join(effort.limit)
        if thread.is_alive():
            raise TimeoutError(f"{thread.name} never got its answer")
    return window, logs


def with_coroutines(
    ask: AskAsync, asked: list[list[Request]], effort: Effort, cpu: Clock = time.process_time
) -> tuple[Window, list[Log]]:
    """Measure one window, with one coroutine per client, all in one event loop of this thread."""
    window, logs = Window(cpu), [Log() for _ in asked]

    async def client(own: list[Request], log: Log) -> None:
        now, note, n = time.perf_counter, log.stamps.append, 0
        try:
            while not window.stopped:
                log.variant = n % len(own)
                log.last = await ask(*own[log.variant])
                note(now())
                n += 1
        except Exception as error:
            log.error = error

    async def everyone() -> None:
        tasks = [asyncio.create_task(client(*pair)) for pair in zip(asked, logs, strict=True)]
        for pause in phases(window, logs, effort):
            await asyncio.sleep(pause)
        _, waiting = await asyncio.wait(tasks, timeout=effort.limit)
        if waiting:
            raise TimeoutError(f"{len(waiting)} coroutines never got their answer")

    asyncio.run(everyone())
    return window, logs


def phases(window: Window, logs: list[Log], effort: Effort) -> Iterator[float]:
    """Yield the seconds to sleep next, and open and close the window in between."""
    start = time.perf_counter()
    yield effort.warm_up
    while not (all(log.stamps for log in logs) or over(start, effort, logs)):
        yield 0.01
    window.open()
    before = [len(log.stamps) for log in logs]
    yield effort.seconds
    while not over(window.begin, effort, logs):
        if all(len(log.stamps) - n > effort.cycles for log, n in zip(logs, before, strict=True)):
            break
        yield 0.02
    window.close()


def over(start: float, effort: Effort, logs: list[Log]) -> bool:
    return time.perf_counter() - start > effort.limit or any(log.error for log in logs)


def summary(window: Window, logs: list[Log], expected: list[list[Tensor]]) -> Sample:
    """Return the measurements of a window, with the number of clients whose last answer was wrong."""
    inside = [[stamp for stamp in log.stamps if window.begin <= stamp <= window.end] for log in logs]
    moving = [stamps for stamps in inside if len(stamps) > 1]
    between = sorted(after - before for stamps in moving for before, after in pairwise(stamps))
    error = next((log.error for log in logs if log.error), None)
    wrong = sum(
        log.last is not None and not is_right(log.last, right[log.variant])
        for log, right in zip(logs, expected, strict=True)
        if not log.error
    )
    rate = sum((len(stamps) - 1) / (stamps[-1] - stamps[0]) for stamps in moving)
    return Sample(
        rate=rate,
        p50=statistics.median(between) if between else 0.0,
        p99=between[min(len(between) - 1, int(0.99 * len(between)))] if between else 0.0,
        cpu=window.cpu_seconds / (rate * (window.end - window.begin)) if rate else 0.0,
        requests=sum(len(stamps) for stamps in inside),
        wrong=wrong,
        starved=len(logs) - len(moving),
        error=f"{type(error).__name__}: {error}".split("\n")[0][:200] if error else "",
    )
