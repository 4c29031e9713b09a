"""Builds experts, mixtures of them, and equivalent mixtures in plain PyTorch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from limits import LONG
from torch import Tensor, nn

from pymoe.runtime import BatchTensorProto, ExpertBackend, MixtureOfExpertBackends

WIDTH = 4
ROW = BatchTensorProto(WIDTH, dtype=torch.float64)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()


class Scaled(nn.Module):
    """Multiplies rows by a number, after it has called ``before``."""

    def __init__(self, factor: float, before: Callable[[Tensor], Any] = lambda x: None) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        self.before(x)
        return self.factor * x


class Stuck:
    """Blocks every caller until it is opened, so that tests can let an expert hang."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self, x: Tensor) -> None:
        self.begun.set()
        assert self.open.wait(LONG)


def dead(x: Tensor) -> None:
    raise ConnectionError("the expert has gone")


def backend(name: str, expert: nn.Module, lr: float | None = 0.05, **options: Any) -> ExpertBackend:
    opt = None if lr is None else torch.optim.SGD(expert.parameters(), lr=lr)
    options.setdefault("args_schema", [ROW])
    options.setdefault("outputs_schema", ROW)
    return ExpertBackend(name, expert, opt, **options)


def scaled(*befores: Callable[[Tensor], Any] | None, **options: Any) -> list[ExpertBackend]:
    """Return backends ``e0``, ``e1``, … that return 1, 2, … times their rows, each after it has called its function."""
    return [
        backend(f"e{i}", Scaled(i + 1.0) if before is None else Scaled(i + 1.0, before), **options)
        for i, before in enumerate(befores)
    ]


class Logits(nn.Module):
    """A gate that returns given logits, the same for every row or one set per row."""

    def __init__(self, logits: Sequence[Any]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), self.logits.shape[-1])


def mixture(backends: Sequence[ExpertBackend], **options: Any) -> MixtureOfExpertBackends:
    options.setdefault("forward_timeout", LONG)
    options.setdefault("backward_timeout", LONG)
    options.setdefault("timeout_after_k_min", None)
    options.setdefault("top_k", min(2, len(backends)))
    return MixtureOfExpertBackends(backends, **options).double()


class Plain(nn.Module):
    """The mixture in plain PyTorch: its own experts, and dense sums over the chosen experts."""

    def __init__(self, mixture: MixtureOfExpertBackends, out: Sequence[int] = ()) -> None:
        super().__init__()
        self.gate = copy.deepcopy(mixture.gate)
        self.top_k = mixture.top_k
        self.experts = nn.ModuleList(copy.deepcopy(one.expert) for one in mixture.backends.values())
        self.slots = list(mixture.slots.values())
        self.out = set(out)  # slots that give no answers

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        logits = self.gate(args[0])[:, self.slots]
        best = logits.topk(min(self.top_k, len(self.slots)), dim=1)
        came = torch.tensor([slot not in self.out for slot in self.slots])[best.indices]
        weights = best.values.masked_fill(~came, -torch.inf).softmax(1)
        rows = []
        for i in range(len(args[0])):
            own = [x[i : i + 1] for x in args]
            own_kwargs = {name: x[i : i + 1] for name, x in kwargs.items()}
            parts = [
                weight * self.experts[j](*own, **own_kwargs)
                for weight, j, there in zip(weights[i], best.indices[i].tolist(), came[i].tolist(), strict=True)
                if there
            ]
            rows.append(sum(parts[1:], parts[0]))
        return torch.cat(rows) if rows else torch.zeros_like(args[0])
