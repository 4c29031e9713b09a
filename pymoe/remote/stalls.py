"""Whether a server stood still: its process was stopped and continued, or the processor was taken from it.

What came meanwhile is read afterwards, message by message, and a request is read before the word that its client has
given it up. So after such a time a request waits a moment, for that word to be read as well.
"""

from __future__ import annotations

import asyncio
import time

BEAT_S = 0.05
"""How often a server looks at the clock."""
STALL_S = 0.2
"""Without a look for as long as this a server has stood still."""
SETTLE_S = 0.05
"""How long a request then waits."""


class Stalls:
    """Looks at the clock of the running event loop from :meth:`begin` to :meth:`end`."""

    def __init__(self) -> None:
        self._looked = self._settled = 0.0
        self._next: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Look from now on."""
        self._looked = time.monotonic()
        self._schedule()

    def end(self) -> None:
        """Look no more."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    async def settle(self) -> float:
        """Return at once, or, where the loop has just stood still, when it has read what came meanwhile; return the
        seconds that this took.
        """
        if self._next is None:
            return 0.0
        self._look()
        wait = self._settled - self._looked
        if wait <= 0:
            return 0.0
        await asyncio.sleep(wait)
        return wait

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
