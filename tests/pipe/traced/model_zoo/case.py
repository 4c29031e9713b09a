"""Test data of a model: examples, a loss, and split points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Batch(NamedTuple):
    """A call of the model, and the target of its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any

    def __call__(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Case:
    """A model in float64 with its test data. Losses are means over rows."""

    build: Callable[[], nn.Module]
    """Builds the model, always with the same weights."""
    batch: Callable[[int, torch.Generator], Batch]
    """So many rows."""
    splits: Mapping[str, str]
    """Names of submodules, each with ``"BEGINNING"`` or ``"END"``."""
    loss: Callable[[Any, Any], Tensor] = F.mse_loss
    marks: int = 0
    """The number of calls of ``pipe_split()`` in the model's code."""
    rows_meet: bool = False
    """True if layers combine all rows of a micro-batch; then the pipe equals the model run on micro-batches."""
    least_rows: int = 1
    """Smallest size of a micro-batch, since some models treat a single row differently."""
    parts: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    """The stages of a model that draws random numbers, as modules, because each stage has its own random stream."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for ``pymoe.pipeline``."""

    @property
    def stages(self) -> int:
        return 1 + len(self.splits) + self.marks

    def batches(self, count: int, rows: Sequence[int], seed: int = 1) -> list[Batch]:
        """Return ``count`` mini-batches, whose sizes cycle through ``rows``; by default they suffice for 3
        micro-batches.
        """
        generator = torch.Generator().manual_seed(seed)
        least = 1 if self.least_rows == 1 else 3 * self.least_rows
        return [self.batch(max(rows[number % len(rows)], least), generator) for number in range(count)]


class ThreeLayers(nn.Module):
    """Has the linear layers ``first``, ``second`` and ``third``."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))


THREE = {"second": "BEGINNING", "third": "BEGINNING"}
"""The splits of such a model into its layers."""


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def tokens(generator: torch.Generator, vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(vocabulary, shape, generator=generator)


def seeded(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Build the model in float64 from the same random numbers every time."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return model().double()

    return build


def of_numbers(width: int, *more: int) -> Callable[[int, torch.Generator], Batch]:
    """Return one input and one target, (rows, width)."""

    def batch(rows: int, generator: torch.Generator) -> Batch:
        return Batch((numbers(generator, rows, width, *more),), {}, numbers(generator, rows, width, *more))

    return batch


def of_tokens(vocabulary: int, length: int, **kwargs: Any) -> Callable[[int, torch.Generator], Batch]:
    """Return tokens and the tokens that follow them, (rows, length)."""

    def batch(rows: int, generator: torch.Generator) -> Batch:
        text = tokens(generator, vocabulary, rows, length + 1)
        return Batch((text[:, :-1],), kwargs, text[:, 1:])

    return batch


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the cross entropy, a mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
