"""Tests that the pool by default runs all waiting calls at the same time, but not all computing ones."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from limits import LONG
from processes import in_child, run_python

from pymoe._runtime import WorkerPool
from pymoe.parallel import workers as pool
from pymoe.runtime import map_with_parallel_backward, parallel_workers, run_in_background

CALLS = 64


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test its own pool."""
    monkeypatch.setattr(pool, "_pool", None)


class Meeting(torch.autograd.Function):
    """Waits for all others in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, barrier: threading.Barrier) -> torch.Tensor:
        barrier.wait(LONG)
        ctx.barrier = barrier
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.barrier.wait(LONG)
        return grad * 2, None


def both_passes(calls: int = CALLS) -> None:
    x = torch.ones(2, requires_grad=True)
    barrier = threading.Barrier(calls)
    outputs = map_with_parallel_backward(Meeting, *[(x, barrier)] * calls)
    torch.stack([y for (y,) in outputs]).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0 * calls] * 2


def test_sixty_four_calls_that_wait_for_each_other_end_forward_and_backward() -> None:
    both_passes()


def test_functions_in_the_background_may_wait_for_each_other_however_many() -> None:
    barrier = threading.Barrier(CALLS)
    futures = [run_in_background(barrier.wait, LONG) for _ in range(CALLS)]
    assert sorted(future.result(LONG) for future in futures) == list(range(CALLS))


def test_calls_within_calls_may_wait_for_each_other() -> None:
    barrier = threading.Barrier(CALLS)

    def outer() -> int:
        inner = map_with_parallel_backward(barrier.wait, *[(LONG,)] * (CALLS // 8))
        return len(inner) + run_in_background(int, "1").result()

    assert map_with_parallel_backward(outer, *[()] * 8) == ((CALLS // 8 + 1,),) * 8


def test_calls_get_on_while_others_of_all_kinds_wait() -> None:
    """Waiting calls must not block other maps, in either pass, even ones whose calls were too short for workers."""
    release = threading.Event()
    waiting = [run_in_background(release.wait, LONG) for _ in range(40)]
    both_passes(8)
    x = torch.ones(2, requires_grad=True)
    outputs = map_with_parallel_backward(torch.sin, *[(x,)] * 8)
    torch.stack([y for (y,) in outputs]).sum().backward()
    assert not any(future.done() for future in waiting)
    release.set()
    assert all(future.result(LONG) for future in waiting)


def pure_python() -> None:
    end = time.thread_time() + 0.03
    while time.thread_time() < end:
        pass


def without_the_interpreters_lock() -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("compute", [pure_python, without_the_interpreters_lock])
def test_calls_that_compute_do_not_make_the_pool_grow(compute: Callable[[], None]) -> None:
    most = 0

    def call() -> None:
        nonlocal most
        compute()
        most = max(most, pool.shared_pool().workers)

    map_with_parallel_backward(call, *[()] * 60)
    for future in [run_in_background(call) for _ in range(60)]:
        future.result()
    # Waiting calls would make the pool grow to one thread each. On a busy machine, a thread that was given the GIL may
    # get no processor for a while, and the thread that released the GIL waits for it. This looks like a waiting call,
    # and adds a thread or two (up to 10 in all at a load of 20).
    assert (os.cpu_count() or 1) <= most < 30


def test_threads_that_were_added_end_when_they_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "END_IDLE_THREAD_AFTER_S", 0.05)
    workers = pool.shared_pool()
    for _ in range(2):
        both_passes()
        end = time.monotonic() + LONG
        while workers.workers > (os.cpu_count() or 1):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_whoever_sets_a_number_of_workers_gets_it() -> None:
    release = threading.Event()
    with parallel_workers(2):
        futures = [run_in_background(release.wait, LONG) for _ in range(6)]
        time.sleep(0.1)
        assert pool.shared_pool().workers == 2
        assert sum(future.running() for future in futures) <= 2
        release.set()
        assert all(future.result(LONG) for future in futures)


def test_results_are_the_same_bits_for_any_number_of_threads() -> None:
    def train(waits: bool) -> bytes:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 8))

        def call(x: torch.Tensor) -> torch.Tensor:
            if waits:
                time.sleep(0.02)
            return module(x)

        for _ in range(3):
            outputs = map_with_parallel_backward(call, *[(torch.randn(3, 8),) for _ in range(12)])
            torch.stack([y for (y,) in outputs]).square().sum().backward()
        return b"".join(p.grad.numpy().tobytes() for p in module.parameters())

    found = {train(waits) for waits in (False, True)}
    for workers in (1, 5):
        with parallel_workers(workers):
            found.add(train(False))
    assert len(found) == 1


def test_a_pool_of_the_runtime_grows_to_its_limit_and_no_further() -> None:
    with WorkerPool(1, most=4) as workers:
        barrier = threading.Barrier(4)
        for future in [workers.submit(barrier.wait, LONG) for _ in range(8)]:
            future.result(LONG)
        assert workers.workers == 4
    for wrong in ({"still": 0.0}, {"idle": -1.0}, {"idle": float("nan")}):
        with pytest.raises(ValueError, match="must be a number of seconds above 0"):
            WorkerPool(1, most=2, **wrong)


def test_exit_while_many_calls_wait() -> None:
    script = """
    import threading, time, pymoe
    barrier = threading.Barrier(40)
    futures = [pymoe.run_in_background(barrier.wait, 300) for _ in range(40)]
    [f.result(300) for f in futures]
    futures = [pymoe.run_in_background(time.sleep, 0.5) for _ in range(400)]
    """
    done = run_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_of_a_process_whose_pool_has_grown() -> None:
    both_passes(16)
    assert in_child(both_passes) == 0
    both_passes(16)
