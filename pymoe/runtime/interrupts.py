"""Defers Ctrl-C while the main thread runs a batch that must be neither interrupted nor run twice."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from pymoe.runtime.timers import call_later

DELAY_S = 0.01  # seconds after the block until a deferred Ctrl-C is raised, so that the batch can return its results


class uninterrupted:
    """A context manager that defers Ctrl-C until shortly after its block.

    It has an effect only on the main thread, and only if SIGINT has a Python handler, as it does by default.

    The main thread may run a batch while it waits for the result of a request. If Ctrl-C interrupts the batch, the
    batch returns to its queue and is run again, because the interrupt is meant only for the waiting client. An update
    must be neither interrupted halfway nor made twice, so updates run in such a block. A second Ctrl-C during the block
    is not deferred, in case the block hangs.
    """

    # Not a generator with contextlib.contextmanager, which would take one microsecond longer for every batch.
    _handler: Any = None
    _pending = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._handler = signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._pending:
            interrupt_soon()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = not self._pending
        if not self._pending:
            self._handler(number, frame)


def interrupt_soon() -> None:
    """Send SIGINT (Ctrl-C) to this thread again, :data:`DELAY_S` seconds from now.

    A signal at once would interrupt the batch that this thread is running, and the batch would be run again.
    """
    thread = threading.get_ident()
    try:
        call_later(DELAY_S, signal.pthread_kill, thread, signal.SIGINT)
    except RuntimeError:  # no timer thread can be started: send the signal now
        signal.pthread_kill(thread, signal.SIGINT)
