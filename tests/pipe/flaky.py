"""A model whose layers take random times, and raise where a test plants an error."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import Counter
from typing import Any

import torch
from torch import nn
from unseen import unseen

from pymoe.pipe import Pipe
from pymoe.pipe.context import is_recomputing, micro_batch

STAGES, CHUNKS, ROWS, WIDTH = 4, 4, 10, 6


_making = threading.Lock()  # torch's generator is shared by all threads


class Planted(Exception):
    """A planted error; carries the pass, stage and micro-batch."""


class Faults:
    """Decides which calls in a model's steps raise, and how long layers take."""

    def __init__(self, seed: int, *, rate: float = 0.0, longest: float = 0.0) -> None:
        """
        Args: seed: determines all choices. rate: the share of calls that raise. longest: most seconds that a call
            takes.
        """
        self._seed = seed
        self._lock = threading.Lock()
        self.rate = rate
        self.longest = longest
        self.step = 0
        self._inside: Counter[int] = Counter()  # calls in progress, by thread
        self.seen: list[weakref.ref[torch.Tensor]] = []  # tensors that layers have received or created

    def planted(self, *place: Any) -> bool:
        """Return whether the call at a place (pass, stage, micro-batch) raises in this step."""
        return random.Random(f"{self._seed} {self.step} {place}").random() < self.rate

    def call(self, *place: Any) -> None:
        """Take the time of the call at a place; raise what is planted there."""
        with self._lock:
            self._inside[threading.get_ident()] += 1
        try:
            if self.longest:
                time.sleep(random.random() * self.longest)
            if self.planted(*place):
                raise Planted(*place)
        finally:
            with self._lock:
                self._inside[threading.get_ident()] -= 1

    @property
    def inside(self) -> int:
        """Return the number of calls in progress in other threads. (Ctrl-C may end a call of the main thread
        uncounted.)
        """
        with self._lock:
            return sum(count for thread, count in self._inside.items() if thread != threading.get_ident())

    def forget_threads(self) -> None:
        """Forget other threads in a forked child, where they do not exist."""
        self._lock = threading.Lock()
        self._inside.clear()


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, faults: Faults, place: tuple[Any, ...], x: torch.Tensor) -> torch.Tensor:
        ctx.faults, ctx.place = faults, place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.faults.seen.append(weakref.ref(grad))
        ctx.faults.call(*ctx.place)
        return None, None, grad * 1


class Flaky(nn.Module):
    """A layer, the only one of its stage."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self._faults = unseen(faults)  # not part of the model's state, so recomputations count

    @property
    def faults(self) -> Faults:
        """Return the planned faults of the model."""
        faults: Faults = self._faults()
        return faults

    def __deepcopy__(self, memo: Any) -> Flaky:
        copy = Flaky(self.faults)
        copy.load_state_dict(self.state_dict())
        return copy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        about = micro_batch()
        if about is not None:
            place = (about.stage, about.index)
            self.faults.seen.append(weakref.ref(x))
            self.faults.call("recomputation" if is_recomputing() else "forward", *place)
        y = torch.tanh(self.linear(x))
        return y if about is None else _Backward.apply(self.faults, ("backward", *place), y)


def model(faults: Faults) -> nn.Sequential:
    """Return a model that always has the same weights."""
    with _making:
        torch.manual_seed(0)
        return nn.Sequential(*[Flaky(faults) for _ in range(STAGES)])


def batch() -> torch.Tensor:
    """Return a batch, always the same one."""
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_of(faults: Faults) -> Any:
    """Return a loss function that also raises planted errors."""

    def loss(y: torch.Tensor) -> torch.Tensor:
        about = micro_batch()
        if about is not None:
            faults.call("loss", about.stage, about.index)
        return y.square().mean()

    return loss


def places(checkpointed: range) -> list[tuple[str, int, int]]:
    """Return the places of a step's calls that may raise."""
    found = [(name, stage, i) for name in ("forward", "backward") for stage in range(STAGES) for i in range(CHUNKS)]
    found += [("recomputation", stage, i) for stage in range(STAGES) for i in checkpointed]
    return found + [("loss", STAGES - 1, i) for i in range(CHUNKS)]


def grads_of(module: nn.Module) -> list[torch.Tensor | None]:
    """Return the gradients of all parameters."""
    return [parameter.grad for parameter in module.parameters()]


def expected_grads() -> list[torch.Tensor]:
    """Return the gradients of the plain model."""
    plain = model(Faults(0))
    loss_of(Faults(0))(plain(batch())).backward()
    return [grad for grad in grads_of(plain) if grad is not None]


def run_step(pipe: Pipe, faults: Faults, **options: Any) -> torch.Tensor:
    """Run one step, without earlier gradients."""
    pipe.zero_grad()
    return pipe.step(batch(), loss_fn=loss_of(faults), **options)
