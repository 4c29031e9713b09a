"""Worker threads that run the batches of pools."""

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
    """Threads that run the batches of pools, the batch with the oldest request first (a priority adds to its age).

    Pools accept requests even before a runtime serves them. After :meth:`shutdown` they refuse requests until a runtime
    that has them starts. Backends and pools may be added and removed at any time (:meth:`add`, :meth:`remove`). If a
    runtime is collected without a shutdown, or at interpreter exit, queued requests are cancelled and running batches
    end normally.

    Args:
        backends_or_pools: a pool, or anything with ``get_pools()``; several of these, or a dictionary of them by name.
        num_workers: number of threads that run batches; None: one for each of ``backends_or_pools``, up to the number
            of CPUs.
        stats_interval: seconds between statistics in the log ``pymoe.runtime``, one line for each pool that was busy;
            None: no statistics.
        monitor: whether ``python -m pymoe.runtime.top`` in another terminal may read the statistics: True, or a folder
            for the socket (see :mod:`pymoe.runtime.monitoring.socket_server`). None: only if the environment variable
            ``PYMOE_MONITOR`` says so.
        expert_backends: hivemind's name for ``backends_or_pools``.
        prefetch_batches: hivemind's option, ignored: there is no queue of batches between pools and workers.
        sender_threads: hivemind's option, ignored: the thread that computes a result also returns it.
        device: hivemind's option, must be None: ``ExpertBackend(device=...)`` decides where an expert is.

    Attributes:
        expert_backends: the backends or pools of the constructor.
        ready: an event that is set while the runtime runs.

    Raises:
        ValueError: there is no backend or pool, ``num_workers`` is less than 1, or ``stats_interval`` is not positive.
        TypeError: something is neither a pool nor a backend with pools, both ``backends_or_pools`` and
            ``expert_backends`` or neither are given, ``device`` is given, ``num_workers`` is not an integer, or
            ``stats_interval`` is not a number.

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
        self._changes = threading.RLock()  # guards changes to the pools and to the list below
        self._leaving: list[TaskPool] = []  # pools that remove() waits for, once per waiting call
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
            RuntimeError: another Runtime serves one of the pools, or this process was forked from the one that made
                this runtime.
            OSError: the ``monitor`` cannot listen.
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
        if not self.running:  # another thread has called shutdown() in the meantime
            self.ready.clear()

    def run(self) -> None:
        """Start, and block until another thread shuts the runtime down; Ctrl-C shuts it down without draining.

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
        """Refuse further requests, wait until the earlier ones are done, and end the workers. May be called again.

        Args:
            drain: run queued requests; otherwise requests that have not started are cancelled, and requests of
                several batches end after the current batch.

        Raises:
            RuntimeError: this was called from a batch or a worker of this runtime, or in a forked child.
        """
        self._executor.shutdown(drain)
        self._observers.stop()
        self.ready.clear()
        self._idle.set()

    def add(self, backend_or_pool: Any) -> None:
        """Add a backend or pool, which is served from now on if the runtime runs.

        Nothing changes for a pool that is already served, except that it is opened again if a call of :meth:`remove`
        has closed it and then timed out or was interrupted. The number of workers does not change. May be called from
        any thread, and from a batch.

        Raises:
            RuntimeError: another Runtime serves one of the pools (then nothing is added), this runtime is shutting
                down, or a call of :meth:`remove` still waits for the pool.
            TypeError: the argument is neither a pool nor a backend with pools.
        """
        with self._changes:
            coming = pools_of(backend_or_pool)
            for pool in coming:
                if pool in self._leaving:
                    raise RuntimeError(f"Runtime.add: the pool {pool.name!r} is still being removed")
            self._executor.take_back([pool for pool in coming if pool in self.pools])
            new = [pool for pool in coming if pool not in self.pools]
            # Mutually exclusive pools are served together: a pool that excludes a served pool is served already.
            here = self.pools
            _warn_of_equal_names(new, self.pools, stacklevel=3)
            self._executor.add([one for one in new if not any(one._is_exclusive_with(pool) for pool in here)])
            self._served.add(new)
            for pool in new:
                pool._server = weakref.ref(self._executor) if self.running else None

    def remove(self, backend_or_pool: Any, drain: bool = True, timeout: float | None = None) -> None:
        """Refuse further requests to a backend or pool, wait until its requests are done, and stop serving it.

        Other pools are served meanwhile. Removed pools may be added to this or another runtime, which opens them again.

        If this times out or is interrupted (Ctrl-C), the pool stays closed to further requests, and is still served.
        Call this again to continue waiting, or :meth:`add` to open the pool.

        Args:
            backend_or_pool: a backend or pool of the constructor, or one that was added.
            drain: run queued requests; otherwise requests that have not started are cancelled, and requests of
                several batches end after the current batch.
            timeout: the maximum number of seconds to wait; None: no limit.

        Raises:
            TimeoutError: some requests are still not done.
            ValueError: a pool is not served by this runtime, or is mutually exclusive with a pool that would stay.
            RuntimeError: this was called from a batch of this runtime, or in a forked child.
            TypeError: the argument is neither a pool nor a backend with pools.
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
            released = self._executor.release(leaving, drain, timeout)  # may take long, so not under self._changes
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
            if pool._server is not None and pool._server() is self._executor:  # another runtime may have taken it
                pool._server = None

    def stats(self) -> dict[str, PoolStats]:
        """Return the statistics of every pool, by name.

        Rates cover the time since the previous call. The first rates of a pool cover the time since the runtime was
        made, or since the pool was added if that was later.
        """
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
    """Return a list of the backends and pools to serve: a single one, or the members of an iterable or dictionary.

    Raises:
        TypeError: the argument is none of these.
    """
    if isinstance(backends_or_pools, TaskPool) or callable(getattr(backends_or_pools, "get_pools", None)):
        return [backends_or_pools]
    if isinstance(backends_or_pools, Mapping):
        return list(backends_or_pools.values())
    if not isinstance(backends_or_pools, Iterable):
        raise TypeError(f"Runtime: expected backends or pools, got {type(backends_or_pools).__name__}")
    return list(backends_or_pools)


def pools_of(backend: Any) -> list[TaskPool]:
    """Return a list of the pools of ``backend``; if ``backend`` is a pool itself, a list with only this pool.

    Raises:
        TypeError: ``backend`` is neither a pool nor a backend with pools.
    """
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
