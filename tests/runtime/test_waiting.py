"""Waiting for many requests, as concurrent.futures does for its own."""

from __future__ import annotations

import concurrent.futures
import gc
import queue
import signal
import threading
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION
from typing import Any

import pytest
import torch
from limits import LONG
from torch import Tensor

from pymoe.runtime import Runtime, TaskPool, as_completed, wait

ONE = torch.ones(1)


def fails(x: Tensor) -> Tensor:
    raise KeyError("planted")


def test_all_are_waited_for_and_cancelled_ones_are_done() -> None:
    pool = TaskPool(lambda x: x, name="pool")
    futures = [pool.submit_task(ONE) for _ in range(20)]
    futures[3].cancel()
    threading.Timer(0.01, (runtime := Runtime([pool])).start).start()
    done, not_done = wait([*futures, *futures], LONG)
    assert done == set(futures)
    assert not_done == set()
    assert wait(futures) == (done, not_done)
    assert wait([]) == (set(), set())
    runtime.shutdown()


def test_time_that_is_over_is_told_by_the_sets() -> None:
    pool = TaskPool(lambda x: x, name="pool")
    futures = [pool.submit_task(ONE) for _ in range(3)]
    futures[1].cancel()
    assert wait(futures, 0.01) == ({futures[1]}, {futures[0], futures[2]})
    assert wait(futures, 0) == wait(futures, -1) == ({futures[1]}, {futures[0], futures[2]})


@pytest.mark.parametrize("return_when", [FIRST_COMPLETED, FIRST_EXCEPTION, ALL_COMPLETED])
def test_what_ends_the_wait(return_when: str) -> None:
    """The good request ends first; the bad one and the last only after the previous wait has ended."""
    good, bad, never = (TaskPool(f, name="pool") for f in (lambda x: x, fails, lambda x: x))
    one, two, three = (pool.submit_task(ONE) for pool in (good, bad, never))
    with Runtime([good]):
        one.result(LONG)
    if return_when == FIRST_COMPLETED:
        assert wait([one, two, three], LONG, return_when) == ({one}, {two, three})
        return
    with Runtime([bad]):
        assert isinstance(two.exception(LONG), KeyError)
    expected = ({one, two}, {three})
    assert wait([one, two, three], LONG if return_when == FIRST_EXCEPTION else 0.01, return_when) == expected


def test_a_cancelled_one_is_no_exception() -> None:
    pool = TaskPool(lambda x: x, name="pool")
    one, two = pool.submit_task(ONE), pool.submit_task(ONE)
    one.cancel()
    with Runtime([pool]):
        assert wait([one, two], LONG, FIRST_EXCEPTION).done == {one, two}


def test_a_deadline_of_the_program_itself_ends_the_wait() -> None:
    """The signal handler raises TimeoutError, which is not the end of the wait's own time."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError("the program's")

    pool = TaskPool(lambda x: x, name="pool")
    before = signal.signal(signal.SIGUSR1, late)
    main = threading.main_thread().ident
    assert main is not None
    sender = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR1))
    try:
        sender.start()
        with pytest.raises(TimeoutError, match="the program's"):
            wait([pool.submit_task(ONE)], LONG)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def test_another_return_when_is_refused() -> None:
    with pytest.raises(ValueError, match="SOMETIME"):
        wait([], return_when="SOMETIME")


def test_each_comes_when_it_ends() -> None:
    first, second = (TaskPool(lambda x: x, name="pool") for _ in range(2))
    late, early = second.submit_task(ONE), first.submit_task(ONE)
    own: concurrent.futures.Future[int] = concurrent.futures.Future()
    ended = as_completed([late, early, early, own], LONG)
    with Runtime([first]):
        assert next(ended) is early
    own.set_result(1)
    assert next(ended) is own
    with Runtime([second]):
        assert next(ended) is late
    assert list(ended) == []


def test_those_that_do_not_come_in_time_are_counted() -> None:
    pool = TaskPool(lambda x: x, name="pool")
    one, two = pool.submit_task(ONE), pool.submit_task(ONE)
    one.cancel()
    ended = as_completed([one, two], 0.01)
    assert next(ended) is one
    with pytest.raises(TimeoutError, match="1 of 2 requests"):
        next(ended)


def queues() -> int:
    gc.collect()
    return sum(type(one) is queue.SimpleQueue for one in gc.get_objects())


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("owner", ["a pool", "an executor"])
def test_a_wait_that_ends_early_leaves_nothing_behind(owner: str) -> None:
    """A polling loop left a callback and a queue in each turn, and dropped iterators kept results."""
    pool = TaskPool(lambda x: x, name="pool")

    def pending() -> Any:
        return pool.submit_task(ONE) if owner == "a pool" else concurrent.futures.Future()

    slow, ended = pending(), pending()
    ended.cancel()
    before = queues()
    for _ in range(20):
        wait([slow], timeout=0)
        wait([slow, ended], return_when=FIRST_COMPLETED)
        for _ in as_completed([slow, ended]):
            break
        with pytest.raises(TimeoutError):
            list(as_completed([slow, ended], timeout=0))
    assert queues() == before
    if owner == "an executor":
        assert slow._done_callbacks == []


def test_a_callback_may_be_taken_back() -> None:
    pool = TaskPool(lambda x: x, name="pool")
    future, told = pool.submit_task(ONE), []
    first, second = told.append, lambda future: told.append("second")
    future.add_done_callback(first)
    future.add_done_callback(second)
    future.add_done_callback(first)
    assert future.remove_done_callback(first) == 2
    assert future.remove_done_callback(first) == 0
    with Runtime([pool]):
        future.result(LONG)
    assert told == ["second"]
    assert future.remove_done_callback(second) == 0
