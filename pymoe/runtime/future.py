"""Futures of requests, and how coroutines await them.

A request has one future: when one of several tasks that await it is cancelled, it is cancelled for all of them (await
``asyncio.shield(asyncio.ensure_future(...))`` of it where that must not be).
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

from pymoe import _runtime
from pymoe._runtime import RequestFuture as Future

__all__ = ["Future"]

# What tells a loop that requests are done: one call for all that a batch completes.
mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _runtime.Mailbox] = weakref.WeakKeyDictionary()


def deadline_after(timeout: float | None) -> float | None:
    """When ``timeout`` seconds from now are over, on the monotonic clock; None: never."""
    return None if timeout is None else time.monotonic() + timeout


def seconds_left(deadline: float | None) -> float | None:
    """From now to ``deadline``, at least 0; None: for ever."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def wait_in_loop(future: Future, deadline: float | None = None) -> Generator[Any, None, Any]:
    """What ``await future`` runs. TimeoutError if it is not done by the ``deadline``; then it is cancelled."""
    if not future.done():
        loop = asyncio.get_running_loop()
        mailbox = mailboxes.get(loop)
        if mailbox is None:
            mailbox = mailboxes[loop] = _runtime.make_mailbox(loop)
        waiter = loop.create_future()
        future._notify(mailbox, waiter)
        left = seconds_left(deadline)
        timer = None if left is None else loop.call_later(left, give_up, waiter)
        try:
            yield from waiter
        except asyncio.CancelledError:
            future.cancel()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if deadline is not None and not future.done():
            future.cancel()
            raise TimeoutError("the request is not done in time")
    return future.result()


def give_up(waiter: asyncio.Future[Any]) -> None:
    """Wake whoever waits, though nothing has come."""
    if not waiter.done():
        waiter.set_result(None)


class Standard:
    """What ``wait`` and ``as_completed`` of ``concurrent.futures`` look at in a future, made when they first do.

    They ask for the state and leave their waiters under the condition, so the state is that which waiters were told.
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


_runtime.set_await(wait_in_loop)
_runtime.set_standard(Standard)
