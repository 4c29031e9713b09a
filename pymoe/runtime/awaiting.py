"""How a coroutine waits for a request, from ``await future`` to the loop's next turn.

``await`` has the task sleep on a waiter, a future of the loop. When the batch ends, whoever completes it puts the
waiters of its requests into the loop's mailbox without the GIL, and calls the loop once, not once a request:
``call_soon_threadsafe`` costs more than all the rest. The loop takes the waiters out and sets them; each task goes on
with its request's result.

A loop that is there but raises when it is called is called once more, and otherwise with the next waiter that comes.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from pymoe._runtime import Mailbox, RequestFuture

_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()


def outcome(future: Any, seconds: float | None = None) -> Generator[Any, None, Any]:
    """What ``await future`` iterates over. Cancelling the task cancels the request, as do ``seconds`` when over.

    ``future`` is that of a pool of this process, or one that Python completes and that has ``add_done_callback``.

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
        del future  # what it raises has this frame in its traceback: they would hold each other


def _expect(future: Any, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Any]) -> None:
    """Have the loop wake ``waiter`` once the future is done."""
    if not isinstance(future, RequestFuture):

        def wake(_: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(Mailbox.wake, waiter)

        return future.add_done_callback(wake)
    if (mailbox := _mailboxes.get(loop)) is None:
        mailbox = _mailboxes[loop] = Mailbox(functools.partial(_call_loop, weakref.ref(loop)))
    return mailbox.expect(future, waiter)


def _call_loop(loop_of: weakref.ref[asyncio.AbstractEventLoop], mailbox: Mailbox) -> None:
    """Have the loop empty its mailbox; where there is no loop any more, nobody waits."""
    if (loop := loop_of()) is None:
        return mailbox.discard()
    try:
        loop.call_soon_threadsafe(mailbox.deliver)
    except Exception:
        if not loop.is_closed():
            raise
        mailbox.discard()
