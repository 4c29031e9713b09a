"""Futures of requests, and waiting for many of them: the first, all, or each as it ends.

A request has only one future: if one of several tasks that await it is cancelled, the request is cancelled for all of
them (to prevent that, await ``asyncio.shield(asyncio.ensure_future(future))``).

``concurrent.futures.wait`` and ``as_completed`` accept these futures as well, with a lock for each; :func:`wait` and
:func:`as_completed` accept the futures of any executor, at a lower cost.
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
    """Call ``function(future)`` once the future is done, on the thread that completes the future. ``function`` must not
    block.
    """
    getattr(future, "_tell", future.add_done_callback)(function)


class Standard:
    """The part of a future that ``concurrent.futures.wait`` and ``as_completed`` use, created on first use.

    Both functions read the state and add their waiters under the condition, so the state agrees with what waiters are
    told. The native future creates this object at the first access to ``_condition``, ``_waiters`` or ``_state``.
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
    """Wait as ``concurrent.futures.wait`` does.

    A thread that waits here runs no batch itself, while one in ``result()`` may: a function of a pool that waits for
    requests should call ``result()``.

    Args:
        futures: futures of requests; duplicates count once.
        timeout: the maximum number of seconds to wait; None: no limit. Running out of time is not an error.
        return_when: ``FIRST_COMPLETED``, ``FIRST_EXCEPTION`` or ``ALL_COMPLETED`` of ``concurrent.futures``.

    Returns:
        Two sets, ``done`` (cancelled ones too) and ``not_done``.

    Raises:
        ValueError: ``return_when`` is not one of these.
    """
    if return_when not in (FIRST_COMPLETED, FIRST_EXCEPTION, ALL_COMPLETED):
        raise ValueError(f"wait: return_when must be a constant of concurrent.futures, got {return_when!r}")
    everyone = set(futures)
    try:
        for future in arrivals(everyone, deadline_after(timeout), late=queue.Empty):  # no signal handler raises Empty
            failed = not future.cancelled() and future.exception() is not None
            if return_when == FIRST_COMPLETED or (return_when == FIRST_EXCEPTION and failed):
                break
    except queue.Empty:
        pass
    done = {future for future in everyone if future.done()}
    return DoneAndNotDone(done, everyone - done)


def as_completed(futures: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
    """Yield the futures in the order in which they end, each once, as ``concurrent.futures.as_completed`` does.

    Futures that were yielded are not kept: a result without another reference is freed before the next one comes.

    Args:
        futures: futures of requests.
        timeout: seconds from this call within which all must have ended; None: no limit.

    Raises:
        TimeoutError: from the iterator, when the time is over.
    """
    return arrivals(set(futures), deadline_after(timeout))


def arrivals(futures: set[Any], deadline: float | None, late: type[Exception] = TimeoutError) -> Iterator[Any]:
    """Yield each future once it is done. Raise ``late`` if the deadline has passed and no further future is done.

    Futures that have not been yielded forget this wait when it ends, however it ends.
    """
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    count = len(futures)
    put = ended.put  # one bound method object, so that _forget() finds it
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
                yield take()  # without a variable, which would keep the future alive
            except queue.Empty:
                raise late(f"{missing} of {count} requests are not done in time") from None
    finally:
        for future in pending:
            _forget(future, put)


def _forget(future: Any, callback: Any) -> None:
    """Remove a callback of ``add_done_callback``, unless the future is done and has dropped it already."""
    if isinstance(future, concurrent.futures.Future) and not isinstance(future, Future):
        own = vars(future)
        with own["_condition"]:  # completing takes this lock: no other thread uses the callbacks
            if not future.done():
                with suppress(ValueError):
                    own["_done_callbacks"].remove(callback)
    elif remove := getattr(future, "remove_done_callback", None):
        remove(callback)
