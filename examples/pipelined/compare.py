"""The same training steps by a model alone and by pipelines, in turns, and what must be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from .history import History

Data = TypeVar("Data", contravariant=True)


class Run(Protocol[Data]):
    """A model in training."""

    name: str
    model: nn.Module
    history: History

    def step(self, data: Data) -> None:
        """One optimizer step."""


def take_turns(runs: Sequence[Run[Data]], data: Data, dtype: torch.dtype, steps: int) -> None:
    """So many steps of every run, with losses printed on the way."""
    width = max(len(run.name) for run in runs)
    print(f"\n{str(dtype).removeprefix('torch.')}    loss: {'  '.join(f'{run.name:>{width}}' for run in runs)}")
    for step in range(steps):
        for run in runs if step % 2 else reversed(runs):
            run.step(data)
        if step in (0, steps - 1) or (step + 1) % 10 == 0:
            print(f"step {step + 1:3d}        {'  '.join(f'{run.history.loss[-1]:{width}.7f}' for run in runs)}")


def difference(alone: Run[Any], pipelines: Sequence[Run[Any]]) -> dict[str, float]:
    """The largest absolute differences of pipelines from the model: losses of all steps, parameters in the end."""
    return {
        "loss": max(abs(a - b) for run in pipelines for a, b in zip(alone.history.loss, run.history.loss, strict=True)),
        "parameter": max(
            float((a - b).detach().abs().max())
            for run in pipelines
            for a, b in zip(alone.model.parameters(), run.model.parameters(), strict=True)
        ),
    }


def are_equal(
    differences: Mapping[str, Mapping[str, float]], steps: Mapping[str, int], allowed: Mapping[str, float]
) -> dict[str, bool]:
    """What the runs must show of their differences, by dtype, in words, and whether they did."""
    found = {}
    for dtype, count in steps.items():
        loss, limit = differences[dtype]["loss"], allowed[dtype]
        found[f"{dtype}: losses differ by at most {loss:.1e} in {count} steps (allowed: {limit:g})"] = loss <= limit
    parameter = differences["float64"]["parameter"]
    found[f"float64: parameters differ by at most {parameter:.1e} afterwards (allowed: 1e-10)"] = parameter <= 1e-10
    return found
