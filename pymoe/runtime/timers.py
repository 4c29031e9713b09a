"""Functions that are called after a time: deadlines of requests, pauses between attempts, deferred interrupts.

All timers of a process share one daemon thread, which waits until the first of them is due. Before it calls that
timer's function, it has another thread wait for the rest, so a function may block, or wait for another timer, without
delaying any timer. A thread that has found nothing to do for a minute ends, unless no other thread waits for a timer.

Most deadlines are reset or cancelled long before they pass, so both cost little: they do not wake the waiting thread.
It sleeps until the earliest time that was set when it fell asleep, and only then looks at the timers that are left.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

IDLE_S = 60.0
"""Seconds without a timer after which a thread ends."""
NEVER = float("inf")

_changed = threading.Condition()  # guards the names below; reentrant, since the garbage collector may cancel a timer
_due: dict[TimerHandle, float] = {}  # when a function is to be called, on the monotonic clock
_watching: set[threading.Thread] = set()  # threads that wait for a timer, or were started or woken to do so
_wakes = NEVER  # latest time at which a waiting thread wakes up


def deadline_after(timeout: float | None) -> float | None:
    """Return the time ``timeout`` seconds from now, on the monotonic clock; None: never."""
    return None if timeout is None else time.monotonic() + timeout


def seconds_left(deadline: float | None) -> float | None:
    """Return the seconds from now to ``deadline``, at least 0; None: for ever."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class TimerHandle:
    """Calls a function once at a given time, on a thread of timers. Thread-safe.

    Each :meth:`reset` sets a time at which the function is called once. :meth:`cancel`, and another :meth:`reset`, undo
    this unless the call has begun; both return whether they undid one. A timer may be reset while its function runs; if
    the timer is due again before the function has returned, two threads run the function. Exceptions of the function go
    to ``threading.excepthook``.
    """

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def reset(self, seconds: float) -> bool:
        """Call the function ``seconds`` from now.

        Returns:
            True if this replaces a time that had been set, so the function is not called then; False if no time was
            set or the call for it has begun.

        Raises:
            RuntimeError: no thread waits for timers, and none can be started. The timer is not set.
        """
        due = time.monotonic() + seconds
        with _changed:
            replaces = self in _due
            _due[self] = due
            if due < _wakes:
                try:
                    _let_a_thread_look()
                except BaseException:
                    _due.pop(self, None)
                    raise
            return replaces

    def cancel(self) -> bool:
        """Do not call the function; return False if no time was set or the call for it has begun."""
        with _changed:
            return _due.pop(self, None) is not None

    def _call(self) -> None:
        try:
            self._function(*self._arguments)
        except BaseException:
            try:
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            except BaseException:  # raised by the program's threading.excepthook
                sys.__excepthook__(*sys.exc_info())


def call_later(seconds: float, function: Callable[..., Any], *arguments: Any) -> TimerHandle:
    """Return a timer that calls ``function(*arguments)`` ``seconds`` from now; raises as :meth:`TimerHandle.reset`."""
    timer = TimerHandle(function, *arguments)
    timer.reset(seconds)
    return timer


def call_soon(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function on a thread of timers, where it may block; in this thread if no thread can be started."""
    try:
        call_later(0.0, function, *arguments)
    except RuntimeError:
        function(*arguments)


def _let_a_thread_look() -> None:
    """Wake a waiting thread, or start one, to look at the timers. The caller must hold the lock."""
    if _watching:
        _changed.notify()
        return
    thread = threading.Thread(target=_run, name="pymoe-timers", daemon=True)
    try:
        _watching.add(thread)
        thread.start()
    except BaseException:  # after Ctrl-C, the thread may run nevertheless: then there is one too many
        _watching.discard(thread)
        raise


def _run() -> None:
    while (timer := _next()) is not None:
        timer._call()
        del timer  # do not keep it, and what its function references, until the next timer is due


def _next() -> TimerHandle | None:
    """Wait until a timer is due, and remove and return it; return None if this thread should end."""
    global _wakes
    thread, begun = threading.current_thread(), time.monotonic()
    with _changed:
        _watching.add(thread)
        while True:
            now = time.monotonic()
            # A finaliser may cancel timers between any two statements.
            timer = min(_due, key=_due.__getitem__, default=None)
            first = NEVER if timer is None else _due.get(timer, NEVER)
            if timer is not None and first <= now and _due.pop(timer, None) is not None:
                break
            timer = None  # not kept while this thread waits
            if now < begun + IDLE_S:
                _wakes = min(first, begun + IDLE_S)
            elif first == NEVER or len(_watching) > 1:
                break
            else:
                _wakes = first
            _changed.wait(min(_wakes - now, threading.TIMEOUT_MAX))
            _wakes = NEVER
        _watching.discard(thread)
        if _due:
            with suppress(RuntimeError):  # no thread can be started: this one looks again after the call
                _let_a_thread_look()
        return timer


def _leave_to_parent() -> None:
    """Forget the timers in a fork, in which their threads do not run."""
    global _changed, _wakes
    _changed, _wakes = threading.Condition(), NEVER
    _watching.clear()
    _due.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
