"""A server's pools for ``python -m pymoe.remote top``."""

from __future__ import annotations

import time
from typing import Any

from pymoe.remote import wire
from pymoe.remote.connection import connect
from pymoe.remote.errors import ProtocolError, ServerLost
from pymoe.runtime.monitoring.statistics import pool_stats
from pymoe.runtime.top import NotARuntime, Report, printable


class WatchedServer:
    """One server, looked at again and again; what it says is told as the numbers since the look before.

    Raises what :func:`~pymoe.remote.connect` does.
    """

    def __init__(self, address: str, **security: Any) -> None:
        self.where = address
        self._connection = connect(address, coalesce=False, **security)
        self._before: dict[str, wire.Counters] = {}
        self._time = time.monotonic()

    def read(self) -> list[Report]:
        """Return a report, or none while the server is gone; raises NotARuntime for numbers that are none."""
        try:
            found = self._connection.info()
        except (ServerLost, TimeoutError):
            self._before = {}
            return []
        except ProtocolError as error:
            raise NotARuntime(str(error)) from None
        now = time.monotonic()
        seconds, self._time = now - self._time, now
        try:
            pools = tuple(
                pool_stats(printable(name), self._before.get(name, counters), counters, seconds, recent=True)
                for name, counters in found.pools.items()
            )
        except (KeyError, TypeError, ValueError) as error:
            raise NotARuntime(f"{self.where}: not a report ({type(error).__name__}: {error})") from None
        self._before = found.pools
        return [Report(printable(f"{self.where} (process {found.pid}, {found.seconds:.0f} s)"), pools)]

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
