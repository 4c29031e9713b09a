"""The workers of parallel calls: one pool per process, created on first use.

Calls that wait for other machines, or for each other, must all run at the same time, whatever their number; calls that
compute need as many threads as there are processors. The caller does not say which kind they are: unless
:func:`set_parallel_workers` fixes the number of threads, the pool has one per processor, and starts more if calls are
queued while the running ones wait (``csrc/runtime/worker_pool_growth.h``).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pymoe._runtime import WorkerPool
from pymoe.autograd.fork import renew_engine

MAX_THREADS = 512  # maximum size of the pool, including waiting threads; each costs some tens of KiB
WAIT_FOR_MAPS_AT_EXIT_S = 1.0  # once the workers have ended, exit waits at most this long for maps of daemon threads
END_IDLE_THREAD_AFTER_S = 5.0  # a thread that was added because calls waited ends after this time without work

_lock = threading.Lock()
_count: int | None = None
_pool: WorkerPool | None = None
_visits: set[Visit] = set()
_exiting = False


def get_parallel_workers() -> int:
    """Return the number of threads that run calls of maps and background calls; see :func:`set_parallel_workers`.

    The default is the number of processors. Threads that were added because calls wait are not counted.
    """
    return _count or os.cpu_count() or 1


def set_parallel_workers(count: int | None) -> None:
    """Set how many threads run calls of maps and background calls in this process.

    The first call that needs the threads starts them. After a change of their number, the next call starts new ones,
    and calls on the old threads run to their end.

    Args:
        count: exactly this many threads, at least 1. None, the default: one per processor, and up to hundreds more to
            replace threads whose calls wait (for other machines, for each other). A thread counts as waiting if it uses
            no processor time for some milliseconds; added threads end after some seconds without work.

    Raises:
        TypeError: ``count`` is not an int.
        ValueError: ``count`` is less than 1.
    """
    global _count, _pool
    if isinstance(count, bool) or not isinstance(count, (int, type(None))):
        raise TypeError(f"set_parallel_workers: count must be an int or None, got {type(count).__name__}")
    if count is not None and count < 1:
        raise ValueError(f"set_parallel_workers: count must be at least 1, got {count}")
    with _lock:
        if _count != count:
            _pool = None  # the workers of the old pool end after the calls that they run
        _count = count


@contextmanager
def parallel_workers(count: int | None) -> Iterator[None]:
    """Return a context manager that calls ``set_parallel_workers(count)``, and finally restores the earlier setting."""
    before = _count
    set_parallel_workers(count)
    try:
        yield
    finally:
        set_parallel_workers(before)


def shared_pool() -> WorkerPool:
    """Return the process's pool of workers; create it first if there is none.

    Raises:
        RuntimeError: the interpreter is exiting.
    """
    global _pool
    with _lock:
        if _pool is None:
            renew_engine()
            most = 0 if _count else MAX_THREADS
            # A thread that uses no processor time for this long counts as waiting. Threads that wait for the
            # interpreter's lock do not count, because they poll the lock more often.
            still = max(1.6 * sys.getswitchinterval(), 1e-3)
            _pool = WorkerPool(get_parallel_workers(), most=most, still=still, idle=END_IDLE_THREAD_AFTER_S)
        return _pool


class Visit:
    """A context in which a thread runs a map.

    The exiting interpreter waits until no thread is in such a context: see :func:`_leave`.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        end_thread_at_exit()
        _visits.add(self)

    def __exit__(self, *exception: Any) -> None:
        _visits.discard(self)
        end_thread_at_exit()


def end_thread_at_exit() -> None:
    """End this thread silently if the interpreter is exiting, unless it is the main thread.

    Raises:
        SystemExit: to end the thread. The main thread continues, because its exit handlers may still make calls.
    """
    if _exiting and threading.current_thread() is not threading.main_thread():
        raise SystemExit("the interpreter is exiting")


def _leave() -> None:
    """Make sure that no daemon thread is inside a map when the interpreter exits.

    Before CPython 3.14, a daemon thread that wants the interpreter's lock during the exit is unwound, which aborts the
    process if the thread is in a function of torch. So cancel calls that have not started, and wait until the workers
    have ended their calls, however long that takes, as the exit handler of ``pymoe._runtime`` would, too. Then wait up
    to ``WAIT_FOR_MAPS_AT_EXIT_S`` seconds until all maps have ended. A call on a daemon thread that takes longer does
    no harm if it sleeps in Python code.
    """
    global _exiting
    _exiting = True
    if _pool is not None:
        _pool.shutdown(drain=False)
    end = time.monotonic() + WAIT_FOR_MAPS_AT_EXIT_S
    while _visits and time.monotonic() < end:
        time.sleep(0.001)


def _forget() -> None:
    """Drop the pool and the lock in the child of a fork: the lock may be held by a thread that does not exist there."""
    global _lock, _pool
    _lock = threading.Lock()
    _pool = None
    _visits.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(_leave)
