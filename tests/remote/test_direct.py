"""Requests that are sent separately: those that wait for room, and callbacks that block."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from experts import WIDTH, Held, mlp, of
from limits import LONG

from pymoe.remote import ExpertServer, channel, connect, requests
from pymoe.runtime import MixtureOfExpertBackends, QueueFull, as_completed, wait
from pymoe.runtime.future import tell
from pymoe.runtime.timers import call_later, call_soon

X = torch.ones(2, WIDTH)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Full:
    """A connection that allows one request at a time, which an expert holds."""

    def __init__(self, there: Any, held: Held, backend: Any) -> None:
        self.there, self.held, self.backend = there, held, backend
        (remote,) = there.backends()
        self.pool = remote.backward_pool
        self.first = self.pool.submit_task(X, X)
        assert held.begun.wait(LONG)

    def ends(self) -> None:
        """Let the request end, and check that it was the only one that was sent."""
        self.held.open.set()
        self.first.result(LONG)
        until(lambda: self.pool._permits._free == 1)
        until(lambda: not any(one.name == "pymoe-room" for one in threading.enumerate()))
        assert self.there.counts["attempts"] == 1
        assert self.backend.updates == 1


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Full]:
    monkeypatch.setattr(requests, "MAX_UNDER_WAY", 1)
    held = Held()
    backend = of(held)
    with ExpertServer(backend, grace=0) as server, connect(server.address, coalesce=False, timeout=LONG) as there:
        yield Full(there, held, backend)
        held.open.set()


# --- room ---


def test_gradients_of_coroutines_that_gave_up_without_room_are_never_sent(full: Full) -> None:
    """Their threads kept waiting and sent them later: 31 updates where 20 had been requested."""

    async def main() -> None:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(full.pool.submit_async(X, X), 0.02)
            with pytest.raises(TimeoutError, match="no room"):
                await full.pool.submit_async(X, X, timeout=0.02)
            task = asyncio.ensure_future(full.pool.submit_async(X, X))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not full.pool._line._waiting

    asyncio.run(main())
    full.ends()


def test_coroutines_that_wait_for_room_hold_up_neither_asyncio_run_nor_its_executor(full: Full) -> None:
    """Their threads waited until the connection's timeout, and asyncio.run waited for the threads."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        tasks = [asyncio.ensure_future(full.pool.submit_async(X, X)) for _ in range(8)]
        await asyncio.sleep(0.01)
        assert await asyncio.wait_for(loop.run_in_executor(None, lambda: 1), LONG) == 1
        assert not any(task.done() for task in tasks)

    running = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    running.start()
    running.join(LONG / 4)
    assert not running.is_alive()
    full.ends()


def test_a_thread_that_waits_for_room_raises_when_its_time_is_over(full: Full) -> None:
    for timeout in (0.02, 0, -1.0):
        with pytest.raises(QueueFull, match="1 requests are under way"):
            full.pool.submit_task(X, X, timeout=timeout)
    full.ends()


def test_requests_get_room_in_their_order(full: Full) -> None:
    """A request without a time limit may wait for room, too; a semaphore raised OverflowError."""
    order: list[int] = []  # in which requests reach the expert; their threads may go on in another order
    threads = []
    full.held.register_forward_pre_hook(lambda _, args: order.append(int(args[0][0, 0])))

    def submit(i: int) -> None:
        full.pool.submit_task(i * X, X, timeout=math.inf)

    for i in range(3):
        threads.append(threading.Thread(target=submit, args=(i,)))
        threads[-1].start()
        until(lambda i=i: len(full.pool._line._waiting) == i + 1)
    full.held.open.set()
    for thread in threads:
        thread.join(LONG)
    until(lambda: full.backend.updates == 4)
    assert order == [0, 1, 2]


def test_requests_without_room_end_with_their_connection(full: Full) -> None:
    found: list[Any] = []

    def ask() -> None:
        try:
            full.pool.submit_task(X, X)
        except Exception as error:
            found.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    until(lambda: full.pool._line._waiting)
    full.there.close()
    waiting.join(LONG)
    assert [type(error).__name__ for error in found] == ["ServerLost"]


# --- callbacks ---


def test_a_callback_may_wait_for_another_request_of_its_connection() -> None:
    """The callback ran on the thread that reads the connection's answers, and waited for ever."""
    with ExpertServer(mlp("a")) as server, connect(server.address, coalesce=False, timeout=LONG) as there:
        (a,) = there.backends()
        found: list[Any] = []
        done = threading.Event()

        def ask_again(future: Any) -> None:
            found.append(a.forward_pool(future.result()[0])[0].shape)
            done.set()

        for _ in range(3):
            done.clear()
            a.forward_pool.submit_task(X).add_done_callback(ask_again)
            assert done.wait(LONG / 4)
        assert found == [X.shape] * 3


def test_callbacks_run_in_their_order_on_threads_of_timers() -> None:
    held, names = Held(), []
    with ExpertServer(of(held)) as server, connect(server.address, coalesce=False, timeout=LONG) as there:
        (remote,) = there.backends()
        future = remote.forward_pool.submit_task(X)
        done = threading.Event()
        for i in range(5):
            future.add_done_callback(lambda _, i=i: names.append((i, threading.current_thread().name)))
        future.add_done_callback(lambda _: done.set())
        held.open.set()
        assert done.wait(LONG)
        assert names == [(i, "pymoe-timers") for i in range(5)]
        future.add_done_callback(lambda _: names.append(threading.current_thread().name))
        assert names[-1] == threading.current_thread().name


@pytest.mark.parametrize("way", ["await", "as_completed", "wait", "mixture"])
def test_an_answer_that_only_this_library_waits_for_takes_no_other_thread(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer was handed to a timer thread, which cost four more thread switches."""
    held, handed = Held(), []
    monkeypatch.setattr(requests, "call_soon", lambda *call: (handed.append(1), call_soon(*call)))
    with ExpertServer(of(held)) as server, connect(server.address, coalesce=False, timeout=LONG) as there:
        (remote,) = there.backends()
        timer = threading.Thread(target=lambda: (held.begun.wait(LONG), time.sleep(0.1), held.open.set()))
        timer.start()
        if way == "mixture":
            mixture = MixtureOfExpertBackends([remote], top_k=1)
            with torch.no_grad():
                assert mixture(X).shape == X.shape
        elif way == "await":

            async def ask() -> Any:
                return await remote.forward_pool.submit_async(X)

            assert torch.equal(asyncio.run(ask())[0], X)
        else:
            future = remote.forward_pool.submit_task(X)
            done = wait([future], LONG).done if way == "wait" else set(as_completed([future], LONG))
            assert done == {future}
        timer.join()
        assert not handed
        held.begun.clear()
        held.open.clear()
        future, called = remote.forward_pool.submit_task(X), threading.Event()
        tell(future, lambda _: None)
        future.add_done_callback(lambda _: called.set())
        assert held.begun.wait(LONG)
        held.open.set()
        assert called.wait(LONG)
        assert handed == [1]


def test_callbacks_that_block_take_no_more_threads_than_requests_may_be_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that sent requests faster than its callbacks ended had 2,700 threads after four seconds."""
    monkeypatch.setattr(requests, "MAX_UNDER_WAY", 3)
    go_on, called = threading.Event(), threading.Semaphore(0)

    def block(_: Any) -> None:
        called.release()
        assert go_on.wait(LONG)
        raise KeyboardInterrupt  # reported, and its permit is returned

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    held = Held()
    with ExpertServer(of(held)) as server, connect(server.address, coalesce=False, timeout=LONG) as there:
        pool = there.backends()[0].forward_pool
        futures = [pool.submit_task(X) for _ in range(3)]
        for future in futures:
            future.add_done_callback(block)
        held.open.set()
        for future in futures:
            assert called.acquire(timeout=LONG)
            assert torch.equal(future.result(LONG)[0], X)
        with pytest.raises(QueueFull):
            pool.submit_task(X, timeout=0.05)
        go_on.set()
        assert torch.equal(pool(X)[0], X)
        until(lambda: pool._permits._free == 3)


def test_a_callback_that_waits_for_a_deadline_stops_none() -> None:
    """Once the deadline had passed between two attempts, the callback ran on the only timer thread, and stopped all
    deadlines.
    """
    hung = Held()
    with (
        ExpertServer(of(hung), grace=0) as server,
        ExpertServer(mlp("a")) as other,
        connect(server.address, timeout=LONG) as there,
        connect(other.address, coalesce=False, timeout=LONG) as lost,
    ):
        (remote,), (a,) = there.backends(), lost.backends()
        other.drain()
        found: list[Any] = []
        done = threading.Event()

        def wait_for_a_deadline(future: Any) -> None:
            found.append(type(future.exception()).__name__)
            try:
                remote.forward_pool(X, timeout=0.2)
            except TimeoutError:
                found.append("TimeoutError")
            done.set()

        a.forward_pool.submit_task(X, timeout=0.2).add_done_callback(wait_for_a_deadline)
        assert done.wait(LONG / 4)
        assert found == ["ServerLost", "TimeoutError"]
        called = threading.Event()
        call_later(0.0, called.set)
        assert called.wait(LONG)
        hung.open.set()


# --- no thread can be started ---


def test_requests_are_answered_where_no_thread_can_be_started_for_their_callbacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, called = Held(), threading.Event()

    def fails(*all_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with ExpertServer(of(held)) as server, connect(server.address, coalesce=False, timeout=LONG) as there:
        (remote,) = there.backends()
        future = remote.forward_pool.submit_task(X)
        future.add_done_callback(lambda _: called.set())
        monkeypatch.setattr("pymoe.runtime.timers.call_later", fails)
        held.open.set()
        assert torch.equal(future.result(LONG)[0], X)
        assert called.wait(LONG)


def test_a_request_that_cannot_be_repeated_for_want_of_a_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*all_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with ExpertServer(mlp("a")) as server, connect(server.address, coalesce=False, timeout=LONG) as there:
        (a,) = there.backends()
        server.drain()
        monkeypatch.setattr(requests, "call_later", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            a.forward_pool.submit_task(X).result(LONG)


def test_a_server_that_nobody_can_watch_is_asked_and_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*all_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with ExpertServer(mlp("a")) as server, connect(server.address, timeout=LONG) as there:
        (a,) = there.backends()
        there._set_reachable(False)
        with monkeypatch.context() as patch:
            patch.setattr(channel, "call_later", fails)
            there._watch_after(0.0)
        assert a.forward_pool.served
        watched: list[int] = []
        monkeypatch.setattr(there, "watch", lambda: watched.append(1))
        for _ in range(2):
            a.forward_pool(X)
        assert watched == [1]
