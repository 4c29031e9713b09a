"""Parameters that stages on several ranks share: each rank has a copy, and all copies get the same gradient.

The gradient is the sum over stages, made on every rank of the same parts in the same order, so copies that were equal
stay equal to the last bit, and equal to the parameter of a pipe in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from pymoe.pipe.stages import Pipeline

__all__ = ["Tied", "shared_parameters"]


def shared_parameters(pipeline: Pipeline) -> list[tuple[torch.nn.Parameter, list[int]]]:
    """The parameters that several stages have, and these stages; in an order that is the same in every process."""
    users: dict[int, tuple[torch.nn.Parameter, list[int]]] = {}
    for number, stage in enumerate(pipeline.stages):
        own = {id(parameter): parameter for module in stage.modules for parameter in module.parameters()}
        for key, parameter in own.items():
            users.setdefault(key, (parameter, []))[1].append(number)
    return [(parameter, stages) for parameter, stages in users.values() if len(stages) > 1]


class Tied:
    """The shared parameters, seen from one rank."""

    def __init__(self, pipeline: Pipeline, rank_of: Sequence[int], rank: int) -> None:
        found = [(p, stages, {rank_of[stage] for stage in stages}) for p, stages in shared_parameters(pipeline)]
        self._found = [(p, stages, ranks) for p, stages, ranks in found if rank in ranks and len(ranks) > 1]
        self._rank_of = rank_of
        self._rank = rank

    def __bool__(self) -> bool:
        return bool(self._found)

    @cached_property
    def sent(self) -> dict[tuple[int, int], list[torch.nn.Parameter]]:
        """For a stage of this rank and another rank: the parameters whose gradients go there."""
        found: dict[tuple[int, int], list[torch.nn.Parameter]] = {}
        for parameter, stages, ranks in self._found:
            for stage in stages:
                if self._rank_of[stage] == self._rank:
                    for rank in sorted(ranks - {self._rank}):
                        found.setdefault((stage, rank), []).append(parameter)
        return found

    @cached_property
    def received(self) -> dict[int, list[torch.nn.Parameter]]:
        """For a stage of another rank: the parameters whose gradients come from it."""
        found: dict[int, list[torch.nn.Parameter]] = {}
        for parameter, stages, _ in self._found:
            for stage in stages:
                if self._rank_of[stage] != self._rank:
                    found.setdefault(stage, []).append(parameter)
        return dict(sorted(found.items()))

    @cached_property
    def copied_to(self) -> dict[int, list[torch.nn.Parameter]]:
        """For another rank: the parameters of which it gets its copy from here, being the first stage's rank."""
        found: dict[int, list[torch.nn.Parameter]] = {}
        for parameter, stages, ranks in self._found:
            if self._rank_of[stages[0]] == self._rank:
                for rank in sorted(ranks - {self._rank}):
                    found.setdefault(rank, []).append(parameter)
        return found

    @cached_property
    def copied_from(self) -> dict[int, list[torch.nn.Parameter]]:
        """For another rank: the parameters of which this one gets its copy from there."""
        found: dict[int, list[torch.nn.Parameter]] = {}
        for parameter, stages, _ in self._found:
            first = self._rank_of[stages[0]]
            if first != self._rank:
                found.setdefault(first, []).append(parameter)
        return found
