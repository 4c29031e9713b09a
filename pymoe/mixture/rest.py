"""Backends that do not answer in time, time and again, are left alone for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pymoe.mixture.slots import Member

DOUBLINGS = 6  # of the first rest, at most


class Rest:
    """When one backend is left alone. Of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_a_row = 0  # requests that were not answered in time
        self._last = 0.0  # when the last of them was given up

    def answered(self) -> None:
        """It has answered in time, if only with an error."""
        with self._lock:
            self._in_a_row = 0

    def given_up(self) -> None:
        with self._lock:
            self._in_a_row += 1
            self._last = time.monotonic()

    def left(self, after: int, seconds: float) -> float:
        """Seconds for which it is not to be asked; see :func:`awake`."""
        with self._lock:
            if self._in_a_row < after:
                return 0.0
            span = seconds * 2 ** min(self._in_a_row - after, DOUBLINGS)
            return max(0.0, self._last + span - time.monotonic())


def awake(members: Sequence[Member], after: int | None, seconds: float, at_least: int) -> Sequence[Member]:
    """Those of ``members`` that are asked.

    Args:
        members: all.
        after: a member rests that has not answered so many requests in a row in time; None: none rests.
        seconds: how long, at first; twice as long after each further request, up to 64 times.
        at_least: if fewer were awake, all are.
    """
    if after is None:
        return members
    found = [member for member in members if member.rest.left(after, seconds) == 0]
    return members if len(found) < max(at_least, 1) else found
