"""Tests that torch's profiler records calls on any thread."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from limits import LONG
from torch.profiler import profile, record_function

from pymoe.runtime import map_with_parallel_backward, parallel_workers

CALLS = 3


class Meeting(torch.autograd.Function):
    """Calls that run at the same time, and so each on its own thread."""

    barrier = threading.Barrier(CALLS)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Meeting.barrier.wait(LONG)
        with record_function("a range of the caller's"):
            return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Meeting.barrier.wait(LONG)
        return grad.cos()


def names(run: Any) -> Counter[str]:
    with profile() as profiler, record_function("around"):
        run()
    return Counter(event.name for event in profiler.events())


def test_calls_are_in_the_profile_in_both_passes() -> None:
    x = torch.ones(2, requires_grad=True)

    def run() -> None:
        outputs = map_with_parallel_backward(Meeting, *[(x,)] * CALLS)
        torch.autograd.backward([o for (o,) in outputs], [torch.ones(2)] * CALLS)

    with parallel_workers(CALLS):
        for _ in range(3):
            found = names(run)
            for number in range(CALLS):
                assert found[f"map_with_parallel_backward forward: call {number}"] == 1
                assert found[f"map_with_parallel_backward backward: call {number}"] == 1
            assert found["a range of the caller's"] == CALLS
            assert found["aten::sin"] == CALLS
            assert found["aten::cos"] == CALLS
            assert found["around"] == 1
        run()
        # Nothing is left behind on any thread: a later operation is seen once, and workers are no longer watched.
        assert names(lambda: torch.ones(2).tan())["aten::tan"] == 1


def test_calls_without_a_profiler_are_not_watched() -> None:
    watched: list[bool] = []
    barrier = threading.Barrier(CALLS)

    def call() -> None:
        barrier.wait(LONG)
        watched.append(torch._C._autograd._profiler_enabled())

    with parallel_workers(CALLS):
        with profile():
            map_with_parallel_backward(call, *[()] * CALLS)
        assert watched == [True] * CALLS
        map_with_parallel_backward(call, *[()] * CALLS)
    assert watched[CALLS:] == [False] * CALLS
