"""Ctrl-C on the main thread while it runs a batch that must not be left in the middle, nor run twice."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from types import FrameType
from typing import Any

DELAY_S = 0.01  # from the end of a block to the Ctrl-C that it put off: its batch hands out its results in that time

_NOTHING = nullcontext()


def uninterrupted() -> AbstractContextManager[None]:
    """Put Ctrl-C off until shortly after the block. On other threads than the main one this does nothing.

    A client that waits on the main thread may be running everybody's batch. An interrupt belongs to that client and not
    to the batch, which is put back into its queue then and runs once more; an update that is under way must be neither
    left half done nor made twice. A second Ctrl-C does not wait: the block may hang.
    """
    if get_ident() != threading.main_thread().ident:  # every batch of a worker asks
        return _NOTHING
    handler = signal.getsignal(signal.SIGINT)
    return _puts_off(handler) if callable(handler) else _NOTHING


@contextmanager
def _puts_off(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
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
            later = threading.Timer(DELAY_S, signal.pthread_kill, (get_ident(), signal.SIGINT))
            later.daemon = True
            later.start()
