"""The workers of parallel calls: one pool in a process, made when it is first needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pymoe._runtime import WorkerPool
from pymoe.runtime.forked import renew_engine

_lock = threading.Lock()
_count: int | None = None
_pool: WorkerPool | None = None


def get_parallel_workers() -> int:
    """How many threads run the calls of maps and in the background; see :func:`set_parallel_workers`."""
    return _count or os.cpu_count() or 1


def set_parallel_workers(count: int | None) -> None:
    """Choose how many threads run the calls of maps and in the background, in the whole process.

    Threads are started by the first call that needs them, and again after this has changed their number; what runs on
    the old ones goes on to its end. The number is worth raising for calls that wait (for other machines, say) and not
    for those that compute.

    Args:
        count: at least 1; None: as many as the machine has processors.

    Raises:
        ValueError: ``count`` is less than 1.
    """
    global _count, _pool
    if count is not None and count < 1:
        raise ValueError(f"set_parallel_workers: count must be at least 1, got {count}")
    with _lock:
        if get_parallel_workers() != (count or os.cpu_count() or 1):
            _pool = None  # its workers end when what they run has ended
        _count = count


@contextmanager
def parallel_workers(count: int | None) -> Iterator[None]:
    """:func:`set_parallel_workers` for a ``with`` block, in the whole process."""
    before = _count
    set_parallel_workers(count)
    try:
        yield
    finally:
        set_parallel_workers(before)


def shared_pool() -> WorkerPool:
    """The pool, with its threads.

    Raises:
        RuntimeError: the interpreter is exiting.
    """
    global _pool
    with _lock:
        if _pool is None:
            renew_engine()
            _pool = WorkerPool(get_parallel_workers())
        return _pool


def _forget() -> None:
    """In the child of a fork, which has none of the threads, and where another thread may have held the lock."""
    global _lock, _pool
    _lock = threading.Lock()
    _pool = None


os.register_at_fork(after_in_child=_forget)
