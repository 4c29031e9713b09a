"""Tests that after failing calls the first call's exception is raised, and no gradients or threads are left behind."""

from __future__ import annotations

import os
import random
import traceback
from typing import Any

import pytest
import torch
from random_calls import jitter
from torch import Tensor

import pymoe

TRIALS = 100
WORKERS = 4


class Broken(Exception):
    """Raised by the call with the given number."""


def break_forward(number: int) -> None:
    raise Broken(number, "forward")


def break_backward(number: int) -> None:
    raise Broken(number, "backward")


class Plan:
    """A map in which some calls fail, in forward or backward, and the tensors that all calls share."""

    def __init__(self, trial: int) -> None:
        rng = random.Random(trial)
        self.calls = rng.randint(2, 9)
        failing = rng.sample(range(self.calls), rng.choice([1, 1, 2, self.calls]))
        self.passes = {number: rng.choice(["forward", "backward"]) for number in failing}
        if trial % 4 == 0:  # all calls fail in one pass
            self.passes = dict.fromkeys(failing, rng.choice(["forward", "backward"]))
        self.kind = trial % 3
        self.preset = trial % 2 == 0
        self.layer = torch.nn.Linear(4, 4).double()
        self.shared = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        self.own = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(self.calls)]
        self.healthy = False

    @property
    def leaves(self) -> list[Tensor]:
        return [self.shared, *self.own, *self.layer.parameters()]

    @property
    def wanted(self) -> tuple[int, str]:
        """Return the call whose error must be raised: the first that fails, in the first pass in which any call
        fails.
        """
        first = "forward" if "forward" in self.passes.values() else "backward"
        return min(number for number, one in self.passes.items() if one == first), first

    def fails(self, number: int, one: str) -> bool:
        return not self.healthy and self.passes.get(number) == one

    def function(self) -> Any:
        plan = self

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, number: int, x: Tensor, shared: Tensor) -> Tensor:
                jitter()
                if plan.fails(number, "forward"):
                    break_forward(number)
                ctx.save_for_backward(x, shared)
                ctx.number = number
                return x * shared

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                jitter()
                if plan.fails(ctx.number, "backward"):
                    break_backward(ctx.number)
                x, shared = ctx.saved_tensors
                return None, grad * shared, grad * x

        class Module(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = plan.layer

            def forward(self, number: int, x: Tensor, shared: Tensor) -> Tensor:
                return Function.apply(number, self.layer(x), shared)

        return [Function, Module(), lambda *args: (Module()(*args), None)][self.kind]

    def loss(self) -> Tensor:
        calls = [(number, self.own[number], self.shared) for number in range(self.calls)]
        results = pymoe.map_with_parallel_backward(self.function(), *calls)
        return torch.stack([result[0].sin().sum() for result in results]).sum()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture(autouse=True, scope="module")
def some_workers():
    with pymoe.runtime.parallel_workers(WORKERS):
        yield


@pytest.mark.parametrize("trial", range(TRIALS))
def test_the_first_failure_comes_out_and_nothing_is_left(trial):
    torch.manual_seed(trial)
    plan = Plan(trial)
    plan.healthy = True
    plan.loss().backward()  # starts all threads
    expected = [leaf.grad for leaf in plan.leaves]
    before = threads()

    plan.healthy = False
    for leaf in plan.leaves:
        leaf.grad = torch.full_like(leaf, 3.0) if plan.preset else None
    with pytest.raises(Broken) as caught:
        plan.loss().backward()
    assert type(caught.value) is Broken
    assert caught.value.args == plan.wanted
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == f"break_{plan.wanted[1]}"
    for leaf in plan.leaves:
        if plan.preset:
            assert torch.equal(leaf.grad, torch.full_like(leaf, 3.0))
        else:
            assert leaf.grad is None

    plan.healthy = True
    for leaf in plan.leaves:
        leaf.grad = None
    plan.loss().backward()
    for leaf, wanted in zip(plan.leaves, expected, strict=True):
        assert (leaf.grad is None) == (wanted is None)
        assert wanted is None or torch.equal(leaf.grad, wanted)
    assert threads() <= before  # fewer if threads of an earlier test were still ending
