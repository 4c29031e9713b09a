"""Futures of requests, and functions that wait for several of them.

A request has only one future. If several tasks await it and one of them is cancelled, the request is cancelled for all
of them. To prevent that, await ``asyncio.shield(asyncio.ensure_future(future))``.

``concurrent.futures.wait`` and ``as_completed`` accept these futures as well, but create a lock for each. :func:`wait`
and :func:`as_completed` cost less, and also accept the futures of any executor.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION
from contextlib import suppress
from typing import Any, NamedTuple

from pymoe._runtime import RequestFuture as Future
from pymoe.runtime.timers import deadline_after, seconds_left

__all__ = ["Future", "as_completed", "wait"]


def tell(future: Any, function: Callable[[Any], Any]) -> None:
    """Call ``function(future)`` on the thread that completes the future, or at once if the future is done already.

    The call must not block.
    """
    getattr(future, "_tell", future.add_done_callback)(function)


class Standard:
    """The attributes of a native future that only ``concurrent.futures.wait`` and ``as_completed`` need.

    A future creates this object at the first access to its ``_condition``, ``_waiters`` or ``_state``. Those functions
    read the state and add their waiters under the condition. The end of the request is recorded and announced to the
    waiters under the same condition, so no waiter misses it.
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


class DoneAndNotDone(NamedTuple):
    """The result of :func:`wait`."""

    done: set[Any]
    not_done: set[Any]


def wait(futures: Iterable[Any], timeout: float | None = None, return_when: str = ALL_COMPLETED) -> DoneAndNotDone:
    """Wait for several requests, like ``concurrent.futures.wait``.

    A thread that waits here never runs a batch itself. A thread in ``result()`` may, so the function of a pool should
    wait for other requests with ``result()``.

    Args:
        futures: futures of requests; duplicates count once.
        timeout: the maximum number of seconds to wait; None: no limit. Running out of time is not an error.
        return_when: ``FIRST_COMPLETED``, ``FIRST_EXCEPTION`` or ``ALL_COMPLETED`` of ``concurrent.futures``.

    Returns:
        Two sets, ``done`` (cancelled ones too) and ``not_done``.

    Raises:
        ValueError: ``return_when`` is none of these constants.
    """
    if return_when not in (FIRST_COMPLETED, FIRST_EXCEPTION, ALL_COMPLETED):
        raise ValueError(f"wait: return_when must be a constant of concurrent.futures, got {return_when!r}")
    everyone = set(futures)
    try:
        # Not TimeoutError, which a signal handler may raise as well.
        for future in arrivals(everyone, deadline_after(timeout), late=queue.Empty):
            failed = not future.cancelled() and future.exception() is not None
            if return_when == FIRST_COMPLETED or (return_when == FIRST_EXCEPTION and failed):
                break
    except queue.Empty:
        pass
    done = {future for future in everyone if future.done()}
    return DoneAndNotDone(done, everyone - done)


def as_completed(futures: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
    """Yield the futures in the order in which they end, each once, like ``concurrent.futures.as_completed``.

    Futures that are done when the iteration begins come first, in any order. The iterator keeps no reference to a
    future that it has yielded, so that its result can be freed.

    Args:
        futures: futures of requests.
        timeout: seconds from this call within which all must have ended; None: no limit.

    Raises:
        TimeoutError: not all futures were done at the timeout. The iterator raises this, not the call.
    """
    return arrivals(set(futures), deadline_after(timeout))


def arrivals(futures: set[Any], deadline: float | None, late: type[Exception] = TimeoutError) -> Iterator[Any]:
    """Yield each future once it is done. Raise ``late`` if some are not done at the deadline.

    When the iterator ends, even early, its callbacks are removed from the futures that it has not yielded.
    """
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    count = len(futures)
    put = ended.put  # _forget() must be given the same object as tell()
    pending = set(futures)
    del futures

    def take() -> Any:
        future = ended.get(timeout=seconds_left(deadline))
        pending.discard(future)
        return future

    try:
        for future in tuple(pending):
            tell(future, put)
        future = None
        for missing in range(count, 0, -1):
            try:
                yield take()  # a local variable would keep the yielded future alive
            except queue.Empty:
                raise late(f"{missing} of {count} requests are not done in time") from None
    finally:
        for future in pending:
            _forget(future, put)


def _forget(future: Any, callback: Any) -> None:
    """Remove a callback that was added with :func:`tell`, unless the future is done."""
    if isinstance(future, concurrent.futures.Future) and not isinstance(future, Future):
        own = vars(future)
        with own["_condition"]:  # the thread that completes the future also takes this lock
            if not future.done():
                with suppress(ValueError):
                    own["_done_callbacks"].remove(callback)
    elif remove := getattr(future, "remove_done_callback", None):
        remove(callback)
