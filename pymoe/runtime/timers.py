"""Timers, which call a function at a given time: for deadlines, pauses between attempts and deferred interrupts.

One daemon thread of the process waits until the first timer is due. Before the thread calls this timer's function, it
wakes or starts another thread if other timers are set; that thread waits for the next one. So a function may block, or
wait for another timer, without delaying any timer. A waiting thread that has called no function for a minute ends,
unless timers are set and no other thread waits for them.

Most timers are reset or cancelled long before they are due, and this costs little: ``cancel`` never wakes the waiting
thread, and ``reset`` wakes it only if the new time is before the thread's next wake-up. The thread may then wake up for
a timer that is no longer due at that time; it looks for the first timer again.
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
"""Seconds after which a waiting thread ends if it has called no function."""
NEVER = float("inf")

# Guards the variables below. Reentrant, because the garbage collector may cancel a timer at any time.
_changed = threading.Condition()
_due: dict[TimerHandle, float] = {}  # the time of every timer that is set, on the monotonic clock
_watching: set[threading.Thread] = set()  # the threads that wait for a timer, or are about to
_wakes = NEVER  # the time at which a waiting thread wakes up by itself; NEVER if none waits


def deadline_after(timeout: float | None) -> float | None:
    """Return the time ``timeout`` seconds from now on the monotonic clock; return None for None (no limit)."""
    return None if timeout is None else time.monotonic() + timeout


def seconds_left(deadline: float | None) -> float | None:
    """Return the seconds from now to ``deadline``, at least 0; return None for None (no limit)."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class TimerHandle:
    """Calls a function at a given time, on a timer thread. Thread-safe.

    :meth:`reset` sets the time of the next call. Until the call begins, another :meth:`reset` replaces the time, and
    :meth:`cancel` removes it. A timer may be reset while its function runs; if the new call is due before the function
    returns, two threads run the function at the same time. Exceptions of the function are passed to
    ``threading.excepthook``.
    """

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def reset(self, seconds: float) -> bool:
        """Set the timer to call the function ``seconds`` from now, instead of at any time that was set before.

        Returns:
            True if the timer was set before and that call had not begun; False otherwise.

        Raises:
            RuntimeError: no thread waits for timers, and none can be started. The timer is no longer set.
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
        """Stop the timer. Return False if it was not set, or its call has begun (and continues)."""
        with _changed:
            return _due.pop(self, None) is not None

    def _call(self) -> None:
        try:
            self._function(*self._arguments)
        except BaseException:
            try:
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            except BaseException:  # the program has replaced threading.excepthook, and its function raised
                sys.__excepthook__(*sys.exc_info())


def call_later(seconds: float, function: Callable[..., Any], *arguments: Any) -> TimerHandle:
    """Set a new timer that calls ``function(*arguments)`` ``seconds`` from now, and return it.

    Raises:
        RuntimeError: see :meth:`TimerHandle.reset`.
    """
    timer = TimerHandle(function, *arguments)
    timer.reset(seconds)
    return timer


def call_soon(function: Callable[..., Any], *arguments: Any) -> None:
    """Call ``function(*arguments)`` at once on a timer thread, or on this thread if no timer thread can be started."""
    try:
        call_later(0.0, function, *arguments)
    except RuntimeError:
        function(*arguments)


def _let_a_thread_look() -> None:
    """Make a thread look for the first timer: wake a waiting thread, or start one. Call this under ``_changed``."""
    if _watching:
        _changed.notify()
        return
    thread = threading.Thread(target=_run, name="pymoe-timers", daemon=True)
    try:
        _watching.add(thread)
        thread.start()
    except BaseException:  # after Ctrl-C, the thread may have started all the same, which does no harm
        _watching.discard(thread)
        raise


def _run() -> None:
    while (timer := _next()) is not None:
        timer._call()
        del timer  # do not keep the function's objects alive until the next timer is due


def _next() -> TimerHandle | None:
    """Wait until a timer is due, then remove it from ``_due`` and return it; return None if this thread is to end."""
    global _wakes
    thread, begun = threading.current_thread(), time.monotonic()
    with _changed:
        _watching.add(thread)
        while True:
            now = time.monotonic()
            # A finaliser may cancel timers between any two statements, so _due is read with defaults.
            timer = min(_due, key=_due.__getitem__, default=None)
            first = NEVER if timer is None else _due.get(timer, NEVER)
            if timer is not None and first <= now and _due.pop(timer, None) is not None:
                break
            timer = None  # do not keep the timer alive while this thread waits
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
            with suppress(RuntimeError):  # no thread can be started: this thread looks for the next timer later
                _let_a_thread_look()
        return timer


def _leave_to_parent() -> None:
    """Forget all timers in a forked child: the threads that would call their functions exist only in the parent."""
    global _changed, _wakes
    _changed, _wakes = threading.Condition(), NEVER
    _watching.clear()
    _due.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
