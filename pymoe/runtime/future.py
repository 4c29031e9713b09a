"""Futures of requests, and how coroutines await them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Generator
from typing import Any

from pymoe import _runtime
from pymoe._runtime import RequestFuture as Future

__all__ = ["Future"]

# What tells a loop that requests are done: one call for all that a batch completes.
mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _runtime.Mailbox] = weakref.WeakKeyDictionary()


def wait_in_loop(future: Future) -> Generator[Any, None, Any]:
    """What ``await future`` runs."""
    if not future.done():
        loop = asyncio.get_running_loop()
        mailbox = mailboxes.get(loop)
        if mailbox is None:
            mailbox = mailboxes[loop] = _runtime.make_mailbox(loop)
        waiter = loop.create_future()
        future._notify(mailbox, waiter)
        try:
            yield from waiter
        except asyncio.CancelledError:
            future.cancel()
            raise
    return future.result()


_runtime.set_await(wait_in_loop)
