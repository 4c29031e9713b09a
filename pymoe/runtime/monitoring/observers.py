"""The log of statistics and the monitor of a runtime, which start and stop with the runtime."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path

from pymoe._common.seconds import check_seconds
from pymoe.runtime.monitoring.formatting import is_busy, line
from pymoe.runtime.monitoring.socket_server import Monitor, monitor_from_environment
from pymoe.runtime.monitoring.statistics import Pool, ServedPools, StatsReader

logger = logging.getLogger("pymoe.runtime")


class Observers:
    """The log of statistics and the monitor of one runtime. Each has a thread and refers to the pools only if enabled.

    Neither refers to the runtime, so that the runtime can be collected.

    Args:
        pools: the runtime's pools, which may be added and removed.
        stats_interval: seconds between statistics in the log, one line for each pool that was busy (logger
            ``pymoe.runtime``, level INFO); None: no log.
        monitor: whether to serve statistics on a Unix socket (``socket_server.py``). A folder: there; True: in the
            default folder; None: as the environment variable ``PYMOE_MONITOR`` says, by default not; False: no.
    """

    def __init__(
        self,
        pools: Iterable[Pool] | ServedPools,
        *,
        stats_interval: float | None = None,
        monitor: bool | str | Path | None = None,
    ) -> None:
        if stats_interval is not None:
            check_seconds("stats_interval", stats_interval, positive=True)
        wanted = monitor_from_environment() if monitor is None else monitor
        self._logged = None if stats_interval is None else (pools, stats_interval)
        self._must_listen = monitor is not None
        self._monitor = Monitor(pools, None if wanted is True else Path(wanted)) if wanted else None
        self._log_end = threading.Event()
        self._log_thread: threading.Thread | None = None

    @property
    def socket(self) -> Path | None:
        """Return the path of the socket on which the monitor listens; None if it does not listen."""
        return self._monitor.path if self._monitor else None

    def start(self) -> None:
        """Start the log and the monitor if they are enabled.

        Raises:
            OSError: the monitor cannot listen. If only the environment variable enables it, this is logged instead.
        """
        if self._monitor:
            try:
                self._monitor.start()
            except OSError as error:
                if self._must_listen:
                    raise
                logger.warning("PYMOE_MONITOR: %s", error)
        if self._logged and self._log_thread is None:
            pools, interval_s = self._logged
            reader, self._log_end = StatsReader(pools, recent=True), threading.Event()
            self._log_thread = threading.Thread(
                target=write_lines, args=(reader, interval_s, self._log_end), name="pymoe-stats", daemon=True
            )
            self._log_thread.start()

    def stop(self) -> None:
        """Stop the log and the monitor. May be called at any time, and more than once.

        The log ends with a line for each pool that was busy since the previous lines.
        """
        self._log_end.set()
        thread = self._log_thread
        if thread and thread is not threading.current_thread():  # the log's own thread may collect the runtime
            thread.join()
        if self._log_thread is thread:
            self._log_thread = None
        if self._monitor:
            self._monitor.stop()


def write_lines(reader: StatsReader, interval_s: float, end: threading.Event) -> None:
    """Log a line for every busy pool every ``interval_s`` seconds. When ``end`` is set, do so once more and return."""
    ended = False
    while not ended:
        ended = end.wait(interval_s)
        for one in reader.read().values():
            if is_busy(one):
                logger.info("%s", line(one))
