"""Tests that functions whose calls were short run longer on the calling thread before workers take calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from limits import LONG

from pymoe.parallel import run_concurrently as runs
from pymoe.runtime import map_with_parallel_backward, parallel_workers


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], bool]:
    trusted: dict[tuple[str, int], bool] = {}
    monkeypatch.setattr(runs, "_trusted", trusted)
    # In seconds. Every call of these tests counts as short on any machine, unless it waits for another call.
    monkeypatch.setattr(runs, "INLINE_LIMIT_S", float(LONG))
    # Workers take calls only after this many seconds, which is longer than this thread is ever delayed.
    monkeypatch.setattr(runs, "TRUSTED_INLINE_LIMIT_S", 1.0)
    return trusted


class Meets(torch.autograd.Function):
    """Waits in each pass at the barrier that ``barriers`` gives, if any; otherwise, the pass is short."""

    barriers: tuple[threading.Barrier | None, threading.Barrier | None] = (None, None)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if Meets.barriers[0] is not None:
            Meets.barriers[0].wait(LONG)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Meets.barriers[1] is not None:
            Meets.barriers[1].wait(LONG)
        return grad * 2


def both_passes() -> torch.Tensor:
    x = torch.ones(2, requires_grad=True)
    outputs = map_with_parallel_backward(Meets, *[(x,)] * 3)
    torch.stack([output for (output,) in outputs]).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("meeting", [0, 1], ids=["forward", "backward"])
def test_calls_that_were_short_and_then_wait_for_each_other_get_workers(
    meeting: int, trusted: dict[Any, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with parallel_workers(3):
        both_passes()
        assert len(trusted) == 2
        barriers: list[threading.Barrier | None] = [None, None]
        barriers[meeting] = threading.Barrier(3)
        monkeypatch.setattr(Meets, "barriers", tuple(barriers))
        for left in (2, 1):
            assert both_passes().tolist() == [6.0, 6.0]
            assert len(trusted) == left
        assert list(trusted.values()) == [False]  # the other pass's entry
        monkeypatch.setattr(Meets, "barriers", (None, None))
        both_passes()
        assert list(trusted.values()) == [False, False]


def test_calls_that_take_long_one_after_the_other_are_not_trusted(
    trusted: dict[Any, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "INLINE_LIMIT_S", 1e-9)
    trusted["map_with_parallel_backward forward", runs.likeness(Meets)] = False
    both_passes()
    both_passes()
    assert not trusted


def test_what_is_remembered_of_functions_is_bounded(trusted: dict[Any, bool]) -> None:
    functions: list[Any] = [eval("lambda x: x") for _ in range(runs._MAX_TRUSTED + 10)]
    for function in functions:
        map_with_parallel_backward(function, (1,), (2,))
    assert 0 < len(trusted) <= runs._MAX_TRUSTED


def test_the_same_function_is_known_again() -> None:
    class Module(torch.nn.Module):
        def method(self) -> None:
            pass

    def made_anew() -> Any:
        return lambda x: x

    module = Module()
    likeness = runs.likeness
    assert likeness(made_anew()) == likeness(made_anew())
    assert likeness(module.method) == likeness(module.method)
    assert likeness(Meets) == likeness(Meets.apply)
    other = Module()
    assert len({likeness(f) for f in (made_anew(), Meets, module, other, torch.exp)}) == 5
