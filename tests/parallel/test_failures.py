"""Tests that failing calls raise one exception, and leave no partial gradients or anything else behind."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import traceback
import weakref
from typing import Any

import pytest
import torch
from limits import LONG

from pymoe.runtime import map_with_parallel_backward, parallel_workers, run_in_background


class Planted(Exception):
    pass


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int, failing: Any) -> torch.Tensor:
        ctx.number, ctx.failing = number, failing
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.number in ctx.failing:
            time.sleep(0.02 / (1 + ctx.number))  # the last fails first
            raise Planted(f"in backward {ctx.number}")
        return grad * 2, None, None


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_first_failure_by_position_is_raised(workers: int) -> None:
    ended: list[int] = []

    def fail(number: int) -> int:
        if number in (2, 4):
            time.sleep(0.02 / number)
            raise Planted(number)
        ended.append(number)
        return number

    with parallel_workers(workers), pytest.raises(Planted) as caught:
        map_with_parallel_backward(fail, *[(i,) for i in range(6)])
    assert caught.value.args == (2,)
    assert sorted(ended) == [0, 1, 3, 5]
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["map_with_parallel_backward forward: call 4 failed, too: Planted: 4"]


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("failing", [{0}, {5}, {1, 3}, set(range(6))])
def test_a_failing_backward_pass_leaves_no_gradient(workers: int, failing: set[int]) -> None:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(6)]
    shared = torch.ones(2, requires_grad=True)
    with parallel_workers(workers):
        calls = [(leaf * shared, number, failing) for number, leaf in enumerate(leaves)]
        outputs = map_with_parallel_backward(FailsBackward, *calls)
        with pytest.raises(Planted) as caught:
            sum(o.sum() for (o,) in outputs).backward()
    assert caught.value.args == (f"in backward {min(failing)}",)
    assert "backward" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert all(tensor.grad is None for tensor in [*leaves, shared])


def test_failures_leave_no_thread_and_the_next_map_works() -> None:
    x = torch.ones(2, requires_grad=True)

    def fail() -> None:
        raise Planted

    with parallel_workers(3):
        map_with_parallel_backward(torch.sin, (x,), (x,))
        before = threading.active_count()
        for _ in range(20):
            with pytest.raises(Planted):
                map_with_parallel_backward(fail, (), (), ())
            assert len(map_with_parallel_backward(torch.sin, (x,), (x,))) == 2
        assert threading.active_count() <= before + 3  # Python counts a worker after the worker has looked up its name


def test_an_exception_that_all_calls_share() -> None:
    error = Planted("shared")

    def fail() -> None:
        raise error

    for _ in range(3):
        with pytest.raises(Planted) as caught:
            map_with_parallel_backward(fail, (), ())
        assert caught.value is error
    assert not getattr(error, "__notes__", [])


def test_what_calls_hold_goes_when_they_have_failed() -> None:
    class Held:
        pass

    def fail(held: Held) -> None:
        raise Planted

    held = Held()
    ref = weakref.ref(held)
    with pytest.raises(Planted):
        map_with_parallel_backward(fail, (held,), (held,))
    del held
    gc.collect()
    assert ref() is None


def interrupt_main() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_ctrl_c_leaves_out_what_has_not_started_and_waits_for_the_rest() -> None:
    started: list[int] = []
    ended: list[int] = []
    both = threading.Barrier(2)

    def call(number: int) -> None:
        started.append(number)
        if number < 2:
            both.wait(LONG)
        if threading.current_thread() is threading.main_thread():
            interrupt_main()
            time.sleep(LONG)
        time.sleep(0.1)
        ended.append(number)

    with parallel_workers(1), pytest.raises(KeyboardInterrupt):
        map_with_parallel_backward(call, *[(i,) for i in range(50)])
    assert len(started) < 50
    assert len(ended) == len(started) - 1  # all calls except the main thread's


def test_ctrl_c_while_the_main_thread_waits() -> None:
    running = threading.Event()
    ended: list[int] = []

    def call(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert running.wait(LONG)
            return
        running.set()
        time.sleep(0.05)
        interrupt_main()
        time.sleep(0.3)
        ended.append(number)

    with parallel_workers(1), pytest.raises(KeyboardInterrupt):
        map_with_parallel_backward(call, (0,), (1,))
    assert len(ended) == 1


def test_ctrl_c_in_a_backward_pass_leaves_no_gradient() -> None:
    begun = threading.Event()

    class Interrupted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is threading.main_thread():
                begun.set()
                interrupt_main()
                time.sleep(LONG)
            begun.wait(LONG)
            return grad

    x = torch.ones(2, requires_grad=True)
    outputs = map_with_parallel_backward(Interrupted, *[(x,)] * 20)
    with pytest.raises(KeyboardInterrupt):
        sum(o.sum() for (o,) in outputs).backward()
    assert x.grad is None


def test_a_call_may_raise_what_ends_threads() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        map_with_parallel_backward(leave, (), (), ())
    with pytest.raises(SystemExit):
        run_in_background(leave).result(LONG)
