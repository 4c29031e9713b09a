"""Runtime: the workers that serve pools."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pymoe import _runtime
from pymoe.runtime.observe import Observers
from pymoe.runtime.statistics import PoolStats, StatsReader
from pymoe.runtime.task_pool import TaskPool

__all__ = ["Runtime", "TesseractRuntime"]


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
        stats_interval: seconds between lines of statistics in the log ``pymoe.runtime``, one for each pool that had
            anything to do; None writes none.
        monitor: whether ``python -m pymoe.runtime.top`` in another terminal may look at the pools: True, or a folder
            for the socket (see :mod:`pymoe.runtime.monitor`); None does what the environment variable
            ``PYMOE_MONITOR`` says, and without it nothing.

    Raises:
        ValueError: no pool, fewer than one worker, or a stats_interval that is no positive number.
        TypeError: something that is neither a pool nor has any.
    """

    def __init__(
        self,
        backends_or_pools: Mapping[str, Any] | Iterable[Any],
        *,
        num_workers: int | None = None,
        stats_interval: float | None = None,
        monitor: bool | str | Path | None = None,
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
        observers = Observers(pools, stats_interval=stats_interval, monitor=monitor)
        self._setup(pools, num_workers)
        self.num_workers = num_workers
        self.pools = tuple(pools)
        self._reader = StatsReader(self.pools)
        self._observers = observers
        weakref.finalize(self, observers.stop)

    @property
    def running(self) -> bool:
        """True from start to the end of shutdown."""
        return self._running()

    def start(self) -> None:
        """Start the workers; nothing if they run already.

        Raises:
            RuntimeError: a pool is served by another Runtime, or the process is a fork.
            OSError: the ``monitor`` that was asked for cannot listen.
        """
        super().start()
        for pool in self.pools:
            pool._server = weakref.ref(self)
        try:
            self._observers.start()
        except OSError:
            self.shutdown(drain=False)
            raise

    def shutdown(self, drain: bool = True) -> None:
        """Refuse further requests, and wait until every one is done and the workers have ended. May be called again.

        Args:
            drain: run what is queued; otherwise requests that have not started are cancelled.

        Raises:
            RuntimeError: called from a batch of this runtime, or in a fork.
        """
        super().shutdown(drain)
        self._observers.stop()

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
