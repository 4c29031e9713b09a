"""Futures of requests: outcomes, callbacks, cancellation, coroutines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gate import Gate
from limits import LONG
from torch import Tensor

from pymoe.runtime import Future, QueueFull, Runtime, TaskPool

ONE = torch.ones(1)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def raising(error: BaseException) -> Callable[[Tensor], Tensor]:
    def planted_failure(x: Tensor) -> Tensor:
        raise error

    return planted_failure


# --- outcomes ---


def test_states_of_a_request(gate: Gate) -> None:
    pool = TaskPool(gate, name="pool")
    future = pool.submit_task(ONE)
    assert (future.done(), future.running(), future.cancelled()) == (False, False, False)
    with Runtime([pool]):
        gate.begun.wait(LONG)
        assert (future.done(), future.running(), future.cancelled()) == (False, True, False)
        assert not future.cancel()
        gate.open.set()
        assert future.result(LONG) == 1
        assert (future.done(), future.running(), future.cancelled()) == (True, False, False)
        assert future.exception() is None
        assert future.result() is future.result(0)
        assert not future.cancel()


@pytest.mark.parametrize(
    "error", [ValueError("planted"), KeyError("k"), SystemExit(3), OSError(2, "no"), StopIteration(), GeneratorExit()]
)
def test_every_request_of_a_batch_raises_what_the_batch_raised(error: BaseException) -> None:
    pool = TaskPool(raising(error), name="pool")
    futures = [pool.submit_task(ONE) for _ in range(5)]
    with Runtime([pool]):
        for future in futures:
            with pytest.raises(type(error)) as caught:
                future.result(LONG)
            assert caught.value is error
            assert future.exception() is error
            assert "planted_failure" in "".join(traceback.format_tb(error.__traceback__))
        assert pool._statistics()["failed"] == 5


def test_asking_again_does_not_grow_the_traceback() -> None:
    pool = TaskPool(raising(ValueError("planted")), name="pool")
    future = pool.submit_task(ONE)
    depths = set()
    with Runtime([pool]):
        for _ in range(10):
            with pytest.raises(ValueError, match="planted") as caught:
                future.result(LONG)
            depths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(depths) == 1


def test_a_failed_batch_touches_no_other() -> None:
    def process(x: Tensor) -> Tensor:
        if (x < 0).any():
            raise ArithmeticError("planted")
        return x

    pool = TaskPool(process, name="pool", max_batch_size=1)
    futures = [pool.submit_task(torch.full((1,), -1.0 if i % 3 == 0 else 1.0)) for i in range(30)]
    with Runtime([pool]):
        for i, future in enumerate(futures):
            assert isinstance(future.exception(LONG), ArithmeticError) == (i % 3 == 0)


def test_timeout(gate: Gate) -> None:
    pool = TaskPool(gate, name="pool")
    with Runtime([pool]):
        future = pool.submit_task(ONE)
        for timeout in (0, 0.01, -1):
            with pytest.raises(TimeoutError, match="not done in time"):
                future.result(timeout)
        with pytest.raises(TimeoutError):
            future.exception(timeout=0.0)
        with pytest.raises(ValueError, match="nan"):
            future.result(float("nan"))
        with pytest.raises(TypeError):
            future.result("soon")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            future.result(1, 2)  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            future.result(time=1)  # type: ignore[call-arg]
        gate.open.set()
        assert future.result(1e30) == 1


def test_futures_are_not_made_by_hand() -> None:
    with pytest.raises(TypeError):
        Future()


# --- cancellation ---


def test_a_cancelled_request_never_runs() -> None:
    seen: list[int] = []

    def process(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x

    pool = TaskPool(process, name="pool")
    futures = [pool.submit_task(ONE) for _ in range(10)]
    for future in futures[::2]:
        assert future.cancel()
        assert future.cancel()
        assert future.cancelled()
        assert future.done()
        for ask in (future.result, future.exception):
            with pytest.raises(concurrent.futures.CancelledError):
                ask()
    with Runtime([pool]):
        assert all(future.result(LONG) == 1 for future in futures[1::2])
    assert sum(seen) == 5
    assert pool._statistics()["cancelled"] == 5


# --- callbacks ---


def test_callbacks_run_once_each_in_order_with_the_future(gate: Gate) -> None:
    pool = TaskPool(gate, name="pool")
    called: list[Any] = []
    done = threading.Event()
    with Runtime([pool]):
        future = pool.submit_task(ONE)
        future.add_done_callback(lambda it: called.append((1, it)))
        future.add_done_callback(lambda it: called.append((2, it)))
        future.add_done_callback(lambda it: done.set())
        assert not called
        gate.open.set()
        assert done.wait(LONG)
        assert called == [(1, future), (2, future)]
        future.add_done_callback(lambda it: called.append(3))
        assert called[-1] == 3
    with pytest.raises(TypeError, match="expected a function, got int"):
        future.add_done_callback(3)  # type: ignore[arg-type]


def test_what_a_callback_raises_is_logged_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    pool = TaskPool(lambda x: x, name="pool")
    called = threading.Event()

    def bad(future: Future) -> None:
        raise ZeroDivisionError("planted")

    future = pool.submit_task(ONE)
    future.add_done_callback(bad)
    future.add_done_callback(lambda it: called.set())
    other = pool.submit_task(ONE)
    with caplog.at_level(logging.ERROR, "pymoe.runtime"), Runtime([pool]):
        assert future.result(LONG) == other.result(LONG) == 1
        assert called.wait(LONG)
        assert pool(ONE) == 1
    (record,) = [record for record in caplog.records if record.name == "pymoe.runtime"]
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_a_callback_may_submit_and_wait() -> None:
    pool = TaskPool(lambda x: x + 1, name="pool")
    results: list[Tensor] = []
    done = threading.Event()

    def again(future: Future) -> None:
        results.append(pool.submit_task(future.result()).result(LONG))
        done.set()

    with Runtime([pool], num_workers=2):
        pool.submit_task(ONE).add_done_callback(again)
        assert done.wait(LONG)
    assert results == [3]


def test_callbacks_see_cancellation() -> None:
    pool = TaskPool(lambda x: x, name="pool")
    future = pool.submit_task(ONE)
    seen: list[bool] = []
    future.add_done_callback(lambda it: seen.append(it.cancelled()))
    future.cancel()
    assert seen == [True]


def test_a_future_in_a_cycle_with_its_error_is_collected() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("planted")

    class Holder:
        future: Future

    def ask(pool: TaskPool) -> weakref.ref[Any]:
        holder = Holder()
        holder.future = pool.submit_task(ONE)
        error = holder.future.exception()
        assert error is not None
        error.holder = holder  # type: ignore[attr-defined]
        return weakref.ref(holder)

    pool = TaskPool(fail, name="pool")
    with Runtime([pool]):
        alive = ask(pool)
        gc.collect()
        assert alive() is None


# --- coroutines ---


def test_await() -> None:
    pool = TaskPool(lambda x: x * 2, name="pool")
    failing = TaskPool(raising(ValueError("planted")), name="failing")

    async def client(i: int) -> Tensor:
        total = ONE * 0
        for _ in range(20):
            total += await pool.submit_task(torch.full((1,), float(i)))
        return total

    async def main() -> list[Tensor]:
        with pytest.raises(ValueError, match="planted"):
            await failing.submit_task(ONE)
        finished = pool.submit_task(ONE)
        assert await finished == await finished == 2
        return await asyncio.gather(*[client(i) for i in range(50)])

    with Runtime([pool, failing]):
        assert [float(total) for total in asyncio.run(main())] == [40.0 * i for i in range(50)]


def test_several_loops_and_threads_at_once() -> None:
    pool = TaskPool(lambda x: x + 1, name="pool")
    results: list[float] = []

    async def main() -> None:
        for _ in range(50):
            got = await asyncio.gather(*[pool.submit_task(torch.full((1,), float(i))) for i in range(8)])
            results.append(sum(map(float, got)))

    with Runtime([pool], num_workers=2):
        threads = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            assert pool(ONE) == 2
        for thread in threads:
            thread.join(LONG)
    assert results == [36.0] * 150


def test_cancelling_a_task_cancels_its_request() -> None:
    pool = TaskPool(lambda x: x, name="pool")

    async def main() -> None:
        future = pool.submit_task(ONE)

        async def client() -> Tensor:
            return await future

        task = asyncio.create_task(client())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert future.cancelled()

        with pytest.raises(asyncio.TimeoutError):  # another class than TimeoutError before Python 3.11
            await asyncio.wait_for(client_of(pool.submit_task(ONE)), 0.01)

    async def client_of(future: Future) -> Tensor:
        return await future

    asyncio.run(main())
    assert pool._statistics()["cancelled"] == 2


def test_a_loop_that_was_closed_harms_nobody(gate: Gate) -> None:
    pool = TaskPool(gate, name="pool")
    futures: list[Future] = []

    async def main() -> None:
        futures.append(pool.submit_task(ONE))
        task = asyncio.ensure_future(wait_for(futures[0]))
        await asyncio.sleep(0)
        del task

    async def wait_for(future: Future) -> None:
        await future

    loop = asyncio.new_event_loop()
    with Runtime([pool]):
        loop.run_until_complete(main())
        loop.close()
        gate.open.set()
        assert futures[0].result(LONG) == 1
        assert pool(ONE) == 1
    gc.collect()


def test_submit_async_does_not_block_the_loop_while_the_pool_is_full() -> None:
    pool = TaskPool(lambda x: x + 1, name="pool", capacity=2)

    async def main() -> None:
        tasks = [asyncio.create_task(pool.submit_async(ONE * i)) for i in range(12)]
        await asyncio.sleep(0.02)
        assert pool._statistics()["queued"] == 2
        with Runtime([pool]):
            assert [float(await task) for task in tasks] == [i + 1.0 for i in range(12)]

    asyncio.run(main())


def test_submit_async_asks_for_room_and_takes_it_at_once() -> None:
    """If room was tested before submitting, another thread could take it in between, and the event loop waited."""
    pool = TaskPool(lambda x: x + 1, name="pool", capacity=2)
    futures = [pool._try_submit(ONE) for _ in range(3)]
    assert futures[2] is None
    with Runtime([pool]):
        assert [future.result(LONG) for future in futures[:2]] == [2, 2]
    refusing = TaskPool(lambda x: x, name="refusing", capacity=1, on_full="raise")
    refusing.submit_task(ONE)
    with pytest.raises(QueueFull, match="capacity 1"):
        asyncio.run(refusing.submit_async(ONE))


def test_cancelling_submit_async_leaves_nothing_behind() -> None:
    pool = TaskPool(lambda x: x + 1, name="pool", capacity=1)

    async def main() -> None:
        first = pool.submit_task(ONE)
        task = asyncio.create_task(pool.submit_async(ONE))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        first.cancel()  # now there is room, and the abandoned request passes through

    asyncio.run(main())
    assert pool._statistics()["queued"] == 0
