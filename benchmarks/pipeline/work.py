"""Defines the models to time, whose layers sleep, multiply matrices or do almost nothing, and their batches.

Equal cases have equal weights, inputs and targets in every process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.comparison import relative_error
from pymoe.pipe.schedules import Action, Kind

SLEEP = 0.001
"""Seconds that a sleeping layer takes for each of its forward, the gradient of its input and the gradient of its
weight."""
LAYERS_PER_WORKER = 4


class InputPath(torch.autograd.Function):
    """Copies its input after sleeping without the GIL, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad.clone(), None


class WeightPath(torch.autograd.Function):
    """Copies its input, and sleeps in backward only: the part that a split backward defers."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad.clone(), None


class Sleeping(nn.Module):
    """Multiplies by its weight, and sleeps, so that the times of its forward and backward are known."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.seconds = SLEEP
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return InputPath.apply(x, self.seconds) * WeightPath.apply(self.weight, self.seconds)


class Computing(nn.Module):
    """One layer of a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Scaling(nn.Module):
    """Multiplies by one number, to measure the bookkeeping alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@dataclass(frozen=True)
class Work:
    """A kind of layer, and the sizes with which it is timed."""

    about: str
    layer: Callable[[int], nn.Module]
    width: int
    rows: int
    """Rows of a micro-batch."""
    repeats: int = 1
    """Number of consecutive steps whose mean is one measured value."""
    layers_per_worker: int = LAYERS_PER_WORKER


WORKS = {
    "sleep": Work("1 ms forward, 1 ms for the gradient of its input, 1 ms for that of its weight", Sleeping, 8, 4),
    "compute": Work("a linear layer 512 x 512 and relu on 64 rows, fp32", Computing, 512, 64),
    "tiny": Work("a linear layer 64 x 64 and relu on 8 rows, fp32", Computing, 64, 8, 10, 1),
    "scale": Work("a product of 8 x 8 numbers with one number", Scaling, 8, 8, 10, 1),
}
LOSS = nn.functional.mse_loss
TOLERANCE = 1e-5
"""Largest permitted relative error of a parameter's gradient (fp32, Frobenius norm); the order of sums may differ."""


@dataclass(frozen=True)
class Case:
    """A kind of work, with the number of workers (threads or processes) and of micro-batches."""

    work: str
    workers: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.work}, {self.workers} workers, {self.micro_batches} micro-batches"

    @property
    def layers(self) -> int:
        """Return the number of layers of the whole model."""
        return WORKS[self.work].layers_per_worker * self.workers

    @property
    def repeats(self) -> int:
        """Return the number of consecutive steps whose mean is one measured value."""
        return WORKS[self.work].repeats

    @property
    def about(self) -> str:
        """Return the case in words, for a heading."""
        return f"{self}: {self.layers} layers, each {WORKS[self.work].about}"

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        return LOSS(output, target)

    def stages_of(self, per_worker: int) -> int:
        """Return the number of stages: ``per_worker`` on each worker, but never more than there are layers."""
        return min(self.layers, per_worker * self.workers)

    def model(self) -> nn.Sequential:
        """Return the unsplit model."""
        work = WORKS[self.work]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(*(work.layer(work.width) for _ in range(self.layers)))

    def stages(self, count: int) -> list[nn.Sequential]:
        """Return the model cut into ``count`` stages of equally many layers."""
        model = self.model()
        size, rest = divmod(self.layers, count)
        if rest:
            raise ValueError(f"{self}: {self.layers} layers cannot be cut into {count} equal stages")
        return [model[i * size : (i + 1) * size] for i in range(count)]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of all micro-batches, which have equal numbers of rows."""
        work = WORKS[self.work]
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(2, self.micro_batches * work.rows, work.width, generator=generator)
        return x, y

    def times(self, stages: int) -> Callable[[Action], float]:
        """Return a function from an action to its time, in units of one layer's forward; one matrix product is a unit.

        The gradient of the model's input is not computed, so the first layer's backward lacks that part, and the first
        stage of a split backward computes everything in its weight action.
        """
        return partial(_time, self.layers // stages)


def _time(layers: int, action: Action) -> float:
    inputs = layers - (action.stage == 0)
    if action.kind is Kind.FORWARD:
        return layers
    if action.kind is Kind.BACKWARD_INPUT:
        return inputs if action.stage else 0
    if action.kind is Kind.BACKWARD_WEIGHT and action.stage:
        return layers
    return inputs + layers


def sequential(case: Case, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Run forward and backward of one micro-batch after another, and sum the gradients."""
    for inputs, targets in zip(x.chunk(case.micro_batches), y.chunk(case.micro_batches), strict=True):
        (case.loss(model(inputs), targets) / case.micro_batches).backward()


def reference(case: Case) -> dict[str, Tensor]:
    """Return the gradients of all parameters in the sequential run, with the sleeping layers' delays set to zero."""
    model = case.model()
    for layer in model.modules():
        if hasattr(layer, "seconds"):
            layer.seconds = 0.0
    sequential(case, model, *case.batch())
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients by name, a shared parameter under each of its names; a missing gradient is returned as zeros."""
    return {
        name: torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in model.named_parameters(remove_duplicate=False)
    }


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of a gradient (Frobenius norm)."""
    return max((relative_error(one, expected[name]) for name, one in found.items()), default=0.0)


def time_of(clear: Callable[[], object], run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the mean wall and processor seconds of ``repeats`` calls of ``run``; calls of ``clear`` are not timed."""
    wall = cpu = 0.0
    for _ in range(repeats):
        clear()
        cpu -= time.process_time()
        wall -= time.perf_counter()
        run()
        wall += time.perf_counter()
        cpu += time.process_time()
    return wall / repeats, cpu / repeats
