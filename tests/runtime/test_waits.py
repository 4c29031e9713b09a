"""Waits that once never ended: callbacks that wait, experts that ask experts, stops from inside."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from limits import LONG
from torch import Tensor

from pymoe.runtime import Runtime, TaskPool

ROW = torch.ones(1, 4)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(LONG)
    return not thread.is_alive()


def test_a_callback_may_wait_for_another_request_of_its_batch() -> None:
    """All requests of a batch end before any callback runs."""
    pool = TaskPool(lambda x: x, name="pool", min_batch_size=2)
    first, second = pool.submit_task(ROW), pool.submit_task(ROW)
    seen: list[Tensor] = []
    first.add_done_callback(lambda _: seen.append(second.result()))
    with Runtime([pool], num_workers=1):
        second.result(LONG)
    assert len(seen) == 1


def test_a_callback_may_take_a_lock_that_a_client_of_the_same_batch_holds() -> None:
    """The client is woken before the callback runs, not after it."""
    pool = TaskPool(lambda x: x, name="pool", min_batch_size=2)
    lock, waits = threading.Lock(), threading.Event()

    def client() -> None:
        with lock:
            future = pool.submit_task(ROW)
            waits.set()
            future.result()

    def callback(_: object) -> None:
        with lock:
            pass

    thread = in_thread(client)
    assert waits.wait(LONG)
    runtime = Runtime([pool], num_workers=1)
    future = pool.submit_task(ROW)
    future.add_done_callback(callback)
    stopper = in_thread(lambda: (runtime.start(), future.result(), runtime.shutdown()))
    assert ended(thread)
    assert ended(stopper)


def test_a_callback_on_a_client_may_shut_the_runtime_down() -> None:
    pool = TaskPool(lambda x: x, name="pool", min_batch_size=100)
    runtime = Runtime([pool], num_workers=1)
    runtime.start()
    future = pool.submit_task(ROW)
    future.add_done_callback(lambda _: runtime.shutdown())
    canceller = in_thread(future.cancel)
    assert ended(canceller)
    assert not runtime.running


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu"), torch.no_grad])
def test_an_expert_asks_another_in_any_mode_on_the_only_worker(mode: Callable[[], object]) -> None:
    inner = TaskPool(lambda x: x + 1, name="inner")

    def ask(x: Tensor) -> Tensor:
        with mode():  # type: ignore[attr-defined]
            return inner.submit_task(x).result()

    outer = TaskPool(ask, name="outer")
    with Runtime([outer, inner], num_workers=1):
        assert torch.equal(outer.submit_task(ROW).result(LONG), ROW + 1)


def test_a_client_that_helps_an_expert_goes_on_helping_whom_that_expert_asks() -> None:
    """The client runs X, which waits for Y, while the only worker runs Z, which waits for X; so the client runs Y,
    too.
    """
    inside_x, inside_w, hold = threading.Event(), threading.Event(), threading.Event()
    y = TaskPool(lambda x: x + 1, name="Y", min_batch_size=2, timeout=0.2)

    def ask_y(x: Tensor) -> Tensor:
        inside_x.set()
        return y.submit_task(x).result()

    def wait(x: Tensor) -> Tensor:
        inside_w.set()
        hold.wait(LONG)
        return x

    x = TaskPool(ask_y, name="X")
    z = TaskPool(lambda rows: x.submit_task(rows).result(), name="Z")
    w = TaskPool(wait, name="W")
    with Runtime([w, x, y, z], num_workers=1):
        w.submit_task(ROW)
        assert inside_w.wait(LONG)
        client = in_thread(lambda: x.submit_task(ROW).result() is None)
        assert inside_x.wait(LONG)
        future = z.submit_task(ROW)
        hold.set()
        assert torch.equal(future.result(LONG), ROW + 1)
        assert ended(client)
