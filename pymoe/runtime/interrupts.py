"""Ctrl-C on the main thread while it runs a batch that must not be left in the middle, nor run twice."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

DELAY_S = 0.01  # from the end of a block to the Ctrl-C that it put off: its batch hands out its results in that time


class uninterrupted:
    """A block that puts Ctrl-C off until shortly after it. On other threads than the main one it does nothing.

    A client that waits on the main thread may be running everybody's batch. An interrupt belongs to that client and not
    to the batch, which is put back into its queue then and runs once more; an update that is under way must be neither
    left half done nor made twice. A second Ctrl-C does not wait: the block may hang.
    """

    # A class, since every batch enters one: a generator would cost a microsecond more.
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
    """Have Ctrl-C come to this thread again, when the batch that it runs has handed out its results.

    Not at once, where it would end the batch like an error of its own.
    """
    later = threading.Timer(DELAY_S, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    later.daemon = True
    later.start()
