"""Futures of requests.

A request has one future: when one of several tasks that await it is cancelled, it is cancelled for all of them (await
``asyncio.shield(asyncio.ensure_future(...))`` of it where that must not be).
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

from pymoe._runtime import RequestFuture as Future

__all__ = ["Future"]


def deadline_after(timeout: float | None) -> float | None:
    """When ``timeout`` seconds from now are over, on the monotonic clock; None: never."""
    return None if timeout is None else time.monotonic() + timeout


def seconds_left(deadline: float | None) -> float | None:
    """From now to ``deadline``, at least 0; None: for ever."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class Standard:
    """What ``wait`` and ``as_completed`` of ``concurrent.futures`` look at in a future, made when they first do.

    They ask for the state and leave their waiters under the condition, so the state is that which waiters were told.
    The native future makes one when it is first asked for ``_condition``, ``_waiters`` or ``_state``.
    """

    def __init__(self, future: Future) -> None:
        self.condition = threading.Condition()
        self.waiters: list[Any] = []
        self.told = False
        self._future = weakref.ref(future)
        future.add_done_callback(self._tell)

    @property
    def state(self) -> str:
        if self.told:
            return "CANCELLED_AND_NOTIFIED" if (future := self._future()) and future.cancelled() else "FINISHED"
        return "RUNNING" if (future := self._future()) and future.running() else "PENDING"

    def _tell(self, future: Future) -> None:
        with self.condition:
            self.told = True
            for waiter in self.waiters:
                if future.cancelled():
                    waiter.add_cancelled(future)
                elif future.exception() is not None:
                    waiter.add_exception(future)
                else:
                    waiter.add_result(future)
            self.condition.notify_all()
