"""Whether a server stood still: its process was stopped and continued, or the processor was taken from it.

What came meanwhile is read afterwards, message by message, and a request is read before the word that its client has
given it up. So after such a time a request waits a moment, for that word to be read as well.
"""

from __future__ import annotations

import asyncio
import time

BEAT_S = 0.05
"""How often a server with open streams looks at the clock."""
STALL_S = 0.2
"""Without a look for as long as this a server has stood still."""
SETTLE_S = 0.05
"""How long a request then waits."""


class Stalls:
    """Looks at the clock of a running event loop between :meth:`watch` and as many calls of :meth:`unwatch`."""

    def __init__(self) -> None:
        self._watchers = 0
        self._looked = self._settled = 0.0
        self._next: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        self._watchers += 1
        if self._watchers == 1:
            self._looked = time.monotonic()
            self._schedule()

    def unwatch(self) -> None:
        self._watchers -= 1
        if not self._watchers and self._next is not None:
            self._next.cancel()

    async def settle(self) -> None:
        """Return at once, or, where the loop has just stood still, when it has read what came meanwhile."""
        self._look()
        wait = self._settled - self._looked
        if wait > 0:
            await asyncio.sleep(wait)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked > STALL_S:
            self._settled = now + SETTLE_S
        self._looked = now

    def _beat(self) -> None:
        self._look()
        self._schedule()

    def _schedule(self) -> None:
        self._next = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
