"""Implements ``await`` for the futures of requests.

With ``await`` the task sleeps on a waiter, a future of the loop. When the batch ends, the thread that completes it puts
the waiters of its requests into the loop's mailbox without the GIL, and calls the loop once instead of once per
request: ``call_soon_threadsafe`` costs more than everything else. The loop takes out the waiters and completes them;
each task continues with the result of its request.

If ``call_soon_threadsafe`` raises although the loop is open, it is called once more, and then again for the next
waiter.
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
    """Yield to the event loop until the request is done; this is the iterator of ``await future``.

    Cancelling the task cancels the request, and so does running out of ``seconds``. ``future`` comes from a pool of
    this process, or is completed by Python and has ``add_done_callback``.

    Raises:
        TimeoutError: the request is not done within ``seconds``.
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
        del future  # its exception's traceback has this frame: a reference cycle


def _expect(future: Any, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Any]) -> None:
    """Make the loop complete ``waiter`` once the future is done."""
    if not isinstance(future, RequestFuture):

        def wake(_: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: no task waits
                loop.call_soon_threadsafe(Mailbox.wake, waiter)

        return tell(future, wake)
    if (mailbox := _mailboxes.get(loop)) is None:
        mailbox = _mailboxes[loop] = Mailbox(functools.partial(_call_loop, weakref.ref(loop)))
    return mailbox.expect(future, waiter)


def _call_loop(loop_of: weakref.ref[asyncio.AbstractEventLoop], mailbox: Mailbox) -> None:
    """Make the loop empty its mailbox; if the loop is gone, discard the mailbox, since no task waits there."""
    if (loop := loop_of()) is None:
        return mailbox.discard()
    try:
        loop.call_soon_threadsafe(mailbox.deliver)
    except Exception:
        if not loop.is_closed():
            raise
        mailbox.discard()
