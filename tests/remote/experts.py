"""Experts for tests; ``python -m pymoe.remote serve experts:NAME`` calls the functions without arguments."""

from __future__ import annotations

import collections
import os
import threading
import time
from typing import Any

import torch
from limits import LONG
from torch import Tensor, nn

from pymoe.runtime import BatchTensorProto, ExpertBackend

WIDTH = 8
ROW = BatchTensorProto(WIDTH)
KEYS = 1 << 14


def mlp(name: str, seed: int = 0, optimizer: Any = torch.optim.Adam, lr: float = 1e-2, **options: Any) -> ExpertBackend:
    """Return a small network, which is the same for the same seed in every process."""
    torch.manual_seed(seed)
    expert = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    opt = None if optimizer is None else optimizer(expert.parameters(), lr)
    return ExpertBackend(name, expert, opt, args_schema=[ROW], outputs_schema=ROW, **options)


class Counting(nn.Module):
    """Row i of its weight grows by 1 whenever a gradient of -1 for index i is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(KEYS, 1))

    def forward(self, index: Tensor) -> Tensor:
        return self.weight[index[:, 0]]


def counting(name: str = "counting", **options: Any) -> ExpertBackend:
    expert = Counting()
    opt = torch.optim.SGD(expert.parameters(), 1.0)
    proto = BatchTensorProto(1, dtype=torch.int64)
    return ExpertBackend(name, expert, opt, args_schema=[proto], outputs_schema=BatchTensorProto(1), **options)


def counted(backend: Any, keys: int) -> Tensor:
    """Return how often each gradient was applied, according to the expert's parameters."""
    (weight,) = backend.forward_pool.submit_task(torch.arange(keys)[:, None]).result()
    return weight.flatten().round().long()


def count(backend: Any, key: int, **options: Any) -> Any:
    """Send the request to apply the gradient number ``key``."""
    return backend.backward_pool.submit_task(torch.tensor([[key]]), torch.tensor([[-1.0]]), **options)


class Held(nn.Module):
    """Blocks every call until it is opened, and counts calls; ``open``: whether it starts open."""

    def __init__(self, opened: bool = False) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.begun, self.open, self.calls = threading.Event(), threading.Event(), 0
        if opened:
            self.open.set()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.begun.set()
        assert self.open.wait(LONG)
        return self.factor * x


def of(module: nn.Module, name: str = "expert", lr: float | None = 0.1, **options: Any) -> ExpertBackend:
    opt = None if lr is None else torch.optim.SGD(module.parameters(), lr)
    return ExpertBackend(name, module, opt, args_schema=[ROW], outputs_schema=ROW, **options)


class Raising(nn.Module):
    """Raises the given exception."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.factor, self.error = nn.Parameter(torch.ones(())), error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.factor, self.seconds = nn.Parameter(torch.ones(())), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.factor * x


class Unsavable(torch.optim.SGD):
    """From its first step on, its state cannot be saved in a checkpoint."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = collections.deque([1.0])


# --- for processes ---


def unsavable() -> ExpertBackend:
    expert = nn.Linear(WIDTH, WIDTH)
    return ExpertBackend("e", expert, Unsavable(expert.parameters(), 0.1), args_schema=[ROW], outputs_schema=ROW)


def two() -> list[ExpertBackend]:
    return [mlp("a", 1), mlp("b", 2)]


def named() -> list[ExpertBackend]:
    """Return the experts whose names are in the environment."""
    return [mlp(name, sum(map(ord, name))) for name in os.environ["EXPERTS"].split(",")]


def one_that_hangs() -> list[ExpertBackend]:
    return [mlp("a", 1), of(Held(), "held")]


def counter() -> ExpertBackend:
    return counting()


def broken() -> list[ExpertBackend]:
    raise RuntimeError("no experts today")
