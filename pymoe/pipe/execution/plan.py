"""A schedule prepared to be run, and whether its runs should use threads."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from pymoe.pipe.schedules.schedule import Action, Kind, Schedule, ScheduleError
from pymoe.pipe.schedules.schedule import run as in_order

INLINE_LIMIT_S = 500e-6
"""Actions that take less are best run inline, on the caller's thread."""
LONG_ACTIONS = 3
LONG_ACTIONS_S = 5 * INLINE_LIMIT_S
"""A run that begins inline starts the workers after so many longer actions that took so many seconds in total: a single
one may have been held up by other processes."""
ALWAYS_THREADS = False
"""Use all workers however short actions are: for tests of threads."""

TimedAction = tuple[Action, float, float]
"""An action, and when it started and ended: in seconds, by ``time.perf_counter``."""


class Plan:
    """The actions of a schedule, and which of them wait for actions of other workers."""

    def __init__(
        self, schedule: Schedule, kinds: frozenset[Kind] = frozenset(Kind), in_turns: Sequence[Sequence[int]] = ()
    ) -> None:
        """Raise ScheduleError if the schedule cannot run.

        Args:
            schedule: what to do.
            kinds: the actions to run; what others would have made is there already.
            in_turns: stages whose forwards are to come in the order of the model, micro-batch after micro-batch.
        """
        self.schedule = schedule
        self.workers = schedule.workers
        self.policy = InlinePolicy()
        self.orders = [[action for action in order if action.kind in kinds] for order in schedule.orders]
        self.keeps: set[tuple[int, ...]] = set()
        """Those of ``in_turns`` whose order it keeps. The workers of others would wait for each other."""
        after: dict[Action, tuple[Action, ...]] = {}
        for stages in in_turns:
            wanted = dict(after)
            for number in range(1, schedule.micro_batches):
                first = Action(stages[0], number, Kind.FORWARD)
                # Between the two, each stage waits for the one before it.
                wanted[first] = (*wanted.get(first, ()), Action(stages[-1], number - 1, Kind.FORWARD))
            with suppress(ScheduleError):
                deque(in_order(schedule, wanted), 0)
                after = wanted
                self.keeps.add(tuple(stages))
        self.in_order: list[Action] = []  # an order for one thread
        self.awaited: dict[Action, list[Action]] = {}
        """By action, those of other workers that it waits for."""
        self.waiting: dict[Action, list[Action]] = {}
        """By action, those of other workers that wait for it."""
        for worker, action, dependencies in in_order(schedule, after):
            if action.kind in kinds:
                self.in_order.append(action)
                for needed in dependencies:
                    if needed.kind in kinds and schedule.placement[needed.stage] != worker:
                        self.awaited.setdefault(action, []).append(needed)
                        self.waiting.setdefault(needed, []).append(action)


class InlinePolicy:
    """Whether runs of one plan call all threads at once, by what earlier runs have taught.

    Where a good part of actions is Python, threads wait for the interpreter's lock more than they gain: a stage of two
    linear layers of width 64 takes longer on two threads than on one. So a run of which nothing is known begins inline.
    """

    def __init__(self) -> None:
        self._needs_threads = False
        self._inline_s = math.inf  # what a run takes inline, as far as is known

    @property
    def uses_threads(self) -> bool:
        """Whether a run calls all threads at once."""
        return self._needs_threads or ALWAYS_THREADS

    def saw_inline(self, seconds: float) -> None:
        self._inline_s = seconds

    def saw_threads(self, seconds: float, durations: list[float]) -> None:
        """A run has ended on threads after so many seconds, with actions that took so long."""
        # Short actions look long there if they wait for each other: then the time of a run inline tells. It may be that
        # of smaller batches, so it counts less with every run that contradicts it.
        long = sum([duration > INLINE_LIMIT_S for duration in durations])
        self._needs_threads = 4 * long > len(durations) and seconds < self._inline_s
        self._inline_s *= 2


def calls_threads(long: list[float], duration: float) -> bool:
    """Return whether a run that has begun inline calls the other threads, after one more action of so many seconds.

    ``long``: the times of its longer actions so far, to which this one is added if it is one.
    """
    if duration <= INLINE_LIMIT_S:
        return False
    long.append(duration)
    return len(long) >= LONG_ACTIONS and sum(long) > LONG_ACTIONS_S
