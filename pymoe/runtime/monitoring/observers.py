"""What goes on beside a runtime that is observed: a log line now and then, and answers to who asks from outside.

A :class:`Observers` starts and ends with its runtime, and never holds on to it. It has threads only if asked for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pymoe.runtime.monitoring.formatting import is_busy, line
from pymoe.runtime.monitoring.socket_server import Monitor, monitor_from_environment
from pymoe.runtime.monitoring.statistics import Pool, ServedPools, StatsReader

logger = logging.getLogger("pymoe.runtime")


class Observers:
    """The log and the monitor of one runtime.

    Args:
        pools: the runtime's pools, which may come and go.
        stats_interval: seconds between log lines (logger ``pymoe.runtime``, level INFO; one for each pool that had
            anything to do), None for none.
        monitor: True, or a folder: serve the pools' numbers on a Unix socket there (``socket_server.py``); None: if the
            environment variable ``PYMOE_MONITOR`` asks for it; False: never.
    """

    def __init__(
        self,
        pools: Iterable[Pool] | ServedPools[Any],
        *,
        stats_interval: float | None = None,
        monitor: bool | str | Path | None = None,
    ) -> None:
        pools = pools if isinstance(pools, ServedPools) else ServedPools(pools)
        if stats_interval is not None and not stats_interval > 0:
            raise ValueError(f"stats_interval must be a positive number of seconds, got {stats_interval}")
        self._must_listen = monitor is not None
        wanted = monitor_from_environment() if monitor is None else monitor
        self._log = StatsLog(pools, stats_interval) if stats_interval is not None else None
        self._monitor = Monitor(pools, None if wanted is True else Path(wanted)) if wanted else None

    @property
    def socket(self) -> Path | None:
        """Where the monitor listens, while it does."""
        return self._monitor.path if self._monitor else None

    def start(self) -> None:
        """Starts what was asked for.

        Raises:
            OSError: the monitor cannot listen. One that only the environment asks for is left out then, with a warning.
        """
        if self._monitor:
            try:
                self._monitor.start()
            except OSError as error:
                if self._must_listen:
                    raise
                logger.warning("PYMOE_MONITOR: %s", error)
        if self._log:
            self._log.start()

    def stop(self) -> None:
        """Ends it; the log writes what happened since its last lines. May be called at any time, again too."""
        if self._log:
            self._log.stop()
        if self._monitor:
            self._monitor.stop()


class StatsLog:
    """Writes the pools' recent numbers to the log, every ``interval`` seconds."""

    def __init__(self, pools: ServedPools[Any], interval: float) -> None:
        self._pools, self._interval = pools, interval
        self._end: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        if self._thread:
            return
        self._end = threading.Event()
        reader = StatsReader(self._pools, recent=True)
        self._thread = threading.Thread(
            target=write_lines, args=(reader, self._interval, self._end), name="pymoe-stats", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Writes the last lines and ends the thread."""
        thread, end = self._thread, self._end
        if thread is None or end is None:
            return
        end.set()
        if thread is not threading.current_thread():  # the last reference to a runtime may go anywhere
            thread.join()
        if self._thread is thread:
            self._thread = None


def write_lines(reader: StatsReader, interval: float, end: threading.Event) -> None:
    """Lines at an interval, and last ones at the end."""
    ended = False
    while not ended:
        ended = end.wait(interval)
        for one in reader.read().values():
            if is_busy(one):
                logger.info("%s", line(one))
