"""Timing of calls that are compared with each other, on a machine that is not quiet.

* **Interleaved**: a round times every candidate once, and rounds start with a different candidate each (A B C, B C A,
  …), so that a disturbance longer than a round affects all of them. Ratios are taken round by round.
* **Comparable spans**: a fast candidate is called several times in a row, so that each value covers a similar span of
  time.
* **Adaptive**: rounds go on until the time budget is used, within the given bounds.
* **Medians with spread**: a :class:`Quartiles` is the median and the two quartiles over the rounds, never a best case.

Every candidate is first called as a warm-up (memory, caches, lazy initialisation), and garbage collection is off during
the rounds. On CUDA, events on the device take the time of several calls in a row (see :class:`CudaTimer`).
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

SHORTEST_SPAN = 0.5e-3
"""Minimum number of seconds for which a fast candidate is called repeatedly to measure one value."""
LONGEST_SPAN = 20e-3
"""Maximum number of seconds for which a fast candidate is called repeatedly to measure one value."""
MOST_CALLS = 1000
"""Largest number of calls in a row for one value."""


@dataclass(frozen=True)
class Quartiles:
    """The median and the lower and upper quartile of some values."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Return the median and the quartiles (inclusive method) of ``values``, which must not be empty."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def scaled(self, factor: float) -> Quartiles:
        """Return the quartiles multiplied by ``factor``, which must be positive."""
        return Quartiles(self.low * factor, self.median * factor, self.high * factor)


@dataclass(frozen=True)
class Timing:
    """The measurement of one candidate by :func:`measure`."""

    seconds: tuple[float, ...]
    """Seconds per call, one value per round."""
    calls: int
    """Number of calls in a row that were timed for each value."""

    @property
    def spread(self) -> Quartiles:
        """Return the quartiles of the seconds per call over the rounds."""
        return Quartiles.of(self.seconds)

    @property
    def median(self) -> float:
        """Return the median of the seconds per call."""
        return statistics.median(self.seconds)

    def over(self, other: Timing) -> Quartiles:
        """Return the quartiles of the ratio of this candidate's time to that of ``other``, taken round by round."""
        return Quartiles.of([mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True)])


class Timer(Protocol):
    """Measures the time of calls in a row."""

    def now(self) -> float:
        """Return the time, in seconds, of the clock that limits the whole measurement."""

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        """Return the seconds per call of ``function`` over ``calls`` calls."""


class WallTimer:
    """Measures the time from call to return with ``clock``, for functions that return only when their work is done.

    With ``time.process_time`` as the clock, only the processor time of this process counts: with one thread, other
    processes then hardly affect the result. With several threads it would add up their times, including busy waiting.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        start = self.now()
        for _ in range(calls):
            function()
        return (self.now() - start) / calls


class CudaTimer:
    """Measures the device time per call, between two events around several calls.

    The device first gets other work, so that the host, which does not wait for it, can run ahead. The time between the
    events is then the calls' own time on the device, or the host's time if launching a call takes longer than running
    it. That other work overwrites the L2 cache, but only the functions themselves can ensure that later calls also find
    their inputs outside the cache. A function with an attribute ``calls`` counts as that many calls.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.now = time.perf_counter
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._scratch = torch.empty(max(4 * cache, 1 << 28), dtype=torch.uint8, device=device)

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        with torch.cuda.device(self.device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._scratch.zero_()
            start.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / (calls * getattr(function, "calls", 1))


def timer_for(device: torch.device) -> Timer:
    """Return the timer for calls that compute on ``device``."""
    return CudaTimer(device) if device.type == "cuda" else WallTimer()


def measure(
    candidates: Mapping[str, Callable[[], object]],
    *,
    budget: float = 1.0,
    rounds: tuple[int, int] = (5, 100),
    timer: Timer | None = None,
    first: Mapping[str, float] | None = None,
) -> dict[str, Timing]:
    """Time every candidate in interleaved rounds.

    Args:
        candidates: functions without arguments, by name.
        budget: seconds after which no further round starts; warm-up is not counted.
        rounds: the fewest and the most rounds; the fewest are run even if they take longer than the budget.
        timer: measures the time; a :class:`WallTimer` by default.
        first: seconds that a call of each candidate takes, if all of them have been called already; they are then not
            called as a warm-up.

    Returns:
        A :class:`Timing` for every name, all over the same rounds.

    Raises:
        ValueError: there are no candidates, or ``rounds`` is not 1 <= fewest <= most.
    """
    fewest, most = rounds
    if not candidates or not 1 <= fewest <= most:
        raise ValueError(f"measure: needs candidates and 1 <= fewest <= most rounds, got {len(candidates)}, {rounds}")
    timer = timer or WallTimer()
    if first is None:
        first = {}
        for name, function in candidates.items():
            function()
            first[name] = timer(function, 1) * getattr(function, "calls", 1)
    calls = calls_per_value(first)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = timer.now()
        for index in range(most):
            if index >= fewest and timer.now() - start >= budget:
                break
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                seconds[name].append(timer(candidates[name], calls[name]))
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(tuple(seconds[name]), calls[name]) for name in names}


def calls_per_value(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return how often to call each candidate in a row, so that all candidates are timed over similar spans of time.

    Args:
        seconds: the time of one call of each candidate.
    """
    span = min(max(max(seconds.values()) / 4, SHORTEST_SPAN), LONGEST_SPAN)
    return {name: min(max(math.ceil(span / max(one, 1e-9)), 1), MOST_CALLS) for name, one in seconds.items()}
