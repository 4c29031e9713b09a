"""What became of the requests that a mixture sent to a backend: counted for each pass, and told to the log."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import NamedTuple

from pymoe._errors import describe_error

LOG_PERIOD = 60.0  # seconds between two lines about one backend
REMEMBERED = 1000  # answers whose latencies are kept

logger = logging.getLogger("pymoe.runtime")


class PassStats(NamedTuple):
    """One pass (forward or backward) of one backend in one mixture.

    Once nothing is under way, ``requests == answered + failed + anomalous + given_up``.
    """

    requests: int
    """That were sent, or were to be."""
    rows: int
    """Of all requests together."""
    answered: int
    """Answers that came in time and were used."""
    failed: int
    """Exceptions of the expert, cancellations by its runtime, and requests that its pool did not take."""
    anomalous: int
    """Answers with NaN or infinity, where the mixture looks for them."""
    given_up: int
    """Requests that were not waited for any longer."""
    late: int
    """Of these, answers that came all the same, and were ignored."""
    latency_mean: float
    """Seconds from a request to its answer, as are the next three, over the last 1000 answers in time; 0 without any"""
    latency_p50: float
    latency_p99: float
    latency_max: float

    def __repr__(self) -> str:
        return (
            f"<PassStats: {self.answered} of {self.requests} requests answered, {self.failed} failed, "
            f"{self.given_up} given up, p99 {self.latency_p99:.3g} s>"
        )


class BackendStats(NamedTuple):
    """One backend in one mixture, since it was added there."""

    name: str
    slot: int
    forward: PassStats
    backward: PassStats


class PassCounts:
    """Counts one pass. Of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("requests", "rows", "answered", "failed", "anomalous", "given_up", "late"), 0)
        self._latencies: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, *names: str, rows: int = 0, latency: float | None = None) -> None:
        """One more of each of ``names``."""
        with self._lock:
            for name in names:
                self._counts[name] += 1
            self._counts["rows"] += rows
            if latency is not None:
                self._latencies.append(latency)

    def read(self) -> PassStats:
        with self._lock:
            counts, latencies = dict(self._counts), sorted(self._latencies)
        if not latencies:
            latencies = [0.0]
        return PassStats(
            **counts,
            latency_mean=sum(latencies) / len(latencies),
            latency_p50=latencies[len(latencies) // 2],
            latency_p99=latencies[int(0.99 * len(latencies))],
            latency_max=latencies[-1],
        )


class Log:
    """Tells about a backend that does not answer: at once, and then no more often than every ``LOG_PERIOD`` seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._next = 0.0
        self._silent = 0
        self._said_idle = False

    def no_answer(self, way: str, why: BaseException) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._silent += 1
                return
            self._next, silent, self._silent = now + LOG_PERIOD, self._silent, 0
        more = f" ({silent} more since the line before)" if silent else ""
        text = describe_error(why)
        logger.warning("a mixture goes on without an answer of %s %s: %s%s", self._name, way, text, more)

    def idle(self, pool: str) -> None:
        with self._lock:
            if self._said_idle:
                return
            self._said_idle = True
        logger.warning("%s: a mixture waits for an answer, but no Runtime serves the pool", pool)
