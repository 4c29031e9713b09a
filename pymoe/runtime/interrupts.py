"""Defers Ctrl-C on the main thread while it runs a batch that must be neither interrupted nor run twice."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from pymoe.runtime.timers import call_later

DELAY_S = 0.01  # time from the end of a block to its deferred Ctrl-C, in which the batch returns its results


class uninterrupted:
    """A context manager that defers Ctrl-C until shortly after its end. It has an effect only on the main thread.

    A client that waits on the main thread may be running a batch for other clients, too. An interrupt concerns that
    client and not the batch: the batch returns to its queue and runs once more. So an update that is under way must be
    neither left half done nor made twice. A second Ctrl-C is not deferred: the block may hang.
    """

    # A class and not a generator function, which would cost every batch one microsecond more.
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
    """Raise Ctrl-C in this thread again, after the batch that it runs has returned its results.

    If it were raised immediately, it would end the batch like an error of the batch itself.
    """
    thread = threading.get_ident()
    try:
        call_later(DELAY_S, signal.pthread_kill, thread, signal.SIGINT)
    except RuntimeError:  # no thread can be started
        signal.pthread_kill(thread, signal.SIGINT)
