"""A line in which requests of coroutines and mixtures wait for room in a full pool, without blocking a thread."""

from __future__ import annotations

import concurrent.futures
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

from pymoe.runtime.awaiting import outcome
from pymoe.runtime.timers import deadline_after, seconds_left


class Place(concurrent.futures.Future):
    """A place in the line for a full pool. Its result is the request's future, once the request has been submitted."""

    def __init__(self, line: RoomLine, timeout: float | None) -> None:
        super().__init__()
        self._line, self._timeout = line, timeout

    def leave(self) -> bool:
        """Give up the place in the line, so that the request is never submitted.

        Return False if the request has been submitted already, or submitting it has failed.
        """
        left = self._line._leave(self)
        if left:
            super().cancel()
            self.set_running_or_notify_cancel()  # this wakes the threads that wait for a cancelled future
        return left

    def cancel(self) -> bool:
        """Leave the line, or cancel the request if it has been submitted."""
        if not self.leave():
            self.add_done_callback(_cancel_request)
        return self.cancelled()

    def wait(self, seconds: float) -> Any:
        """Wait in this thread; return the future of the request, or None if there was no room within ``seconds``."""
        try:
            concurrent.futures.wait([self], seconds)
            return None if self.leave() else self.result()
        except BaseException:
            self.cancel()
            raise

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in an event loop. Cancelling the task, and running out of time, cancel the place."""
        return outcome(self, self._timeout)


def _cancel_request(place: concurrent.futures.Future[Any]) -> None:
    if not place.cancelled() and place.exception() is None:
        place.result().cancel()


class RoomLine:
    """The line of requests for one pool: first come, first served. Thread-safe.

    A daemon thread submits the requests in turn. It starts when the first one joins, and ends when there is room and no
    request waits, or when the pool has been closed.

    Args:
        wait_for_room: returns once the pool has room, which another client may take, and raises RuntimeError if the
            pool is closed. It must not keep the pool alive, which may be dropped while the thread waits.
    """

    def __init__(self, wait_for_room: Callable[[], object]) -> None:
        self._wait_for_room = wait_for_room
        self._lock = threading.RLock()  # reentrant: a finaliser or a signal handler may use the line, too
        self._waiting: OrderedDict[Place, Callable[[], Any]] = OrderedDict()
        self._thread: threading.Thread | None = None

    def join(self, submit: Callable[[], Any], timeout: float | None = None) -> Place:
        """Return a place in the line.

        Args:
            submit: submits the request without blocking and returns its future, or None if there is no room. It is not
                called again after :meth:`Place.leave`.
            timeout: the maximum number of seconds that ``await`` waits; None: no limit.

        Raises:
            RuntimeError: the thread cannot be started. The request is not in the line.
        """
        place = Place(self, timeout)
        with self._lock:
            self._waiting[place] = submit
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pymoe-room", daemon=True)
                try:
                    thread.start()
                except BaseException:
                    del self._waiting[place]
                    raise
                self._thread = thread
        return place

    def _leave(self, place: Place) -> bool:
        with self._lock:
            return self._waiting.pop(place, None) is not None

    def _run(self) -> None:
        while self._submit_all():
            with suppress(RuntimeError):  # the pool was closed, as the next request will find out
                self._wait_for_room()

    def _submit_all(self) -> bool:
        """Submit the requests in turn while there is room; return whether any are left."""
        while True:
            error = future = None
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return False
                place, submit = self._waiting.popitem(last=False)
                try:
                    future = submit()
                except BaseException as raised:
                    error = raised.with_traceback(None)  # the traceback would keep the tensors alive
                if future is None and error is None:
                    self._waiting[place] = submit
                    self._waiting.move_to_end(place, last=False)
                    return True
            del submit
            if error is not None:
                place.set_exception(error)
            else:
                place.set_result(future)
            del place


async def submit_when_there_is_room(pool: Any, tensors: Sequence[Any], timeout: float | None, priority: float) -> Any:
    """Submit a request to a pool and return its future, without blocking the event loop while the pool is full.

    Raises:
        TimeoutError: there was no room within ``timeout`` seconds.
        Exception: any exception of the pool.
    """
    future = pool._try_submit(*tensors, timeout=timeout, priority=priority)  # this checks the arguments
    if future is not None:
        return future
    deadline = deadline_after(timeout)

    def submit() -> Any:
        return pool._try_submit(*tensors, timeout=seconds_left(deadline), priority=priority)

    try:
        return await pool._line.join(submit, timeout)
    except TimeoutError:
        raise TimeoutError(f"{pool.name}: there was no room for the request in time") from None
