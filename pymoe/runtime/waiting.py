"""Waiting for many requests: the first, all, or each as it ends.

``concurrent.futures.wait`` and ``as_completed`` take these futures as well, under a lock for each; these here take the
futures of any executor, for less.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION
from typing import Any, NamedTuple

from pymoe.runtime.future import deadline_after, seconds_left

__all__ = ["as_completed", "wait"]


class DoneAndNotDone(NamedTuple):
    """What :func:`wait` returns."""

    done: set[Any]
    not_done: set[Any]


def wait(futures: Iterable[Any], timeout: float | None = None, return_when: str = ALL_COMPLETED) -> DoneAndNotDone:
    """Wait as ``concurrent.futures.wait`` does.

    A thread that waits here runs no batch itself, as one in ``result()`` may: a function of a pool that waits for
    requests had better call ``result()``.

    Args:
        futures: of requests; duplicates count once.
        timeout: seconds to wait at most; None: as long as it takes. That it is over is no error.
        return_when: ``FIRST_COMPLETED``, ``FIRST_EXCEPTION`` or ``ALL_COMPLETED`` of ``concurrent.futures``.

    Returns:
        Two sets, ``done`` (cancelled ones too) and ``not_done``.

    Raises:
        ValueError: another ``return_when``.
    """
    if return_when not in (FIRST_COMPLETED, FIRST_EXCEPTION, ALL_COMPLETED):
        raise ValueError(f"wait: return_when must be a constant of concurrent.futures, got {return_when!r}")
    everyone = set(futures)
    try:
        for future in arrivals(everyone, deadline_after(timeout)):
            failed = not future.cancelled() and future.exception() is not None
            if return_when == FIRST_COMPLETED or (return_when == FIRST_EXCEPTION and failed):
                break
    except queue.Empty:
        pass
    done = {future for future in everyone if future.done()}
    return DoneAndNotDone(done, everyone - done)


def as_completed(futures: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
    """The futures in the order in which they end, as ``concurrent.futures.as_completed`` has it; each once.

    What has been handed out is not kept: results that nobody else needs are gone before the next one comes.

    Args:
        futures: of requests.
        timeout: seconds from this call within which all must have ended; None: as long as it takes.

    Raises:
        TimeoutError: from the iterator, when the time is over.
    """
    everyone = set(futures)
    count = len(everyone)
    return named(arrivals(everyone, deadline_after(timeout)), count)


def named(ended: Iterator[Any], count: int) -> Iterator[Any]:
    """``ended``, with an error that says how many are missing."""
    seen = 0
    while True:
        try:
            one = [next(ended)]
        except StopIteration:
            return
        except queue.Empty:
            raise TimeoutError(f"{count - seen} of {count} requests are not done in time") from None
        seen += 1
        yield one.pop()  # which leaves nothing of it here


def arrivals(futures: set[Any], deadline: float | None) -> Iterator[Any]:
    """Each future once it is done; ``queue.Empty`` when the deadline has passed and none is."""
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    count = len(futures)
    for future in futures:
        future.add_done_callback(ended.put)
    del futures
    future = None
    for _ in range(count):
        yield ended.get(timeout=seconds_left(deadline))
