"""Tests of functions that run in the background, and of their futures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time

import pytest
import torch
from limits import LONG

from pymoe.runtime import parallel_workers, run_in_background, run_isolated_backward, run_isolated_forward


def test_values_arguments_and_keywords() -> None:
    assert run_in_background(lambda *args, **kwargs: (args, kwargs), 1, func=2).result() == ((1,), {"func": 2})
    with pytest.raises(TypeError, match="must be callable, got int"):
        run_in_background(7)


def test_exceptions() -> None:
    future = run_in_background(int, "seven")
    assert isinstance(future.exception(), ValueError)
    with pytest.raises(ValueError, match="seven"):
        future.result()


def test_it_runs_in_the_background() -> None:
    future = run_in_background(threading.get_ident)
    assert future.result(LONG) != threading.get_ident()


def test_who_waits_runs_what_no_worker_has_started() -> None:
    release = threading.Event()
    with parallel_workers(1):
        blocker = run_in_background(release.wait, LONG)
        future = run_in_background(threading.get_ident)
        assert future.result() == threading.get_ident()
        with pytest.raises(concurrent.futures.TimeoutError):
            run_in_background(threading.get_ident).result(0.01)
        release.set()
        assert blocker.result(LONG)


def test_functions_that_wait_for_functions_in_one_worker() -> None:
    def fibonacci(n: int) -> int:
        if n < 2:
            return n
        parts = [run_in_background(fibonacci, n - 1), run_in_background(fibonacci, n - 2)]
        return sum(part.result() for part in parts)

    with parallel_workers(1):
        assert run_in_background(fibonacci, 9).result(LONG) == 34


def test_cancelled_functions_never_run() -> None:
    ran: list[int] = []
    release = threading.Event()
    with parallel_workers(1):
        blocker = run_in_background(release.wait, LONG)
        while not blocker.running():
            time.sleep(0.001)
        futures = [run_in_background(ran.append, i) for i in range(3)]
        assert futures[1].cancel()
        assert not blocker.cancel()
        release.set()
        concurrent.futures.wait(futures, LONG)
    assert ran == [0, 2]
    assert futures[1].cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        futures[1].result()


def test_the_language_of_concurrent_futures() -> None:
    futures = [run_in_background(pow, i, 2) for i in range(5)]
    assert {f.result() for f in concurrent.futures.as_completed(futures, LONG)} == {0, 1, 4, 9, 16}
    seen: list[int] = []
    futures[2].add_done_callback(lambda future: seen.append(future.result()))
    assert seen == [4]

    async def awaits() -> int:
        return await asyncio.wrap_future(run_in_background(pow, 3, 2))

    assert asyncio.run(awaits()) == 9


def test_isolated_passes_in_the_background() -> None:
    """Run both passes of several calls at the same time, without a map."""
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    xs = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(5)]
    passes = [run_in_background(run_isolated_forward, torch.matmul, x, weight) for x in xs]
    contexts = [future.result() for future in passes]
    backward = [run_in_background(run_isolated_backward, context, y * 2) for context, (y,) in contexts]
    for x, future in zip(xs, backward, strict=True):
        for one, other in zip(
            future.result(), torch.autograd.grad((x @ weight).square().sum(), [x, weight]), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
