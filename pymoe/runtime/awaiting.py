"""Implements ``await`` for the futures of requests.

A task that awaits a request waits for a *waiter*, a future of its event loop. When a batch ends, the thread that
completes it puts the waiters of its requests into a mailbox of the loop, without the GIL. Only for a waiter that finds
the mailbox empty does the thread call ``call_soon_threadsafe``, because one call per request would cost more than
everything else. The loop completes the waiters in the mailbox, and each task continues with the result of its request.
(A future that is a Python object makes a call of its own.)

If ``call_soon_threadsafe`` raises although the loop is open, it is called once more; if that call raises, too, the
waiters stay in the mailbox until the next waiter comes. Then it is called again.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from pymoe._runtime import Mailbox, RequestFuture
from pymoe.runtime.future import tell

_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()


def outcome(future: Any, seconds: float | None = None) -> Generator[Any, None, Any]:
    """Yield to the event loop until the request is done, and return its result: the iterator of ``await future``.

    The request is cancelled if the task is cancelled, or if the request is not done within ``seconds`` (None: no
    limit). ``future`` may be a native future of this process, or a Python object with the methods of
    ``concurrent.futures.Future``.

    Raises:
        TimeoutError: the request is not done within ``seconds``.
        Exception: any exception of the request.
    """
    if not future.done():
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, Mailbox.wake, waiter)
        try:
            _expect(future, loop, waiter)
            yield from waiter
        except asyncio.CancelledError:
            future.cancel()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if timer is not None and not future.done():
            future.cancel()
            raise TimeoutError("the request is not done in time")
    try:
        return future.result()
    finally:
        del future  # break a reference cycle: the traceback of the request's exception refers to this frame


def _expect(future: Any, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Any]) -> None:
    """Arrange that the loop completes ``waiter`` once ``future`` is done."""
    if not isinstance(future, RequestFuture):

        def wake(_: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed, so no task waits
                loop.call_soon_threadsafe(Mailbox.wake, waiter)

        return tell(future, wake)
    if (mailbox := _mailboxes.get(loop)) is None:
        mailbox = _mailboxes[loop] = Mailbox(functools.partial(_call_loop, weakref.ref(loop)))
    return mailbox.expect(future, waiter)


def _call_loop(loop_of: weakref.ref[asyncio.AbstractEventLoop], mailbox: Mailbox) -> None:
    """Make the loop complete the waiters in its mailbox. If the loop no longer exists or is closed, discard them.

    If the loop is open, any exception of ``call_soon_threadsafe`` is raised.
    """
    if (loop := loop_of()) is None:
        return mailbox.discard()
    try:
        loop.call_soon_threadsafe(mailbox.deliver)
    except Exception:
        if not loop.is_closed():
            raise
        mailbox.discard()
