"""Outcomes of the requests that a mixture sends to a backend: counts for each pass, and log lines."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from pymoe._errors import describe_error
from pymoe.runtime.protocols import RequestPool

LOG_PERIOD_S = 60.0  # minimum number of seconds between two log lines about missing answers of one backend

logger = logging.getLogger("pymoe.runtime")


class PassStats(NamedTuple):
    """Statistics of one pass (forward or backward) of one backend in one mixture.

    Once no request is pending, ``requests == answered + failed + anomalous + given_up``.
    """

    requests: int
    """Number of requests: those that were sent, that waited for room in the pool in vain, or that the pool refused."""
    rows: int
    """Number of rows in all requests."""
    answered: int
    """Number of answers that came in time and were accepted."""
    failed: int
    """Number of requests that ended with an error (of the expert, or of the connection to its server), that the runtime
    cancelled, or that the pool refused, for example because it was closed."""
    anomalous: int
    """Number of answers with NaN or infinity, under ``detect_anomalies``."""
    given_up: int
    """Number of requests for which the mixture stopped waiting."""
    late: int
    """Number of ``given_up`` requests whose answers came after the wait had ended, and were ignored."""
    latency_mean: float
    """Mean time in seconds from request to answer, over the last 1000 of the ``answered`` requests; 0 without any. The
    next three fields cover the same requests."""
    latency_p50: float
    latency_p99: float
    latency_max: float

    def __repr__(self) -> str:
        return (
            f"<PassStats: {self.answered} of {self.requests} requests answered, {self.failed} failed, "
            f"{self.given_up} given up, p99 {self.latency_p99:.3g} s>"
        )


class BackendStats(NamedTuple):
    """Statistics of one backend in one mixture, since the backend was added to the mixture."""

    name: str
    slot: int
    forward: PassStats
    backward: PassStats


class BackendLog:
    """Logs missing answers of a backend: the first one immediately, later ones at most every ``LOG_PERIOD_S`` seconds.
    Thread-safe.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._next = 0.0
        self._suppressed = 0
        self._idle_logged = False

    def no_answer(self, pass_name: str, why: BaseException) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._suppressed += 1
                return
            self._next, suppressed, self._suppressed = now + LOG_PERIOD_S, self._suppressed, 0
        more = f" ({suppressed} more since the last line)" if suppressed else ""
        error = describe_error(why)
        logger.warning("a mixture continues without the %s answer of %s: %s%s", pass_name, self._name, error, more)

    def idle(self, pool: RequestPool) -> None:
        """Log that a mixture waits for a pool that is not served; do nothing after the first call."""
        with self._lock:
            if self._idle_logged:
                return
            self._idle_logged = True
        logger.warning("%s: a mixture waits for an answer, but %s", pool.name, pool.why_unserved)
