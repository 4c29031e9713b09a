"""Which rank has which experts of a layer, and in which order rows are sent to them. The same on every rank.

Experts are numbered as in one process. Parameters are stacked along positions, of which each rank has a span; a
placement says which expert is at which position.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Scope = Literal["rank", "group"]
"""Over whose tokens capacity and auxiliary losses are taken."""
Transport = Literal["exact", "padded"]
"""Whether ranks tell each other how many rows they send, or always send as many."""


class Tables(NamedTuple):
    """What an arrangement says of experts, as int32 tensors on a device."""

    destination: torch.Tensor
    """(E,): where their rows go: the chunk times R, and the rank."""
    number: torch.Tensor
    """(E,): their numbers among the experts of a chunk on a rank, from 0 on."""
    first_row: torch.Tensor
    """(chunks * R + 1,): where the rows for each destination begin, with :attr:`Arrangement.room_of_pair` for each."""
    all_rows: torch.Tensor
    """(2,): 0, and how many rows these are."""


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
    deduplicate: bool = False
    """Whether a token travels once to a rank of which it chose several experts."""
    transport: Transport = "exact"

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

    @property
    def destinations(self) -> int:
        """How many there are for rows, a rank in a chunk each."""
        return self.chunks * self.ranks

    @property
    def announced(self) -> int:
        """How many numbers a rank announces: a load for each expert, and rows for each destination if they differ."""
        return self.num_experts + (self.destinations if self.deduplicate else 0)

    @property
    def room_of_pair(self) -> int:
        """How many rows a rank sends to another in a chunk, if that is always as many."""
        return 0 if self.room is None else self.room // self.destinations

    def tables(self, device: torch.device) -> Tables:
        """Return the tables on a device; only the first time are they moved there."""
        if device not in self._tables:
            with torch.inference_mode(False):  # they outlive the call
                self._tables[device] = self._made_on(device)
        return self._tables[device]

    @cached_property
    def _tables(self) -> dict[torch.device, Tables]:
        return {}

    def _made_on(self, device: torch.device) -> Tables:
        places = [
            (expert, chunk * self.ranks + rank, number)
            for chunk, cut in enumerate(self.cuts)
            for rank, experts in enumerate(cut)
            for number, expert in enumerate(experts)
        ]
        sizes = [self.room_of_pair if experts else 0 for cut in self.cuts for experts in cut]
        first_row = [0, *itertools.accumulate(sizes)]
        _, destination, number = zip(*sorted(places), strict=True)
        columns = (destination, number, first_row, [0, first_row[-1]])
        return Tables(*(torch.tensor(column, dtype=torch.int32).to(device) for column in columns))

    def __deepcopy__(self, memo: dict[int, Any]) -> Arrangement:
        """Return itself: a copy of the layer is on the same ranks."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: the group, which is among what is derived from them, cannot be pickled."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
