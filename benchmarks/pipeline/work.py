"""The work: layers that sleep, multiply matrices, or do next to nothing, and the batch that goes through them.

The same case gives everyone, in whatever process, the same weights, inputs and targets.
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
"""Seconds that a sleeping layer takes for the forward, for the gradient of its input, and for that of its weight."""
LAYERS_PER_WORKER = 4


class InputPath(torch.autograd.Function):
    """Hands on what it gets, a while later in both directions; the interpreter's lock is free meanwhile."""

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
    """Hands on what it gets, a while later when going backward: the part that a split backward puts off."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad.clone(), None


class Sleeping(nn.Module):
    """A product with its weight, with times that are known."""

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
    """Next to nothing: a product with one number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@dataclass(frozen=True)
class Work:
    """What layers do."""

    about: str
    layer: Callable[[int], nn.Module]
    width: int
    rows: int
    """Rows of a micro-batch."""
    repeats: int = 1
    """Steps in a row that one value rests on."""
    layers_per_worker: int = LAYERS_PER_WORKER


WORKS = {
    "sleep": Work("1 ms forward, 1 ms for the gradient of its input, 1 ms for that of its weight", Sleeping, 8, 4),
    "compute": Work("a linear layer 512 x 512 and relu on 64 rows, fp32", Computing, 512, 64),
    "tiny": Work("a linear layer 64 x 64 and relu on 8 rows, fp32", Computing, 64, 8, 10, 1),
    "scale": Work("a product of 8 x 8 numbers with one number", Scaling, 8, 8, 10, 1),
}
LOSS = nn.functional.mse_loss
TOLERANCE = 1e-5
"""Largest relative error of a parameter's gradient (fp32, Frobenius norm): sums may be made in another order."""


@dataclass(frozen=True)
class Case:
    """A kind of work for so many workers (threads or processes) and micro-batches."""

    work: str
    workers: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.work}, {self.workers} workers, {self.micro_batches} micro-batches"

    @property
    def layers(self) -> int:
        """Layers of the whole model."""
        return WORKS[self.work].layers_per_worker * self.workers

    @property
    def repeats(self) -> int:
        """Steps in a row that one value rests on."""
        return WORKS[self.work].repeats

    @property
    def about(self) -> str:
        """Return the case in words, for a heading."""
        return f"{self}: {self.layers} layers, each {WORKS[self.work].about}"

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        return LOSS(output, target)

    def stages_of(self, per_worker: int) -> int:
        """Return the stages of a model with so many stages a worker, where it has enough layers for that."""
        return min(self.layers, per_worker * self.workers)

    def model(self) -> nn.Sequential:
        """Return all layers."""
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
        """Return inputs and targets of all micro-batches, which have equally many rows."""
        work = WORKS[self.work]
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(2, self.micro_batches * work.rows, work.width, generator=generator)
        return x, y

    def times(self, stages: int) -> Callable[[Action], float]:
        """What an action takes, in times of a layer's forward. Where layers compute, products are what is counted.

        Nobody wants the gradient of the model's input: in the first layer there is no such part, and in the first stage
        a split backward does all of it with the weights.
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
    """Run forward and backward of one micro-batch after the other; gradients are summed."""
    for inputs, targets in zip(x.chunk(case.micro_batches), y.chunk(case.micro_batches), strict=True):
        (case.loss(model(inputs), targets) / case.micro_batches).backward()


def reference(case: Case) -> dict[str, Tensor]:
    """Return the gradients of all parameters in the sequential run; what sleeps need not sleep for that."""
    model = case.model()
    for layer in model.modules():
        if hasattr(layer, "seconds"):
            layer.seconds = 0.0
    sequential(case, model, *case.batch())
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by every name that a parameter has; zeros where there is none."""
    return {
        name: torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in model.named_parameters(remove_duplicate=False)
    }


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of a gradient (Frobenius norm)."""
    return max((relative_error(one, expected[name]) for name, one in found.items()), default=0.0)


def time_of(clear: Callable[[], object], run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return wall and processor seconds of ``run``, means over ``repeats``; ``clear``, before each, does not count."""
    wall = cpu = 0.0
    for _ in range(repeats):
        clear()
        cpu -= time.process_time()
        wall -= time.perf_counter()
        run()
        wall += time.perf_counter()
        cpu += time.process_time()
    return wall / repeats, cpu / repeats
