"""Ctrl-C on the main thread while it runs a batch that must not be left in the middle, nor run twice."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class uninterrupted:
    """``with uninterrupted():`` puts Ctrl-C off until shortly after the block. On other threads it does nothing.

    A client that waits on the main thread may be running everybody's batch. An interrupt belongs to that client and not
    to the batch, which is put back into its queue then and runs once more; an update that is under way must be neither
    left half done nor made twice. A second Ctrl-C does not wait: the block may hang.
    """

    def __enter__(self) -> None:
        self._handler: Any = None
        self._frame: Any = None
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._handler = signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._frame is not None:
            # Not here, where it would end the batch like an error of its own, but when that has handed out results.
            main = threading.main_thread().ident
            assert main is not None
            later = threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT))
            later.daemon = True
            later.start()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._frame is not None:
            self._frame = None
            self._handler(number, frame)
            return
        self._frame = frame or True
