"""Which rank has which experts of a layer, and in which order rows are sent to them. The same on every rank.

Experts are numbered as in one process. Parameters are stacked along positions, of which each rank has a span; a
placement says which expert is at which position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Scope = Literal["rank", "group"]
"""Over whose tokens capacity and auxiliary losses are taken."""


def shards(num_experts: int, ranks: int) -> list[range]:
    """Return the positions of every rank: those of ``torch.chunk``, as ``Shard(0)`` of a DTensor has them.

    Six experts on four ranks are 2, 2, 2 and 0.

    Args:
        num_experts: E.
        ranks: R, at least 1.
    """
    each = -(-num_experts // ranks)
    return [range(min(r * each, num_experts), min((r + 1) * each, num_experts)) for r in range(ranks)]


@dataclass(frozen=True)
class Arrangement:
    """How one layer is spread over a group of ranks."""

    layer: str
    """Its name in the model."""
    mesh: DeviceMesh
    """One dimension: the ranks of the group."""
    num_experts: int
    """E."""
    chunks: int
    """In how many exchanges the rows of a call travel."""
    scope: Scope
    room: int | None
    """The most rows that a rank may receive in a call."""
    model: int = 1
    """The number of its model among those that are spread over the same group, from 1 on."""
    clones: int = 0
    """How many clones of experts a rank may take for a call."""
    worth: int = 1
    """The fewest rows for which an expert is cloned."""
    order: tuple[int, ...] | None = None
    """(E,): the expert at each position, ascending within a rank; None while each is at its own."""
    everyone: DeviceMesh | None = None
    """One dimension: the ranks that have these experts or copies of them; None for those of the group alone."""

    @cached_property
    def title(self) -> str:
        """What errors call the layer, and what stands for it in messages."""
        return repr(self.layer) if self.model == 1 else f"{self.layer!r} of model {self.model}"

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.mesh.get_group()

    @cached_property
    def ranks(self) -> int:
        """How many there are."""
        return self.mesh.size()

    @cached_property
    def rank(self) -> int:
        """The number of this one in the group."""
        return self.mesh.get_local_rank()

    @cached_property
    def spans(self) -> list[range]:
        """The positions of every rank."""
        return shards(self.num_experts, self.ranks)

    @cached_property
    def shards(self) -> list[Sequence[int]]:
        """The experts of every rank."""
        order = self.order
        return [span if order is None else order[span.start : span.stop] for span in self.spans]

    @cached_property
    def own(self) -> Sequence[int]:
        """The experts of this rank."""
        return self.shards[self.rank]

    @cached_property
    def owner(self) -> list[int]:
        """(E,): the rank of each expert."""
        owner = [0] * self.num_experts
        for rank, experts in enumerate(self.shards):
            for expert in experts:
                owner[expert] = rank
        return owner

    @cached_property
    def cuts(self) -> list[list[Sequence[int]]]:
        """The experts of every chunk on every rank: the same share of each rank's, ``cuts[chunk][rank]``."""
        return [
            [shard[c * len(shard) // self.chunks : (c + 1) * len(shard) // self.chunks] for shard in self.shards]
            for c in range(self.chunks)
        ]

    @cached_property
    def sent_order(self) -> list[int]:
        """The experts in the order in which their rows are sent: by chunk, then by rank."""
        return [expert for cut in self.cuts for experts in cut for expert in experts]

    @cached_property
    def positions(self) -> torch.Tensor | None:
        """(E,) int32: the place of every expert in :attr:`sent_order`; None if each is in its own."""
        if self.sent_order == list(range(self.num_experts)):
            return None
        places = torch.empty(self.num_experts, dtype=torch.int32)
        places[torch.tensor(self.sent_order)] = torch.arange(self.num_experts, dtype=torch.int32)
        return places

    def __deepcopy__(self, memo: dict[int, Any]) -> Arrangement:
        """Return itself: a copy of the layer is on the same ranks."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: the group, which is among what is derived from them, cannot be pickled."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
