"""Functions that are called after a time: deadlines of requests, pauses between attempts, deferred interrupts.

All timers of a process share one daemon thread, which starts with the first timer and ends when none has been set for
a minute. Most deadlines are reset or cancelled long before they pass, so both cost little: the thread sleeps until the
earliest time that it has seen, and looks at the timers that are left only then.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

IDLE_S = 60.0
"""Seconds without a timer after which the thread ends."""
NEVER = float("inf")

_changed = threading.Condition()
_due: dict[TimerHandle, float] = {}  # on the monotonic clock
_wakes = -NEVER  # when the thread looks next
_thread: threading.Thread | None = None


class TimerHandle:
    """Calls a function once when its time has come, on the thread of all timers. Thread-safe.

    The function must not block. An exception that it raises goes to ``threading.excepthook``.
    """

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def reset(self, seconds: float) -> None:
        """Call the function ``seconds`` from now, and not at the time that was set before."""
        global _thread
        due = time.monotonic() + seconds
        with _changed:
            _due[self] = due
            if _thread is None:
                _thread = threading.Thread(target=_run, name="pymoe-timers", daemon=True)
                _thread.start()
            elif due < _wakes:
                _changed.notify()

    def cancel(self) -> None:
        """Do not call the function, unless it has begun."""
        with _changed:
            _due.pop(self, None)

    def _call(self) -> None:
        try:
            self._function(*self._arguments)
        except BaseException:
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def call_later(seconds: float, function: Callable[..., Any], *arguments: Any) -> TimerHandle:
    """Return a timer that calls ``function(*arguments)`` ``seconds`` from now."""
    timer = TimerHandle(function, *arguments)
    timer.reset(seconds)
    return timer


def _run() -> None:
    global _thread, _wakes
    idle_since = time.monotonic()
    while True:
        with _changed:
            now = time.monotonic()
            over = [timer for timer, due in _due.items() if due <= now]
            for timer in over:
                del _due[timer]
            if not over:
                idle_since = now if _due else idle_since
                if now >= idle_since + IDLE_S:
                    _thread = None
                    return
                _wakes = min(_due.values(), default=idle_since + IDLE_S)
                _changed.wait(min(_wakes - now, threading.TIMEOUT_MAX))
                _wakes = -NEVER
        for timer in over:
            timer._call()


def _leave_to_parent() -> None:
    """Forget the timers in a fork, in which their thread does not run."""
    global _changed, _thread
    _changed, _thread = threading.Condition(), None
    _due.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
