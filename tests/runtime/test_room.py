"""Tests that requests wait for room in a full pool in order, on one thread, and are never sent after a cancellation."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gate import Gate
from limits import LONG

from pymoe.runtime import Runtime, TaskPool
from pymoe.runtime.room import Place, RoomLine

X = torch.ones(1, 2)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Room:
    """A pool with or without room, and the requests that it has received."""

    def __init__(self) -> None:
        self.there, self.got, self.asked = threading.Event(), [], threading.Semaphore(0)
        self.line = RoomLine(self.wait)

    def wait(self) -> None:
        self.asked.release()
        assert self.there.wait(LONG)

    def submit(self, name: Any) -> Any:
        if not self.there.is_set():
            return None
        self.got.append(name)
        return name

    def join(self, name: Any) -> Place:
        return self.line.join(lambda: self.submit(name))


def threads() -> int:
    return sum(one.name == "pymoe-room" for one in threading.enumerate())


# --- the line ---


def test_requests_are_submitted_in_their_order_and_those_that_left_are_not() -> None:
    room, before = Room(), threads()
    places = [room.join(name) for name in range(6)]
    assert threads() == before + 1
    assert places[0].leave()
    assert places[3].cancel()
    assert not places[3].leave()
    room.there.set()
    assert [place.result(LONG) for place in places if not place.cancelled()] == [1, 2, 4, 5]
    assert room.got == [1, 2, 4, 5]
    until(lambda: threads() == before)
    assert room.join("later").result(LONG) == "later"


def test_a_request_that_was_given_up_leaves_its_place_and_its_tensors_at_once() -> None:
    """The request stayed behind earlier requests, with its tensors, for as long as the expert hung."""
    room = Room()
    room.join("patient")
    assert room.asked.acquire(timeout=LONG)
    given_up = torch.ones(4)
    ref = weakref.ref(given_up)
    place = room.join(given_up)
    del given_up
    assert ref() is not None
    assert place.cancel()
    assert len(room.line._waiting) == 1
    assert ref() is None
    room.there.set()


def test_a_request_cancelled_while_it_is_submitted_is_cancelled_in_the_pool() -> None:
    pool = TaskPool(lambda x: x, name="pool")
    begun, go_on = threading.Event(), threading.Event()

    def submit() -> Any:
        begun.set()
        assert go_on.wait(LONG)
        return pool._try_submit(X)

    place = RoomLine(lambda: None).join(submit)
    assert begun.wait(LONG)
    cancelling = threading.Thread(target=place.cancel)
    cancelling.start()
    go_on.set()
    cancelling.join(LONG)
    assert place.result(LONG).cancelled()
    with Runtime([pool]):
        pass
    assert pool._statistics()["batches"] == 0


@pytest.mark.parametrize("error", [ValueError("of the pool"), SystemExit()])
def test_an_error_of_the_pool_is_its_requests_own(error: BaseException) -> None:
    """SystemExit ended the thread, and no later request was submitted."""
    room = Room()
    room.there.set()

    def fails() -> None:
        raise error

    assert room.line.join(fails).exception(LONG) is error
    assert room.join("next").result(LONG) == "next"


def test_where_no_thread_can_be_started_the_request_does_not_wait_and_the_next_one_tries_again() -> None:
    """The thread counted as started for ever, and no request was submitted any more."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    room = Room()
    room.there.set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            room.join("refused")
    assert room.join("next").result(LONG) == "next"
    assert room.got == ["next"]


def test_a_wait_in_a_thread_ends_with_the_request_or_without_room() -> None:
    room = Room()
    assert room.join("late").wait(0.02) is None
    place = room.join("in time")
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(place.wait(LONG)))
    waiting.start()
    room.there.set()
    waiting.join(LONG)
    assert (found, room.got) == (["in time"], ["in time"])


# --- pools ---


def full_pool() -> tuple[TaskPool, Gate, list[Any]]:
    """Return a pool that is not served yet, and has no room for a third request."""
    gate = Gate()
    return (pool := TaskPool(gate, name="held", capacity=1, max_batch_size=1)), gate, [pool.submit_task(X)]


def test_a_wait_for_room_ends_when_there_is_room_or_the_pool_closes() -> None:
    pool, gate, requests = full_pool()
    ended = threading.Semaphore(0)

    def wait() -> None:
        room()
        ended.release()

    room = pool._room()
    with Runtime([pool]):
        assert gate.begun.wait(LONG)
        room()
        requests.append(pool.submit_task(X))
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not ended.acquire(timeout=0.05)
        gate.open.set()
        assert ended.acquire(timeout=LONG)
        for request in requests:
            request.result()
        room()
    with pytest.raises(RuntimeError, match="closed"):
        room()


def test_a_pool_that_is_dropped_while_requests_waited_ends_the_thread() -> None:
    """The thread would keep alive a full pool that no runtime serves."""
    before = threads()
    pool = TaskPool(lambda x: x, name="unserved", capacity=1)
    pool.submit_task(X)
    ref = weakref.ref(pool)
    place = pool._line.join(lambda: ref()._try_submit(X))
    until(lambda: threads() == before + 1)
    assert place.cancel()
    del pool
    gc.collect()
    assert ref() is None
    until(lambda: threads() == before)


def test_requests_that_wait_when_a_pool_is_closed_get_its_error() -> None:
    pool, gate, requests = full_pool()
    with Runtime([pool]) as runtime:
        assert gate.begun.wait(LONG)
        requests.append(pool.submit_task(X))
        place = pool._line.join(lambda: pool._try_submit(X))
        stopping = threading.Thread(target=runtime.shutdown)
        stopping.start()
        with pytest.raises(RuntimeError, match="closed"):
            place.result(LONG)
        gate.open.set()
        stopping.join(LONG)


# --- coroutines ---


def test_coroutines_that_wait_for_room_take_no_thread_of_the_loop_and_hold_up_no_end() -> None:
    """Each coroutine took a thread of the default executor until there was room, and asyncio.run waited for these
    threads.
    """
    pool, gate, requests = full_pool()
    unrelated = ThreadPoolExecutor(1)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(unrelated)
        tasks = [asyncio.ensure_future(pool.submit_async(X)) for _ in range(40)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(loop.run_in_executor(None, lambda: 1), LONG) == 1
        for task in tasks[:20]:
            task.cancel()
        await asyncio.wait(tasks[:20])
        assert len(pool._line._waiting) == 20
        with pytest.raises(TimeoutError, match="no room"):
            await pool.submit_async(X, timeout=0.02)

    ended = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    with Runtime([pool]):
        assert gate.begun.wait(LONG)
        requests.append(pool.submit_task(X))
        ended.start()
        ended.join(LONG / 4)
        assert not ended.is_alive()  # asyncio.run has cancelled the others
        assert not pool._line._waiting
        gate.open.set()
        for request in requests:
            request.result()
    assert pool._statistics()["submitted"] == len(requests)


@pytest.mark.parametrize("full", [False, True])
def test_a_coroutine_with_a_time_that_is_no_number_of_seconds_gets_the_error_of_submit_task(full: bool) -> None:
    """NaN was taken for zero, so the request timed out."""
    pool = TaskPool(lambda x: x, name="pool", capacity=1)
    x = torch.ones(1, 1)
    if full:
        pool.submit_task(x)
    with pytest.raises(ValueError, match="timeout must be a number of seconds, got nan"):
        asyncio.run(asyncio.wait_for(pool.submit_async(x, timeout=math.nan), LONG / 4))
    with pytest.raises(TypeError, match="must be real number, not str"):
        asyncio.run(pool.submit_async(x, timeout="1"))  # type: ignore[arg-type]
    assert pool._statistics()["queued"] == full
    assert not pool._line._waiting


def test_coroutines_get_their_results_once_there_is_room() -> None:
    pool, gate, _ = full_pool()

    async def main() -> list[Any]:
        tasks = [asyncio.ensure_future(pool.submit_async(i * X)) for i in range(10)]
        await asyncio.sleep(0.02)
        gate.open.set()
        return await asyncio.wait_for(asyncio.gather(*tasks), LONG)

    with Runtime([pool]):
        results = asyncio.run(main())
    assert all(torch.equal(result, i * X) for i, result in enumerate(results))
