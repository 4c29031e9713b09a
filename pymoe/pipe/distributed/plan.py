"""Plans which values one rank exchanges with the others.

A value is sent once from the rank that makes it to every other rank with a stage that takes it, and the gradients of
that rank's stages come back as one sum. Everything that a stage makes for a rank is sent together: one message there
and one back for every micro-batch. Inputs of the model are made by stage 0; its outputs are taken by the last stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pymoe.pipe.stages import INPUT, Pipeline, Source


@dataclass(frozen=True, eq=False)
class Plan:
    """The part of ``rank`` in a pipeline."""

    pipeline: Pipeline
    rank_of: Sequence[int]
    """The rank of every stage."""
    rank: int

    @cached_property
    def stages(self) -> list[int]:
        """The stages of this rank."""
        return [stage for stage, rank in enumerate(self.rank_of) if rank == self.rank]

    @cached_property
    def takes(self) -> list[tuple[Source, ...]]:
        """What every stage takes. The last one also takes the model's outputs, except those that it makes."""
        taken = [stage.inputs for stage in self.pipeline.stages]
        last = len(taken) - 1
        taken[last] = (*taken[last], *[source for source in self.pipeline.outputs if source.stage != last])
        return taken

    @cached_property
    def _makers(self) -> list[set[int]]:
        """The stages that send to every stage. One without inputs still hears of every micro-batch from stage 0."""
        makers = [{maker_of(source) for source in taken} - {stage} for stage, taken in enumerate(self.takes)]
        return [found or ({0} if stage else set()) for stage, found in enumerate(makers)]

    def _received(self, rank: int) -> Mapping[int, tuple[Source, ...]]:
        """Return, for every stage of other ranks that sends to ``rank``, what it sends."""
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
        """For every stage of other ranks that sends here, what it sends."""
        return self._received(self.rank)

    @cached_property
    def sent(self) -> Mapping[int, Mapping[int, tuple[Source, ...]]]:
        """For every stage of this rank, what it sends to which ranks. As many messages come back with gradients."""
        received = {rank: self._received(rank) for rank in sorted(set(self.rank_of)) if rank != self.rank}
        return {
            stage: {rank: values[stage] for rank, values in received.items() if stage in values}
            for stage in self.stages
        }

    @cached_property
    def waits_for(self) -> Mapping[int, tuple[int, ...]]:
        """For every stage of this rank, the stages of other ranks whose values it needs."""
        return {
            stage: tuple(maker for maker in sorted(self._makers[stage]) if self.rank_of[maker] != self.rank)
            for stage in self.stages
        }

    @cached_property
    def returns(self) -> Mapping[int, tuple[int, ...]]:
        """For every stage of this rank, the stages of other ranks whose gradients are complete after its backward.

        Backwards run from the last stage to the first, so it is the first stage here that takes their values.
        """
        first = {maker: min(s for s in self.stages if maker in self.waits_for[s]) for maker in self.received}
        return {stage: tuple(maker for maker, s in first.items() if s == stage) for stage in self.stages}

    def messages(self, count: int, graphs: bool) -> dict[int, int]:
        """Count the messages from every other rank in a step of ``count`` micro-batches, with backwards or without."""
        of_each = Counter(self.rank_of[maker] for maker in self.received)
        if graphs:
            of_each.update(rank for to in self.sent.values() for rank in to)
        return {rank: number * count for rank, number in of_each.items()}

    @cached_property
    def uses(self) -> Counter[Source]:
        """How often every value is taken on this rank. Sending it to any number of ranks counts once."""
        uses = Counter(source for stage in self.stages for source in self.takes[stage])
        uses.update({source for to in self.sent.values() for sources in to.values() for source in sources})
        last = len(self.rank_of) - 1
        if self.rank_of[last] == self.rank:
            uses.update({source for source in self.pipeline.outputs if source.stage == last})
        return uses


def maker_of(source: Source) -> int:
    """Return the stage whose rank has the value first."""
    return 0 if source.stage == INPUT else source.stage
