"""Tests of bugs that were found and fixed in ``await`` and in options of pools and runtimes. Docstrings describe the
bugs.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from limits import LONG
from processes import in_child
from torch import nn

from pymoe.runtime import BatchTensorProto, ExpertBackend, ExpertClient, Runtime, TaskPool


async def awaited(future: Any) -> Any:
    return await future


def stop(x: torch.Tensor) -> torch.Tensor:
    raise StopIteration(5)


@pytest.mark.parametrize("traced", [False, True], ids=["plain", "under a trace function"])
def test_a_batch_that_raises_stop_iteration_does_not_end_an_await_with_its_value(traced: bool) -> None:
    """Under a debugger or coverage, the interpreter mistook the batch's exception for the result of ``await``."""
    pool = TaskPool(stop, name="stop")
    with Runtime([pool]):
        before = sys.gettrace()
        if traced:
            sys.settrace(lambda *args: None)
        try:
            with pytest.raises(RuntimeError, match="StopIteration"):
                asyncio.run(awaited(pool.submit_task(torch.ones(1, 1))))
        finally:
            sys.settrace(before)


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("timeout", [None, 1000.0])
def test_an_await_that_was_abandoned_with_its_loop_is_collected(timeout: float | None) -> None:
    """The timer of an await with a limit held its task in a place that the collector cannot see."""

    def abandon() -> weakref.ref:
        backend = ExpertBackend("e", nn.Linear(4, 4), args_schema=(BatchTensorProto(4),))
        pending = ExpertClient(backend, timeout=timeout).submit(torch.ones(1, 4))
        loop = asyncio.new_event_loop()
        task = loop.create_task(awaited(pending))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        pending.cancel()
        return weakref.ref(backend)

    backend = abandon()
    for _ in range(3):
        gc.collect()
    assert backend() is None


def test_a_result_that_is_there_can_be_awaited_in_the_child_of_a_fork() -> None:
    """In the child of a fork, ``result()`` gave a finished result, but ``await`` said that the pool belonged to the
    parent.
    """
    pool = TaskPool(torch.neg, name="neg")
    with Runtime([pool]):
        future = pool.submit_task(torch.ones(1, 1))
        future.result(LONG)

    def check() -> None:
        assert future.result() == -1
        assert asyncio.run(awaited(future)) == -1
        with pytest.raises(RuntimeError, match="before a fork"):
            Runtime([pool])

    assert in_child(check) == 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_batch_size": Decimal("2.7")}, TypeError, "max_batch_size must be an integer, got Decimal"),
        ({"min_batch_size": np.float32(2.7)}, TypeError, "min_batch_size must be an integer"),
        ({"capacity": 2.5}, TypeError, "capacity must be an integer, got 2.5"),
        ({"max_batch_size": 2**70}, OverflowError, "max_batch_size must be at most 2147483647"),
        ({"timeout": "x"}, TypeError, "timeout must be a number, got 'x'"),
        ({"linger": None}, TypeError, "linger must be a number, got None"),
        ({"name": b"a"}, TypeError, "expected name=, a string that statistics and errors call the pool by, got bytes"),
    ],
)
def test_a_pools_options_are_not_cut_off_and_errors_name_them(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Fractions from numpy and decimal became integers, and errors listed the signatures of the native class."""
    with pytest.raises(error, match=words):
        TaskPool(torch.neg, **{"name": "neg", **options})
    TaskPool(torch.neg, name="neg", max_batch_size=np.int64(8))


def test_a_runtimes_number_of_workers_is_not_cut_off() -> None:
    with pytest.raises(TypeError, match=r"Runtime: num_workers must be an integer, got .*2\.7"):
        Runtime([TaskPool(torch.neg, name="neg")], num_workers=np.float32(2.7))  # type: ignore[arg-type]


def test_whatever_is_thrown_into_an_await_that_has_ended_comes_out() -> None:
    pool = TaskPool(torch.neg, name="neg")
    with Runtime([pool]):
        future = pool.submit_task(torch.ones(1, 1))
        future.result(LONG)
    with pytest.raises(ValueError, match=r"^$"):
        future.__await__().throw(ValueError)
    with pytest.raises(TypeError, match="expected at least 1"):
        future.__await__().throw()


@pytest.mark.parametrize("fails", [False, True])
def test_a_future_that_was_awaited_goes_without_the_collector(fails: bool) -> None:
    """The frame of ``await`` is part of the traceback of the error it raises, and kept alive the future that holds
    the error.
    """

    def submit() -> Any:
        future = pool.submit_task(torch.ones(1))
        submitted.append(weakref.ref(future))
        return future

    async def main() -> None:
        try:
            await submit()
        except ValueError:
            assert fails

    def process(x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise ValueError("planted")
        return x + 1

    submitted: list[weakref.ref] = []
    pool = TaskPool(process, name="pool")
    with Runtime([pool]):
        gc.disable()
        try:
            asyncio.run(main())
            assert submitted[0]() is None
        finally:
            gc.enable()
