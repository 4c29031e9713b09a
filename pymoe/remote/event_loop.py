"""The thread whose event loop carries the servers of this process: gRPC's asyncio side wants one loop for all of
them.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_process = 0


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs from the first call to the end of the process. A fork has one of its own."""
    global _loop, _process
    with _lock:
        if _loop is None or _process != os.getpid():
            _loop, _process = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="pymoe-remote", daemon=True).start()
        return _loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the loop, and return its result to this thread.

    An interrupt (Ctrl-C) of the wait cancels the coroutine.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
