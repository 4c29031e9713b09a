"""The workers of parallel calls: one pool in a process, made when it is first needed.

Calls that wait for other machines, or for each other, must all be under way at once, however many they are; calls that
compute want as many threads as there are processors. Nobody has to say which they are: the pool has a thread for every
processor and, while calls are left lying because those under way wait, gets more (``csrc/runtime/growth.h``).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pymoe._runtime import WorkerPool
from pymoe.autograd.fork import renew_engine

# Threads, with those that wait. Each costs some tens of KiB.
MOST = 512
# Seconds after which a thread that was added and has nothing to do ends.
IDLE = 5.0

_lock = threading.Lock()
_count: int | None = None
_pool: WorkerPool | None = None


def get_parallel_workers() -> int:
    """How many threads run the calls of maps and in the background; see :func:`set_parallel_workers`.

    By default as many as there are processors, not counting those that wait.
    """
    return _count or os.cpu_count() or 1


def set_parallel_workers(count: int | None) -> None:
    """Choose how many threads run the calls of maps and in the background, in the whole process.

    Threads are started by the first call that needs them, and again after this has changed their number; what runs on
    the old ones goes on to its end.

    Args:
        count: so many, whatever calls do; at least 1. None, the default: as many as the machine has processors, and
            further ones, up to some hundreds, in place of those whose calls wait (for other machines, for each other).
            A thread waits if it uses no processor for some milliseconds; those that were added end after some seconds
            without work.

    Raises:
        ValueError: ``count`` is less than 1.
    """
    global _count, _pool
    if count is not None and count < 1:
        raise ValueError(f"set_parallel_workers: count must be at least 1, got {count}")
    with _lock:
        if _count != count:
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
            _pool = WorkerPool(get_parallel_workers(), most=0 if _count else MOST, still=_still(), idle=IDLE)
        return _pool


def _still() -> float:
    """Seconds in which a thread that waits for the interpreter's lock looks after it at least once."""
    return max(1.6 * sys.getswitchinterval(), 1e-3)


def _forget() -> None:
    """In the child of a fork, which has none of the threads, and where another thread may have held the lock."""
    global _lock, _pool
    _lock = threading.Lock()
    _pool = None


os.register_at_fork(after_in_child=_forget)
