"""Timing of calls that are to be compared with each other, on a machine that is not quiet.

* **Interleaved**: a round runs every candidate once, and every round starts with another one (A B C, B C A, …), so
  that a disturbance that lasts longer than a round hits all of them. Ratios are taken round by round.
* **Comparable spans**: a fast candidate is called several times in a row, so that no value rests on microseconds while
  another rests on a second.
* **Adaptive**: rounds go on until the time budget is used, within the given bounds.
* **Medians with spread**: a :class:`Spread` is the median and the two quartiles over the rounds, never a best case.

Every candidate is called untimed first (memory, caches, lazy initialisation), and garbage collection is off meanwhile.
On CUDA, time is taken by events on the device, around calls in a row (see :class:`CudaTimer`).
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
"""Seconds that one value of a fast candidate rests on at least."""
LONGEST_SPAN = 20e-3
"""Seconds beyond which repeating a fast candidate within a round stops."""
MOST_CALLS = 1000
"""Calls in a row that one value rests on at most."""


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median and quartiles (inclusive method) of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def scaled(self, factor: float) -> Spread:
        """The spread of the values times a positive ``factor``."""
        return Spread(self.low * factor, self.median * factor, self.high * factor)


@dataclass(frozen=True)
class Timing:
    """What :func:`measure` saw of one candidate."""

    seconds: tuple[float, ...]
    """Seconds per call, one value a round."""
    calls: int
    """Calls that each value rests on."""

    @property
    def spread(self) -> Spread:
        """Seconds per call over the rounds."""
        return Spread.of(self.seconds)

    @property
    def median(self) -> float:
        """The median of the seconds per call."""
        return statistics.median(self.seconds)

    def over(self, other: Timing) -> Spread:
        """How many times as long as ``other`` this candidate takes, compared round by round."""
        return Spread.of([mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True)])


class Timer(Protocol):
    """Takes the time of calls in a row."""

    def now(self) -> float:
        """Seconds of the clock that the budget is measured with."""

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        """Seconds per call of ``function`` over ``calls`` calls."""


class WallTimer:
    """Time between call and return by ``clock``, for calls that have done their work when they return.

    ``time.process_time`` as the clock counts what the process computes: on one thread, what other processes do to the
    machine then hardly shows. On several threads it would add them up, and their waiting with it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        start = self.now()
        for _ in range(calls):
            function()
        return (self.now() - start) / calls


class CudaTimer:
    """Device time between two events around calls in a row, per call.

    The device is given work first, so that the host, which does not wait for it, runs ahead: what lies between the
    events is the calls' own time on the device, or the host's where it takes longer to launch a call than the device
    takes to run it. That work overwrites the L2 cache; that later calls find their inputs cold too is up to them. A
    function with an attribute ``calls`` does that many at once.
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
    """The timer for calls that compute on ``device``."""
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
        rounds: the fewest and the most rounds; the fewest are run even when they take longer than the budget.
        timer: how time is taken, :class:`WallTimer` unless given.
        first: seconds that a call of each candidate takes, where they have been called already: there is no other
            warm-up then.

    Returns:
        A :class:`Timing` for every name, all over the same rounds.
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
    """How often to call each candidate in a row, given what a call of each takes, for comparable spans of time."""
    span = min(max(max(seconds.values()) / 4, SHORTEST_SPAN), LONGEST_SPAN)
    return {name: min(max(math.ceil(span / max(one, 1e-9)), 1), MOST_CALLS) for name, one in seconds.items()}
