"""Tests of the workers of parallel calls: their number, their start and end, interpreter exit, and forks."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from limits import LONG
from processes import in_child, run_python

from pymoe.runtime import (
    get_parallel_workers,
    map_with_parallel_backward,
    parallel_workers,
    run_in_background,
    set_parallel_workers,
)


def test_the_number_of_workers() -> None:
    assert get_parallel_workers() == os.cpu_count()
    with parallel_workers(3):
        assert get_parallel_workers() == 3
        with parallel_workers(None):
            assert get_parallel_workers() == os.cpu_count()
        assert get_parallel_workers() == 3
    assert get_parallel_workers() == os.cpu_count()
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"at least 1, got {wrong}"):
            set_parallel_workers(wrong)
    for other in (2.5, True, "2"):  # the next map would have raised the error of the bindings
        with pytest.raises(TypeError, match="count must be an int or None, got"):
            set_parallel_workers(other)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_as_many_calls_at_once_as_there_are_workers_and_the_caller(workers: int) -> None:
    """Each call waits for all others, so one thread fewer would be a deadlock."""
    barrier = threading.Barrier(workers + 1)
    with parallel_workers(workers):
        map_with_parallel_backward(barrier.wait, *[(LONG,)] * (workers + 1))
        futures = [run_in_background(barrier.wait, LONG) for _ in range(workers)]
        barrier.wait(LONG)
        assert len({future.result(LONG) for future in futures}) == workers


def test_both_passes_run_at_once() -> None:
    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, barrier):  # type: ignore[no-untyped-def]
            barrier.wait(LONG)
            ctx.barrier = barrier
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            ctx.barrier.wait(LONG)
            return grad * 2, None

    x = torch.ones(2, requires_grad=True)
    with parallel_workers(8):
        outputs = map_with_parallel_backward(Meeting, *[(x, barrier) for barrier in [threading.Barrier(8)] * 8])
        sum(o.sum() for (o,) in outputs).backward()
    assert x.grad.tolist() == [16.0, 16.0]


@pytest.mark.slow
def test_no_thread_before_the_first_call_and_workers_leave_when_their_number_changes() -> None:
    script = """
    import os, time, torch
    torch.set_num_threads(1)
    def threads(): return len(os.listdir("/proc/self/task"))
    before = threads()
    import pymoe
    from pymoe.runtime import parallel_workers
    assert threads() == before, "importing started threads"
    with parallel_workers(5):
        assert threads() == before, "threads before the first call"
        for _ in range(3):
            pymoe.map_with_parallel_backward(torch.sin, (torch.ones(1),), (torch.ones(1),))
        end = time.monotonic() + 60
        while threads() > before + 5:  # those that tried torch's private names end
            assert time.monotonic() < end
            time.sleep(0.01)
        assert threads() == before + 5, threads()
    end = time.monotonic() + 60
    while threads() > before:
        assert time.monotonic() < end
        time.sleep(0.01)
    """
    done = run_python(script)
    assert (done.returncode, done.stderr) == (0, "")


EXITS = {
    "after a map": "pymoe.map_with_parallel_backward(torch.sin, *[(x,)] * 5)",
    "queued in the background": "[pymoe.run_in_background(torch.sin, x) for _ in range(500)]",
    "running in the background": "pymoe.run_in_background(time.sleep, 0.2)",
    "with graphs alive": "out = pymoe.map_with_parallel_backward(torch.sin, *[(x,)] * 5)",
    "random": "out = pymoe.map_with_parallel_backward(torch.rand, *[(3,)] * 5)",
}


@pytest.mark.slow
@pytest.mark.parametrize("live", EXITS)
def test_exit(live: str) -> None:
    done = run_python(f"import time, torch, pymoe\nx = torch.ones(3, requires_grad=True)\n{EXITS[live]}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_gets_workers_of_its_own() -> None:
    def both_passes() -> None:
        x = torch.ones(2, requires_grad=True)
        outputs = map_with_parallel_backward(lambda t: t * 2, *[(x,)] * 5)
        sum(o.sum() for (o,) in outputs).backward()
        assert x.grad.tolist() == [10.0, 10.0]
        assert run_in_background(int, "7").result(LONG) == 7

    with parallel_workers(2):
        both_passes()
        for _ in range(5):
            assert in_child(both_passes) == 0
        both_passes()
