"""Parameters that stages on several ranks share: each rank has a copy, and all copies get the same gradient.

The gradient is the sum over stages. Every rank adds the same parts in the same order, so copies that were equal stay
equal to the last bit, and equal to the parameter of a pipe in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from pymoe.pipe.stages import Pipeline

__all__ = ["Shared", "Tied", "shared_parameters"]


class Shared(NamedTuple):
    """A parameter that several stages share."""

    places: dict[int, tuple[nn.Module, str]]
    """For each of these stages, in their order: a module, and the name of the parameter in it."""

    def of(self, stage: int) -> nn.Parameter:
        """Return the stage's parameter, which may have been replaced since."""
        module, name = self.places[stage]
        return module.get_parameter(name)


def shared_parameters(pipeline: Pipeline) -> list[Shared]:
    """Return the parameters that several stages share, in the same order in every process."""
    found: dict[int, dict[int, tuple[nn.Module, str]]] = {}
    for number, stage in enumerate(pipeline.stages):
        for module in stage.modules:
            for name, parameter in module.named_parameters():
                found.setdefault(id(parameter), {}).setdefault(number, (module, name))
    return [Shared(places) for places in found.values() if len(places) > 1]


class Tied:
    """The part of one rank in the shared parameters."""

    def __init__(self, pipeline: Pipeline, rank_of: Sequence[int], rank: int) -> None:
        self.sent: dict[tuple[int, int], list[Shared]] = {}
        """For a stage of this rank and another rank: the parameters whose gradients are sent there."""
        self.received: dict[int, list[Shared]] = {}
        """For a stage of another rank: the parameters whose gradients are received from it."""
        self.copied_to: dict[int, list[Shared]] = {}
        """For another rank: the parameters that are copied to it, as this is the first stage's rank."""
        self.copied_from: dict[int, list[Shared]] = {}
        """For another rank: the parameters that are copied from it."""
        self._rank_of = rank_of
        self._rank = rank
        for shared in shared_parameters(pipeline):
            ranks = [rank_of[stage] for stage in shared.places]
            others = sorted({*ranks} - {rank})
            if rank not in ranks or not others:
                continue
            for stage in shared.places:
                if rank_of[stage] != rank:
                    self.received.setdefault(stage, []).append(shared)
                    continue
                for other in others:
                    self.sent.setdefault((stage, other), []).append(shared)
            if ranks[0] != rank:
                self.copied_from.setdefault(ranks[0], []).append(shared)
                continue
            for other in others:
                self.copied_to.setdefault(other, []).append(shared)

    def own(self, shared: Shared) -> nn.Parameter:
        """Return this rank's copy."""
        return shared.of(next(stage for stage in shared.places if self._rank_of[stage] == self._rank))
