"""The thread whose event loop carries the servers of this process: gRPC's asyncio side wants one loop for all of
them.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_process = 0


def check_process() -> None:
    """Raise RuntimeError in a fork of a process that has served: gRPC's threads are there, and a server here would wait
    for them for ever.
    """
    if _loop is not None and _process != os.getpid():
        raise RuntimeError(
            "ExpertServer: gRPC cannot serve in a fork of a process that has served experts: fork before the parent "
            "starts its server, or start a process of its own (subprocess, or multiprocessing's 'spawn')"
        )


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs from the first call to the end of the process. Raises what check_process() does."""
    global _loop, _process
    check_process()
    with _lock:
        if _loop is None:
            _loop, _process = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="pymoe-remote", daemon=True).start()
        return _loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the loop, and return its result to this thread.

    An interrupt (Ctrl-C) of the wait cancels the coroutine.
    """
    try:
        loop = event_loop()
    except RuntimeError:
        coroutine.close()
        raise
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Return ``function(*arguments)``, called on a thread of its own.

    One that never returns holds up neither the calls of others, as it would in an executor of a few threads, nor the
    end of the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():  # nobody waits any more
            set_outcome(outcome)

    def call() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            loop.call_soon_threadsafe(settle, done.set_exception, error)
        else:
            loop.call_soon_threadsafe(settle, done.set_result, result)

    threading.Thread(target=call, name="pymoe-remote-call", daemon=True).start()
    return await done
