"""A pipeline is stages and edges: functions, and which value of which of them feeds which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

INPUT = -1


class Source(NamedTuple):
    """Where a value comes from: an output of a stage, or, with the stage ``INPUT``, an input of the pipeline."""

    stage: int
    number: int


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of a model, as a function of values. A value is a tensor, any nested structure of tensors, or anything."""

    function: Callable[..., Sequence[Any]]
    """Called with the values of ``inputs``; returns its output values, ``outputs`` of them."""
    inputs: tuple[Source, ...]
    outputs: int
    modules: tuple[nn.Module, ...] = ()
    """Whose parameters and buffers the function uses."""
    device: torch.device | None = None
    """Where its inputs are moved; None: they stay where they are."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Stages in an order in which they can run: each takes what earlier ones have made."""

    stages: tuple[Stage, ...]
    inputs: int
    """How many values the pipeline takes."""
    outputs: tuple[Source, ...]
    """The values it returns."""

    @cached_property
    def uses(self) -> Mapping[Source, int]:
        """How often every value is taken: by stages, and once if it is among the outputs. 0 if it is not used."""
        uses = Counter(source for stage in self.stages for source in stage.inputs)
        uses.update(set(self.outputs))
        return uses

    @cached_property
    def made(self) -> tuple[tuple[Source, ...], ...]:
        """For every stage its outputs as sources."""
        return tuple(
            tuple(Source(number, output) for output in range(stage.outputs)) for number, stage in enumerate(self.stages)
        )
