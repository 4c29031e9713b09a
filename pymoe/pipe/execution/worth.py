"""Whether a plan is worth several threads.

Where a good part of actions is Python, threads wait for the interpreter's lock more than they gain: a stage of two
linear layers of width 64 takes longer on two threads than on one. So a run of which nothing is known begins on one
thread, and calls the others when LOST has gone into SEVERAL actions longer than PATIENCE: a single one may have been
held up by other processes.
"""

from __future__ import annotations

import math

__all__ = ["Worth"]

PATIENCE = 500e-6
"""Seconds; shorter actions stay on one thread."""
LOST = 5 * PATIENCE
SEVERAL = 3
ALWAYS = False
"""Call all threads, however short actions are: for tests of threads."""


class Worth:
    """What the runs of one plan have taught."""

    def __init__(self) -> None:
        self._is_known = False
        self._alone = math.inf  # seconds that a run takes on one thread, as far as is known

    @property
    def is_known(self) -> bool:
        """Whether a run calls all threads at once."""
        return self._is_known or ALWAYS

    def saw_alone(self, seconds: float) -> None:
        """A run on one thread has come to its end in so many seconds: its actions were short."""
        self._alone = seconds

    def saw_together(self, seconds: float, durations: list[float]) -> None:
        """So has one on several threads, with actions that took so long.

        Short actions look long there if they wait for each other: then the time of a run on one thread tells. It may be
        that of smaller batches, so it counts less with every run that contradicts it.
        """
        long = sum([duration > PATIENCE for duration in durations])
        self._is_known = 4 * long > len(durations) and seconds < self._alone
        self._alone *= 2


class Alone:
    """The actions of one run, as they come one after the other on one thread."""

    def __init__(self) -> None:
        self._longer: list[float] = []

    def is_too_long(self, duration: float) -> bool:
        """Whether the others should be called, now that an action has taken so many seconds."""
        if duration <= PATIENCE:
            return False
        self._longer.append(duration)
        return len(self._longer) >= SEVERAL and sum(self._longer) > LOST
