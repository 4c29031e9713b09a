"""Defines the calls, and the ways to run many of them with a backward pass."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pymoe

FORWARD_SLEEP, BACKWARD_SLEEP = 0.02, 0.04
SIZE = 512
"""Number of rows and of columns of the multiplied matrices."""
WIDTH = 8
"""Number of elements of a tiny tensor."""
LOOP, AUTOGRAD, PYMOE = "serial loop", "plain autograd", "pymoe map"


class Waits(torch.autograd.Function):
    """Computes an elementwise product and sleeps in both passes, as if another machine computed it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD_SLEEP)
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(BACKWARD_SLEEP)
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


class Tiny(torch.autograd.Function):
    """Computes an elementwise product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


@dataclass(frozen=True)
class Kind:
    """A kind of call, and how it is measured."""

    name: str
    about: str
    function: Any
    shape: tuple[int, ...]
    workers: int | None
    """Number of workers; with None, the default, the pool starts more threads while calls wait."""
    repeats: int
    """Number of consecutive passes whose mean is one value."""
    rounds: int
    """Maximum number of values per median; short passes need more, since they are disturbed most."""

    def arguments(self, calls: int) -> list[tuple[Tensor, Tensor]]:
        """Return a tensor for each call, together with the weight that all calls share."""
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(self.shape, generator=generator, requires_grad=True)
        return [(torch.randn(self.shape, generator=generator, requires_grad=True), weight) for _ in range(calls)]


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
KINDS = (
    Kind(
        "sleep",
        f"{FORWARD_SLEEP * 1e3:g} ms forward, {BACKWARD_SLEEP * 1e3:g} ms backward, without the interpreter's lock",
        Waits,
        (WIDTH,),
        None,
        1,
        15,
    ),
    Kind("compute", f"one fp32 product {SIZE} x {SIZE} forward, two backward", torch.mm, (SIZE, SIZE), CORES, 1, 5),
    Kind("tiny", f"a product of {WIDTH} numbers: what a call costs besides", Tiny, (WIDTH,), CORES, 10, 61),
)

Outputs = list[Tensor]
Forward = Callable[[Any, Sequence[tuple[Tensor, ...]]], Outputs]
Backward = Callable[[Outputs, Sequence[Tensor]], None]


@dataclass(frozen=True)
class System:
    """A way to run calls: all forward passes, then all backward passes, which write gradients to ``.grad``."""

    name: str
    about: str
    forward: Forward
    backward: Backward


def one_by_one(function: Any, calls: Sequence[tuple[Tensor, ...]]) -> Outputs:
    """Run one call after another."""
    call = getattr(function, "apply", function)
    return [call(*args) for args in calls]


def backward_one_by_one(outputs: Outputs, grads: Sequence[Tensor]) -> None:
    """Run one backward pass after another."""
    for output, grad in zip(outputs, grads, strict=True):
        output.backward(grad)


def mapped(function: Any, calls: Sequence[tuple[Tensor, ...]]) -> Outputs:
    """Run all calls at once."""
    return [output for (output,) in pymoe.map_with_parallel_backward(function, *calls)]


def backward_of_all(outputs: Outputs, grads: Sequence[Tensor]) -> None:
    """Run one backward pass through the graph of all calls."""
    torch.autograd.backward(outputs, grads)


SYSTEMS = (
    System(LOOP, "call after call, then `backward()` of one output after the other", one_by_one, backward_one_by_one),
    System(AUTOGRAD, "call after call, then one backward pass over all outputs", one_by_one, backward_of_all),
    System(PYMOE, "`map_with_parallel_backward`, then one backward pass over all its outputs", mapped, backward_of_all),
)
