"""Waiting lines for pools: requests of coroutines and mixtures wait there for room, without blocking a thread each."""

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
    """The place of a request in the line for a full pool; a future whose result is the future of the request.

    The place is done as soon as the request has been submitted, its submission has failed, or it has left the line.
    """

    def __init__(self, line: RoomLine, timeout: float | None) -> None:
        super().__init__()
        self._line, self._timeout = line, timeout

    def leave(self) -> bool:
        """Leave the line, so that the request is never submitted.

        Return False if the request has left the line already: it was submitted, submitting it failed, or this was
        called before.
        """
        left = self._line._leave(self)
        if left:
            super().cancel()
            self.set_running_or_notify_cancel()  # wakes the threads that wait for this place
        return left

    def cancel(self) -> bool:
        """Leave the line, or cancel the request if it has been submitted.

        Return False if the request was submitted, or submitting it failed; True otherwise.
        """
        if not self.leave():
            self.add_done_callback(_cancel_request)
        return self.cancelled()

    def wait(self, seconds: float) -> Any:
        """Block until the request is submitted, and return its future.

        After ``seconds`` without room, leave the line and return None. Raise any exception of the submission.
        """
        try:
            concurrent.futures.wait([self], seconds)
            return None if self.leave() else self.result()
        except BaseException:
            self.cancel()
            raise

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in an event loop until the request is submitted, and return its future.

        If the task is cancelled, the request leaves the line.

        Raises:
            TimeoutError: there was no room within the timeout. The request has left the line.
            Exception: any exception of the submission.
        """
        return outcome(self, self._timeout)


def _cancel_request(place: concurrent.futures.Future[Any]) -> None:
    if not place.cancelled() and place.exception() is None:
        place.result().cancel()


class RoomLine:
    """The line of the requests that wait for room in one pool: first come, first served. Thread-safe.

    A daemon thread submits the requests in turn. It starts when a request joins and no thread runs, and ends once no
    request is left and the pool has room or is closed.

    Args:
        wait_for_room: blocks until the pool has room, and raises RuntimeError if the pool is closed. When it returns,
            another client may already have taken the room. The function must not keep a strong reference to the pool,
            so that the pool can be collected while the thread waits.
    """

    def __init__(self, wait_for_room: Callable[[], object]) -> None:
        self._wait_for_room = wait_for_room
        self._lock = threading.RLock()  # reentrant, because a finaliser or a signal handler may use the line
        self._waiting: OrderedDict[Place, Callable[[], Any]] = OrderedDict()
        self._thread: threading.Thread | None = None

    def join(self, submit: Callable[[], Any], timeout: float | None = None) -> Place:
        """Add a request to the line, and return its place.

        Args:
            submit: submits the request without blocking and returns its future, or None if there is no room. It is not
                called again after :meth:`Place.leave`.
            timeout: the maximum number of seconds for which ``await`` of the place waits; None: no limit.

        Raises:
            RuntimeError: the thread that submits requests cannot be started. The request was not added.
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
            with suppress(RuntimeError):  # the pool was closed: the next submit() raises this error for its request
                self._wait_for_room()

    def _submit_all(self) -> bool:
        """Submit the requests in turn; return True if there is no room for the next, False if no request is left."""
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
                    error = raised.with_traceback(None)  # the traceback would keep the request's tensors alive
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
    future = pool._try_submit(*tensors, timeout=timeout, priority=priority)  # raises if the arguments are invalid
    if future is not None:
        return future
    deadline = deadline_after(timeout)

    def submit() -> Any:
        return pool._try_submit(*tensors, timeout=seconds_left(deadline), priority=priority)

    try:
        return await pool._line.join(submit, timeout)
    except TimeoutError:
        raise TimeoutError(f"{pool.name}: there was no room for the request in time") from None
