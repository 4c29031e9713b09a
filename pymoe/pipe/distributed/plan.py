"""Plans what one rank exchanges with the others: values, their gradients, and gradients of shared parameters.

A value is sent once from the rank that makes it to every other rank with a stage that takes it, and the gradients of
that rank's stages come back as one sum. Everything that a stage makes for a rank is sent together: for every
micro-batch one message there and one back. Inputs of the model count as made by stage 0, and its outputs as taken by
the last stage.

If stages on several ranks share a parameter, each rank has a copy, and all copies get the same gradient, the sum over
stages. Every rank adds the same parts in the same order, so copies that were equal stay equal to the last bit, and
equal to the parameter of a pipe in one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from pymoe.pipe.stages import INPUT, Pipeline, Source, shared_parameters


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The part of ``rank`` in a pipeline: its stages, and the values that it takes and sends."""

    pipeline: Pipeline
    rank_of: Sequence[int]
    """The rank of every stage."""
    rank: int

    @cached_property
    def stages(self) -> list[int]:
        """Return the stages of this rank."""
        return [stage for stage, rank in enumerate(self.rank_of) if rank == self.rank]

    @cached_property
    def takes(self) -> list[tuple[Source, ...]]:
        """Return the values that every stage takes. The last one also takes the model's outputs, except those that it
        makes.
        """
        taken = [stage.inputs for stage in self.pipeline.stages]
        last = len(taken) - 1
        taken[last] = (*taken[last], *[source for source in self.pipeline.outputs if source.stage != last])
        return taken

    @cached_property
    def _makers(self) -> list[set[int]]:
        """Return, for every stage, the stages that send to it. A stage without inputs gets an empty message from stage
        0.
        """
        makers = [{maker_of(source) for source in taken} - {stage} for stage, taken in enumerate(self.takes)]
        return [found or ({0} if stage else set()) for stage, found in enumerate(makers)]

    def _received(self, rank: int) -> Mapping[int, tuple[Source, ...]]:
        """Return, for every stage of other ranks that sends to ``rank``, the values that it sends."""
        values: dict[int, dict[Source, None]] = {}
        for stage, taken in enumerate(self.takes):
            if self.rank_of[stage] == rank:
                for maker in sorted(self._makers[stage]):
                    if self.rank_of[maker] != rank:
                        own = [source for source in taken if maker_of(source) == maker]
                        values.setdefault(maker, {}).update(dict.fromkeys(own))
        return {maker: tuple(sources) for maker, sources in sorted(values.items())}

    @cached_property
    def received(self) -> Mapping[int, tuple[Source, ...]]:
        """Return, for every stage of other ranks that sends here, the values that it sends."""
        return self._received(self.rank)

    @cached_property
    def sent(self) -> Mapping[int, Mapping[int, tuple[Source, ...]]]:
        """Return, for every stage of this rank, the values that it sends, by the receiving rank. Each message is
        answered by one with gradients.
        """
        received = {rank: self._received(rank) for rank in sorted(set(self.rank_of)) if rank != self.rank}
        return {
            stage: {rank: values[stage] for rank, values in received.items() if stage in values}
            for stage in self.stages
        }

    @cached_property
    def waits_for(self) -> Mapping[int, tuple[int, ...]]:
        """Return, for every stage of this rank, the stages of other ranks whose values it needs."""
        return {
            stage: tuple(maker for maker in sorted(self._makers[stage]) if self.rank_of[maker] != self.rank)
            for stage in self.stages
        }

    @cached_property
    def returns(self) -> Mapping[int, tuple[int, ...]]:
        """Return, for every stage of this rank, the stages of other ranks whose gradients its backward completes.

        Backwards run from the last stage to the first. So the gradients of another stage are complete after the
        backward of the first stage here that takes its values.
        """
        first = {maker: min(s for s in self.stages if maker in self.waits_for[s]) for maker in self.received}
        return {stage: tuple(maker for maker, s in first.items() if s == stage) for stage in self.stages}

    def messages(self, count: int, graphs: bool) -> dict[int, int]:
        """Return the number of messages from every other rank in a step of ``count`` micro-batches; ``graphs``: whether
        the step has backwards.
        """
        of_each = Counter(self.rank_of[maker] for maker in self.received)
        if graphs:
            of_each.update(rank for to in self.sent.values() for rank in to)
        return {rank: number * count for rank, number in of_each.items()}

    @cached_property
    def uses(self) -> Counter[Source]:
        """Return how often every value is used on this rank. Sending it to any number of ranks counts once."""
        uses = Counter(source for stage in self.stages for source in self.takes[stage])
        uses.update({source for to in self.sent.values() for sources in to.values() for source in sources})
        last = len(self.rank_of) - 1
        if self.rank_of[last] == self.rank:
            uses.update({source for source in self.pipeline.outputs if source.stage == last})
        return uses


def maker_of(source: Source) -> int:
    """Return the stage that makes a value. Inputs of the model count as made by stage 0, whose rank gets them."""
    return 0 if source.stage == INPUT else source.stage


# Parameters that stages on several ranks share.

Shared = dict[int, str]
"""A parameter that several stages share: its name in each of them."""


class Tied:
    """The gradients of shared parameters that one rank sends and receives. ``parts``: the modules of the pipeline's
    stages.
    """

    def __init__(self, parts: Sequence[nn.Module], rank_of: Sequence[int], rank: int) -> None:
        self.sent: dict[tuple[int, int], list[Shared]] = {}
        """The parameters whose gradients are sent, by stage of this rank and receiving rank."""
        self.received: dict[int, list[Shared]] = {}
        """The parameters whose gradients are received, by stage of another rank."""
        self.copied_to: dict[int, list[Shared]] = {}
        """The parameters that this rank copies to other ranks, because it has their first stage, by the other rank."""
        self.copied_from: dict[int, list[Shared]] = {}
        """The parameters that are copied from other ranks, by the other rank."""
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
        """Return whether stages still share the same parameters: they may have been replaced, tied or untied."""
        if all(parameters.get(name) is parameter for parameters, name, parameter in self._seen):
            return True
        self._look()
        return list(shared_parameters(self._parts)) == self._shared

    def of(self, stage: int, shared: Shared) -> nn.Parameter:
        """Return the stage's parameter, which may have been replaced since."""
        return self._parts[stage].get_parameter(shared[stage])

    def own(self, shared: Shared) -> nn.Parameter:
        """Return this rank's copy of a shared parameter."""
        return self.of(next(stage for stage in shared if stage in self._own), shared)
