"""Parameters that stages on several ranks share: each rank has a copy, and all copies get the same gradient.

The gradient is the sum over stages. Every rank adds the same parts in the same order, so copies that were equal stay
equal to the last bit, and equal to the parameter of a pipe in one process.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pymoe.pipe.devices import shared_parameters

Shared = dict[int, str]
"""A parameter that several stages share: its name in each of them."""


class Tied:
    """The part of one rank in the shared parameters of a pipeline, whose stages have the modules ``parts``."""

    def __init__(self, parts: Sequence[nn.Module], rank_of: Sequence[int], rank: int) -> None:
        self.sent: dict[tuple[int, int], list[Shared]] = {}
        """For a stage of this rank and another rank: the parameters whose gradients are sent there."""
        self.received: dict[int, list[Shared]] = {}
        """For a stage of another rank: the parameters whose gradients are received from it."""
        self.copied_to: dict[int, list[Shared]] = {}
        """For another rank: the parameters that are copied to it, as this is the first stage's rank."""
        self.copied_from: dict[int, list[Shared]] = {}
        """For another rank: the parameters that are copied from it."""
        self._parts = parts
        self._shared = list(shared_parameters(parts))
        self._look()
        self._own = {stage for stage, of_stage in enumerate(rank_of) if of_stage == rank}
        for shared in self._shared:  # in the same order in every process
            ranks = [rank_of[stage] for stage in shared]
            others = sorted({*ranks} - {rank})
            if rank not in ranks or not others:
                continue
            for stage in shared:
                if stage not in self._own:
                    self.received.setdefault(stage, []).append(shared)
                    continue
                for other in others:
                    self.sent.setdefault((stage, other), []).append(shared)
            if ranks[0] != rank:
                self.copied_from.setdefault(ranks[0], []).append(shared)
                continue
            for other in others:
                self.copied_to.setdefault(other, []).append(shared)

    def _look(self) -> None:
        modules = {module for part in self._parts for module in part.modules()}
        self._seen = [(module._parameters, *item) for module in modules for item in module._parameters.items()]

    def holds(self) -> bool:
        """Return whether stages share what they shared; parameters may have been replaced, tied or untied since."""
        if all(parameters.get(name) is parameter for parameters, name, parameter in self._seen):
            return True
        self._look()
        return list(shared_parameters(self._parts)) == self._shared

    def of(self, stage: int, shared: Shared) -> nn.Parameter:
        """Return the stage's parameter, which may have been replaced since."""
        return self._parts[stage].get_parameter(shared[stage])

    def own(self, shared: Shared) -> nn.Parameter:
        """Return this rank's copy."""
        return self.of(next(stage for stage in shared if stage in self._own), shared)
