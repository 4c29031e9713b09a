"""Runtime: the workers that serve pools."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from pymoe import _runtime
from pymoe._common.names import explain_arguments
from pymoe.autograd.fork import renew_engine
from pymoe.runtime.monitoring.observers import Observers
from pymoe.runtime.monitoring.statistics import PoolStats, ServedPools, StatsReader
from pymoe.runtime.protocols import how
from pymoe.runtime.task_pool import TaskPool, check_count

if TYPE_CHECKING:
    from typing_extensions import Self


class Runtime:
    """Threads that run the batches of pools, oldest request of all pools first.

    Pools accept requests before a runtime serves them. :meth:`shutdown` closes them, until another runtime starts with
    them. Backends and pools may be added and removed at any time (:meth:`add`, :meth:`remove`). A runtime that is
    dropped without a shutdown cancels queued requests and lets running batches end, as it does at interpreter exit.

    Args:
        backends_or_pools: a pool, or anything with ``get_pools()``; several of these, or a dictionary of them by name.
        num_workers: threads that run batches; None takes one for each pool or backend, up to the number of CPUs.
        stats_interval: seconds between lines of statistics in the log ``pymoe.runtime``, one for each pool that had
            anything to do; None writes none.
        monitor: whether ``python -m pymoe.runtime.top`` in another terminal may read the pools: True, or a folder
            for the socket (see :mod:`pymoe.runtime.monitoring.socket_server`); None follows the environment variable
            ``PYMOE_MONITOR``, and without it means no.
        expert_backends: hivemind's name for ``backends_or_pools``.
        prefetch_batches: hivemind's option, ignored: there is no queue of batches between pools and workers.
        sender_threads: hivemind's option, ignored: the thread that computes a result also returns it.
        device: hivemind's option, must be None: ``ExpertBackend(device=...)`` decides where an expert is.

    Attributes:
        expert_backends: the backends or pools of the constructor.
        ready: an event that is set while it runs.

    Raises:
        ValueError: no pool, fewer than one worker, or a stats_interval that is not a positive number.
        TypeError: something is neither a pool nor a backend with pools, ``device`` is given, or ``num_workers`` is not
            an integer.

    Example:
        >>> pool = pymoe.TaskPool(lambda x: x.square(), name="square")
        >>> with pymoe.Runtime([pool], num_workers=1) as runtime:
        ...     tasks = [pool.submit_task(torch.full((1,), float(i))) for i in range(3)]  # from any thread
        ...     print([task.result()[0].item() for task in tasks])
        [0.0, 1.0, 4.0]
    """

    @explain_arguments(threads="num_workers")
    def __init__(
        self,
        backends_or_pools: Any = None,
        *,
        num_workers: int | None = None,
        stats_interval: float | None = None,
        monitor: bool | str | Path | None = None,
        expert_backends: Any = None,
        prefetch_batches: int | None = None,
        sender_threads: int | None = None,
        device: None = None,
    ) -> None:
        if (backends_or_pools is None) == (expert_backends is None):
            raise TypeError("Runtime: expected backends_or_pools, or expert_backends in its place, and not both")
        if device is not None:
            raise TypeError("Runtime: device must be None; an expert's device is that of ExpertBackend(device=...)")
        if backends_or_pools is None:
            backends_or_pools = expert_backends
        members = members_of(backends_or_pools)
        if not members:
            raise ValueError("Runtime: expected at least one pool or backend, got none")
        pools: list[TaskPool] = []
        for member in members:
            pools += [pool for pool in pools_of(member) if pool not in pools]
        _warn_of_equal_names(pools, (), stacklevel=4)
        if num_workers is None:
            num_workers = max(1, min(len(members), os.cpu_count() or 1))
        self._served: ServedPools = ServedPools(pools)
        observers = Observers(self._served, stats_interval=stats_interval, monitor=monitor)
        self._executor = _runtime.Executor(check_count("Runtime", "num_workers", num_workers), pools)
        self.expert_backends = backends_or_pools
        self.ready = threading.Event()
        self._idle = threading.Event()
        self.num_workers = num_workers
        self._changes = threading.RLock()  # held while the runtime starts, adds or removes
        self._leaving: list[TaskPool] = []  # pools that are being removed, once per call of remove()
        self._reader = StatsReader(self._served)
        self._observers = observers
        weakref.finalize(self, observers.stop)

    @property
    def pools(self) -> tuple[TaskPool, ...]:
        """Return the pools that the runtime serves, or will serve once it runs."""
        return cast("tuple[TaskPool, ...]", self._served.now)

    @property
    def running(self) -> bool:
        """True from :meth:`start` to the end of :meth:`shutdown`."""
        return self._executor.running()

    def start(self) -> None:
        """Start the workers, unless they run already.

        Raises:
            RuntimeError: a pool is served by another Runtime, or the process is a fork.
            OSError: the ``monitor`` that was asked for cannot listen.
        """
        renew_engine()
        with self._changes:
            self._idle.clear()
            self._executor.start(self.pools)
            for pool in self.pools:
                pool._server = weakref.ref(self._executor)
        try:
            self._observers.start()
        except OSError:
            self.shutdown(drain=False)
            raise
        self.ready.set()
        if not self.running:  # another thread has shut it down in the meantime
            self.ready.clear()

    def run(self) -> None:
        """Start, and return after another thread has shut the runtime down; Ctrl-C shuts it down immediately.

        Raises:
            RuntimeError, OSError: see :meth:`start`.
        """
        self.start()
        try:
            self._idle.wait()
        except BaseException:
            self.shutdown(drain=False)
            raise

    def shutdown(self, drain: bool = True) -> None:
        """Refuse further requests, and wait until all are done and the workers have ended. May be called again.

        Args:
            drain: run queued requests; otherwise requests that have not started are cancelled, and requests of
                several batches end after the current batch.

        Raises:
            RuntimeError: called from a batch of this runtime, or in a fork.
        """
        self._executor.shutdown(drain)
        self._observers.stop()
        self.ready.clear()
        self._idle.set()

    def add(self, backend_or_pool: Any) -> None:
        """Add a backend or pool, which is served from now on if the runtime runs. One that is already served stays.

        A pool that :meth:`remove` has closed, before it timed out or was interrupted, is opened again.

        The number of workers does not change. May be called from any thread, and from a batch.

        Raises:
            RuntimeError: a pool is served by another Runtime (then nothing is added), or this one is shutting down, or
                is still removing it.
            TypeError: neither a pool nor a backend with pools.
        """
        with self._changes:
            coming = pools_of(backend_or_pool)
            for pool in coming:
                if pool in self._leaving:
                    raise RuntimeError(f"Runtime.add: the pool {pool.name!r} is still being removed")
            self._executor.take_back([pool for pool in coming if pool in self.pools])
            new = [pool for pool in coming if pool not in self.pools]
            # A pool that excludes an already served pool is served together with it.
            here = self.pools
            _warn_of_equal_names(new, self.pools, stacklevel=3)
            self._executor.add([one for one in new if not any(one._is_exclusive_with(pool) for pool in here)])
            self._served.add(new)
            for pool in new:
                pool._server = weakref.ref(self._executor) if self.running else None

    def remove(self, backend_or_pool: Any, drain: bool = True, timeout: float | None = None) -> None:
        """Refuse further requests of a backend or pool, wait until every one is done, and stop serving it.

        The others are served meanwhile, and a running batch is waited for. Removed pools may be added again, here or to
        another runtime, which opens them. After a timeout or an interrupt (Ctrl-C) the pool is closed and still served:
        call this again to continue waiting, or :meth:`add` to open it.

        Args:
            backend_or_pool: a backend or pool of the constructor, or one that was added.
            drain: run queued requests; otherwise requests that have not started are cancelled, and requests of
                several batches end after the current batch.
            timeout: the maximum number of seconds to wait; None: no limit.

        Raises:
            TimeoutError: some requests are still not done.
            ValueError: it is not served here, or is mutually exclusive with a pool that would stay.
            RuntimeError: called from a batch of this runtime, or in a fork.
            TypeError: neither a pool nor a backend with pools.
        """
        leaving = pools_of(backend_or_pool)
        with self._changes:
            for pool in leaving:
                if pool not in self.pools:
                    raise ValueError(f"Runtime.remove: the pool {pool.name!r} is not served here")
            for pool in self.pools:
                if pool not in leaving and any(pool._is_exclusive_with(one) for one in leaving):
                    raise ValueError(
                        f"Runtime.remove: the pool {pool.name!r} is mutually exclusive with one of "
                        f"{[one.name for one in leaving]}: remove them together"
                    )
            self._leaving += leaving
        released = False
        try:
            released = self._executor.release(leaving, drain, timeout)  # not under the lock: it may take long
        finally:
            with self._changes:
                for pool in leaving:
                    self._leaving.remove(pool)
                if released:
                    self._forget(leaving)
        if not released:
            raise TimeoutError(
                f"Runtime.remove: requests of {[pool.name for pool in leaving]} are not done after {timeout:g} s"
            )

    def _forget(self, pools: list[TaskPool]) -> None:
        self._served.remove(pools)
        for pool in pools:
            if pool._server is not None and pool._server() is self._executor:  # another runtime may have it by now
                pool._server = None

    def stats(self) -> dict[str, PoolStats]:
        """Return every pool's statistics by name; rates are since the previous call, or since the runtime was made."""
        return self._reader.read()

    def __repr__(self) -> str:
        names = ", ".join(pool.name for pool in self.pools)
        state = "running" if self.running else "not running"
        return f"<{type(self).__name__} of {names}: {state}, num_workers={self.num_workers}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(drain=kind is None)


TesseractRuntime = Runtime


def _warn_of_equal_names(new: Iterable[TaskPool], others: Iterable[TaskPool], stacklevel: int) -> None:
    names = {pool.name for pool in others}
    for pool in new:
        if pool.name in names:
            warnings.warn(
                f"Runtime: two pools are called {pool.name!r}; statistics, metrics and top number the second one "
                f"({pool.name}#2), which nothing else tells from the first: give backends and pools different names",
                stacklevel=stacklevel,
            )
            return
        names.add(pool.name)


def members_of(backends_or_pools: Any) -> list[Any]:
    """Return the backends and pools to serve as a list; raise TypeError if the argument can contain none."""
    if isinstance(backends_or_pools, TaskPool) or callable(getattr(backends_or_pools, "get_pools", None)):
        return [backends_or_pools]
    if isinstance(backends_or_pools, Mapping):
        return list(backends_or_pools.values())
    if not isinstance(backends_or_pools, Iterable):
        raise TypeError(f"Runtime: expected backends or pools, got {type(backends_or_pools).__name__}")
    return list(backends_or_pools)


def pools_of(backend: Any) -> list[TaskPool]:
    """Return the pools of a backend, or the pool itself in a list; raise TypeError for anything else."""
    if isinstance(backend, TaskPool):
        return [backend]
    get_pools = getattr(backend, "get_pools", None)
    pools: list[Any] = list(get_pools()) if callable(get_pools) else [None]
    for pool in pools:
        if not isinstance(pool, TaskPool):
            raise TypeError(
                f"Runtime: expected a pool or a backend with get_pools(), got {type(backend).__name__}{how(backend)}"
            )
    return pools
