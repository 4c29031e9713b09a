"""Hostile code in clients: loops that raise, Ctrl-C in callbacks, cycles, refused starts."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from limits import LONG
from torch import Tensor

from pymoe.runtime import Future, Runtime, TaskPool

ONE = torch.ones(1)


def pool_of(process: Callable[[Tensor], Any] = lambda x: x + 1, **options: Any) -> TaskPool:
    return TaskPool(process, name="pool", **options)


# --- loops that raise when they are called ---


class CallsFail:
    """Makes a loop's first calls from other threads raise."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *errors: BaseException) -> None:
        self.left = list(errors)
        self.call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any) -> Any:
        if self.left:
            raise self.left.pop(0)
        return self.call(*args)


def test_a_loop_that_raises_once_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    awaited = threading.Event()

    async def main() -> Tensor:
        loop = asyncio.get_running_loop()
        CallsFail(loop, MemoryError("planted"))
        loop.call_later(0, awaited.set)  # runs after the first step of the waiting task
        return await asyncio.wait_for(pool.submit_async(ONE), LONG)

    pool = pool_of(lambda x: x + int(awaited.wait(LONG)))
    with Runtime([pool], num_workers=1), caplog.at_level(logging.ERROR, "pymoe.runtime"):
        assert asyncio.run(main()) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "an event loop could not be told that requests are done"
    ]
    assert "planted" in caplog.text


def test_who_waits_in_a_loop_that_raises_twice_is_told_with_the_next(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        calls = CallsFail(asyncio.get_running_loop(), MemoryError(), MemoryError())
        first = asyncio.ensure_future(pool.submit_async(ONE))
        end = time.monotonic() + LONG
        while calls.left and time.monotonic() < end:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(pool.submit_async(ONE), LONG)
        assert await asyncio.wait_for(first, LONG) == 2

    pool = pool_of()
    with Runtime([pool], num_workers=1), caplog.at_level(logging.ERROR, "pymoe.runtime"):
        asyncio.run(main())
    assert len(caplog.records) == 2


def test_ctrl_c_while_a_loop_is_told_is_neither_lost_nor_loses_who_waits() -> None:
    seen: list[bool] = []

    async def main() -> None:
        future = pool.submit_task(ONE)

        async def wait() -> None:
            try:
                await future
            finally:
                seen.append(future.cancelled())

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        CallsFail(asyncio.get_running_loop(), KeyboardInterrupt())
        future.cancel()  # this thread notifies the loop
        await asyncio.wait_for(task, LONG)

    pool = pool_of()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert seen == [True]


def test_nobody_waits_in_a_loop_that_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of()
    future = pool.submit_task(ONE)
    loop = asyncio.new_event_loop()
    waiters: list[weakref.ref[asyncio.Future[None]]] = []

    class Waiter(asyncio.Future[None]):
        def __init__(self) -> None:
            super().__init__(loop=loop)
            waiters.append(weakref.ref(self))

    async def wait() -> None:
        await future

    loop.create_future = Waiter  # type: ignore[method-assign, assignment]
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task
    (alive,) = waiters
    gc.collect()
    assert alive() is not None
    with caplog.at_level(logging.ERROR, "pymoe.runtime"):
        assert future.cancel()
    gc.collect()
    assert alive() is None
    assert not [record for record in caplog.records if record.name == "pymoe.runtime"]


# --- Ctrl-C in a callback ---


def test_ctrl_c_in_a_callback_of_the_main_thread_is_raised_there() -> None:
    pool = pool_of()
    future = pool.submit_task(ONE)

    def interrupted(future: Future) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(LONG)  # ends with the signal

    future.add_done_callback(interrupted)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - raised between two instructions, at the first or after it
        future.cancel()
        time.sleep(0)
    assert future.cancelled()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_a_callback_raises_on_a_worker_is_logged(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    ran = threading.Event()
    go = threading.Event()

    def process(x: Tensor) -> Tensor:
        go.wait(LONG)
        return x

    def fail(future: Future) -> None:
        ran.set()
        raise error("planted")

    pool = pool_of(process)
    with caplog.at_level(logging.ERROR, "pymoe.runtime"), Runtime([pool], num_workers=1):
        future = pool.submit_task(ONE)
        future.add_done_callback(fail)
        go.set()
        assert ran.wait(LONG)
    assert "a callback of a request's future raised" in caplog.text
    assert "planted" in caplog.text


# --- cycles ---


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("kind", ["object", "dict", "list"])
def test_a_result_that_refers_to_its_future_is_collected(kind: str) -> None:
    class Box:
        future: Any = None

    def process(x: Tensor) -> Any:
        return {"object": Box(), "dict": {}, "list": [Box()]}[kind]

    pool = pool_of(process)
    with Runtime([pool], num_workers=1):
        future = pool.submit_task(ONE)
        result = future.result(LONG)
        if kind == "object":
            result.future = future
        elif kind == "dict":
            result["future"] = future
        else:
            result[0].future = future
        alive = weakref.ref(future)
        del future, result
        gc.collect()
        assert alive() is None


# --- starts that are refused ---


def test_a_refused_start_leaves_its_other_pools_as_they_were() -> None:
    served, innocent, closed = pool_of(), pool_of(min_batch_size=2), pool_of()
    with Runtime([closed], num_workers=1):
        pass
    with Runtime([served], num_workers=1):
        queued = innocent.submit_task(ONE)
        with pytest.raises(RuntimeError, match="served by another Runtime"):
            Runtime([innocent, closed, served], num_workers=1).start()
        assert served(ONE) == 2
        assert not queued.done()
        later = innocent.submit_task(ONE)
        with pytest.raises(RuntimeError, match="closed"):
            closed.submit_task(ONE)
    with Runtime([innocent, closed], num_workers=1):
        assert queued.result(LONG) == later.result(LONG) == 2
        assert closed(ONE) == 2


def test_a_batch_on_its_clients_thread_may_start_a_runtime_after_its_own_was_dropped() -> None:
    """The process checks whether dropped runtimes have ended, which a thread inside one of their batches cannot ask."""
    started, go = threading.Event(), threading.Event()

    def occupy(x: Tensor) -> Tensor:
        started.set()
        go.wait(LONG)
        return x

    def process(x: Tensor) -> Tensor:
        threads.append(threading.get_ident())
        runtimes.clear()
        gc.collect()
        with Runtime([other], num_workers=1):
            return other(x)

    threads: list[int] = []
    other, busy, pool = pool_of(), pool_of(occupy), pool_of(process)
    runtimes = [Runtime([pool, busy], num_workers=1)]
    runtimes[0].start()
    occupied = busy.submit_task(ONE)
    assert started.wait(LONG)
    try:
        assert pool(ONE) == 2
        assert threads == [threading.get_ident()]
    finally:
        go.set()
    assert occupied.result(LONG) == 1
