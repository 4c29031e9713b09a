"""Runtime: the workers that serve pools."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from pymoe import _runtime
from pymoe.runtime.statistics import PoolStats, StatsReader
from pymoe.runtime.task_pool import TaskPool

__all__ = ["Runtime", "TesseractRuntime"]

log = logging.getLogger("pymoe.runtime")


class Runtime(_runtime.Runtime):
    """Threads that run the batches of pools, oldest request first over all of them.

    ::

        with Runtime([pool]):
            pool.submit_task(x).result()

    Pools take requests in before a runtime serves them. :meth:`shutdown` closes them, until another runtime starts
    with them. Dropped without a shutdown, a runtime cancels what is queued and lets running batches end, as it does at
    interpreter exit.

    Args:
        backends_or_pools: pools, or anything with ``get_pools()``, or a dictionary of these by name.
        num_workers: threads that run batches; None takes one for each pool or backend, up to the number of CPUs.
        stats_interval: seconds between lines of statistics in the log ``pymoe.runtime``; None writes none.

    Raises:
        ValueError: no pool, or fewer than one worker.
        TypeError: something that is neither a pool nor has any.
    """

    def __init__(
        self,
        backends_or_pools: Mapping[str, Any] | Iterable[Any],
        *,
        num_workers: int | None = None,
        stats_interval: float | None = None,
    ) -> None:
        given = backends_or_pools.values() if isinstance(backends_or_pools, Mapping) else backends_or_pools
        members = list(given)
        if not members:
            raise ValueError("Runtime: at least one pool or backend is needed")
        pools: list[TaskPool] = []
        for member in members:
            found = [member] if isinstance(member, TaskPool) else pools_of(member)
            pools += [pool for pool in found if pool not in pools]
        if num_workers is None:
            num_workers = max(1, min(len(members), os.cpu_count() or 1))
        if stats_interval is not None and not stats_interval > 0:
            raise ValueError(f"Runtime: stats_interval must be positive, got {stats_interval}")
        self._setup(pools, num_workers)
        self.num_workers = num_workers
        self.pools = tuple(pools)
        self.stats_interval = stats_interval
        self._reader = StatsReader(self.pools)
        self._reporter: Reporter | None = None

    @property
    def running(self) -> bool:
        """True from start to the end of shutdown."""
        return self._running()

    def start(self) -> None:
        """Start the workers; nothing if they run already.

        Raises:
            RuntimeError: a pool is served by another Runtime, or the process is a fork.
        """
        super().start()
        if self.stats_interval is not None and self._reporter is None:
            self._reporter = Reporter(self.pools, self.stats_interval)

    def shutdown(self, drain: bool = True) -> None:
        """Refuse further requests, and wait until every one is done and the workers have ended. May be called again.

        Args:
            drain: run what is queued; otherwise requests that have not started are cancelled.

        Raises:
            RuntimeError: called from a batch of this runtime, or in a fork.
        """
        super().shutdown(drain)
        if self._reporter is not None:
            self._reporter.stop()
            self._reporter = None

    def stats(self) -> dict[str, PoolStats]:
        """Every pool's numbers by its name; rates are those since the previous call, or since the runtime was made."""
        return self._reader.read()

    def __enter__(self) -> Runtime:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(drain=kind is None)


TesseractRuntime = Runtime


def pools_of(backend: Any) -> list[TaskPool]:
    """A backend's pools."""
    get_pools = getattr(backend, "get_pools", None)
    pools: list[Any] = list(get_pools()) if callable(get_pools) else [None]
    for pool in pools:
        if not isinstance(pool, TaskPool):
            raise TypeError(f"Runtime: pools and backends with get_pools() can be served, got {type(backend).__name__}")
    return pools


class Reporter:
    """Writes a line for each pool that had something to do, at an interval, until it is stopped."""

    def __init__(self, pools: Iterable[TaskPool], interval: float) -> None:
        self._reader = StatsReader(pools, recent=True)
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pymoe.runtime statistics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            for name, stats in self._reader.read().items():
                if stats.batches:
                    log.info(
                        "%s: %.0f requests/s, %.0f rows/s, %.1f rows a batch, wait %.2f ms, process %.2f ms, %d queued",
                        name,
                        stats.requests_per_second,
                        stats.rows_per_second,
                        stats.mean_batch_size,
                        stats.wait.mean * 1e3,
                        stats.process.mean * 1e3,
                        stats.queued,
                    )
