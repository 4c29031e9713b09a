"""Ctrl-C on the main thread while it runs a batch that must not be left in the middle, nor run twice."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

DELAY_S = 0.01  # from the end of a block to the Ctrl-C that it put off: its batch hands out its results in that time


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off until shortly after the block. On other threads than the main one this does nothing.

    A client that waits on the main thread may be running everybody's batch. An interrupt belongs to that client and not
    to the batch, which is put back into its queue then and runs once more; an update that is under way must be neither
    left half done nor made twice. A second Ctrl-C does not wait: the block may hang.
    """
    main, handler = threading.main_thread(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not main or not callable(handler):
        yield
        return
    pending = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        pending = not pending
        if not pending:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            # Not here, where it would end the batch like an error of its own, but when that has handed out results.
            assert main.ident is not None
            later = threading.Timer(DELAY_S, signal.pthread_kill, (main.ident, signal.SIGINT))
            later.daemon = True
            later.start()
