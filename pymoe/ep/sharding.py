"""The sharding of a layer's experts over a group of ranks: which rank has which experts.

Experts are numbered as in one process. Parameters are stacked along positions, and each rank has a range of positions;
the current placement says which expert is at which position. The description of a sharding is the same on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

PARAMETERS = ("w_in", "w_out", "b_in", "b_out")
"""Names of the parameters of experts, of which the last two may be None."""
Scope = Literal["rank", "group"]
"""The tokens over which capacity and auxiliary losses are computed: each rank's own tokens, or the tokens of all ranks
of the group."""
Transport = Literal["exact", "padded"]
"""``"exact"`` sends as many rows as the choices need, ``"padded"`` the same number of rows in every call."""


class RoutingTables(NamedTuple):
    """Lookup tables of an :class:`ExpertSharding`: int32 tensors on one device."""

    destination: Tensor
    """(E,): the destination of each expert's rows: the expert's chunk times R, plus its rank."""
    index_in_chunk: Tensor
    """(E,): the index of each expert among the experts that its rank has in the same chunk."""
    first_row: Tensor
    """(chunks * R + 1,): the first row of each destination in a padded send buffer, then the total number of rows."""
    all_rows: Tensor
    """(2,): 0, and the number of rows in a padded send buffer."""


def shard_ranges(num_experts: int, ranks: int) -> list[range]:
    """Return the range of positions of every rank, as ``torch.chunk`` and DTensor's ``Shard(0)`` divide experts.

    For six experts on four ranks, the ranges have 2, 2, 2 and 0 positions.

    Args:
        num_experts: E, the number of experts.
        ranks: R, at least 1.
    """
    each = -(-num_experts // ranks)
    return [range(min(r * each, num_experts), min((r + 1) * each, num_experts)) for r in range(ranks)]


@dataclass(frozen=True)
class ExpertSharding:
    """Describes how the experts of one layer are spread over a group of ranks, and how rows travel to them."""

    layer: str
    """Name of the layer in its model."""
    mesh: DeviceMesh
    """One-dimensional mesh of the ranks of the group."""
    num_experts: int
    """E, the number of experts."""
    chunks: int
    """Number of exchanges in which the rows of a call travel."""
    scope: Scope
    max_recv_rows: int | None
    """The maximum number of rows that a rank may receive in a call (the option ``room``); None for no limit."""
    model: int = 1
    """Number of the layer's model, from 1 on, among the models that are sharded over the same group."""
    clones: int = 0
    """The maximum number of other ranks' experts that a rank may clone in a call."""
    min_rows_to_clone: int = 1
    """The smallest number of rows that are moved to a clone."""
    order: tuple[int, ...] | None = None
    """(E,): the expert at each position, ascending within a rank; None while expert e is at position e."""
    data_parallel_mesh: DeviceMesh | None = None
    """One-dimensional mesh of all ranks that have these experts or copies of them; None: only the group has them."""
    deduplicate: bool = False
    """True if a token travels once to a rank of which it chose several experts."""
    transport: Transport = "exact"

    @cached_property
    def title(self) -> str:
        """Return the layer's name in error messages. Messages between ranks contain a checksum of it."""
        return repr(self.layer) if self.model == 1 else f"{self.layer!r} of model {self.model}"

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks."""
        return self.mesh.get_group()

    @cached_property
    def ranks(self) -> int:
        """Return R, the number of ranks."""
        return self.mesh.size()

    @cached_property
    def rank(self) -> int:
        """Return the number of this rank in the group."""
        return self.mesh.get_local_rank()

    @cached_property
    def ranges(self) -> list[range]:
        """Return (R,): the range of positions of each rank."""
        return shard_ranges(self.num_experts, self.ranks)

    @cached_property
    def experts_of_ranks(self) -> list[Sequence[int]]:
        """Return (R,): the experts of each rank."""
        order = self.order
        return [own if order is None else order[own.start : own.stop] for own in self.ranges]

    @cached_property
    def own_experts(self) -> Sequence[int]:
        """Return the experts of this rank."""
        return self.experts_of_ranks[self.rank]

    @cached_property
    def owner(self) -> list[int]:
        """Return (E,): the rank of each expert."""
        owner = [0] * self.num_experts
        for rank, experts in enumerate(self.experts_of_ranks):
            for expert in experts:
                owner[expert] = rank
        return owner

    @cached_property
    def chunk_experts(self) -> list[list[Sequence[int]]]:
        """Return (chunks, R): the experts of each rank in each chunk. A rank's chunks are of equal size, or nearly."""
        return [
            [own[c * len(own) // self.chunks : (c + 1) * len(own) // self.chunks] for own in self.experts_of_ranks]
            for c in range(self.chunks)
        ]

    @cached_property
    def send_order(self) -> list[int]:
        """Return the experts in the order in which their rows are sent: by chunk, then by rank."""
        return [expert for by_rank in self.chunk_experts for experts in by_rank for expert in experts]

    @cached_property
    def send_positions(self) -> Tensor | None:
        """Return (E,) int32: the index of each expert in :attr:`send_order`; None if that is e for every expert e."""
        if self.send_order == list(range(self.num_experts)):
            return None
        places = torch.empty(self.num_experts, dtype=torch.int32)
        places[torch.tensor(self.send_order)] = torch.arange(self.num_experts, dtype=torch.int32)
        return places

    @cached_property
    def num_destinations(self) -> int:
        """Return the number of destinations of rows. A destination is a pair of a chunk and a rank."""
        return self.chunks * self.ranks

    @cached_property
    def num_counts(self) -> int:
        """Return the length of a rank's counts: E loads and, with ``deduplicate``, a number of rows per destination."""
        return self.num_experts + (self.num_destinations if self.deduplicate else 0)

    @property
    def padded_rows(self) -> int:
        """Return the number of rows that a rank sends, in a padded exchange, to each rank with experts in a chunk.

        Return 0 if ``max_recv_rows`` is None.
        """
        return 0 if self.max_recv_rows is None else self.max_recv_rows // self.num_destinations

    def tables(self, device: torch.device) -> RoutingTables:
        """Return the routing tables on ``device``. The first call for each device creates them."""
        if device not in self._tables:
            with torch.inference_mode(False):  # later calls may use the tables outside of inference mode
                self._tables[device] = self._make_tables(device)
        return self._tables[device]

    @cached_property
    def _tables(self) -> dict[torch.device, RoutingTables]:
        return {}

    def _make_tables(self, device: torch.device) -> RoutingTables:
        places = [
            (expert, chunk * self.ranks + rank, index)
            for chunk, by_rank in enumerate(self.chunk_experts)
            for rank, experts in enumerate(by_rank)
            for index, expert in enumerate(experts)
        ]
        sizes = [self.padded_rows if experts else 0 for by_rank in self.chunk_experts for experts in by_rank]
        first_row = [0, *itertools.accumulate(sizes)]
        _, destination, index = zip(*sorted(places), strict=True)
        columns = (destination, index, first_row, [0, first_row[-1]])
        return RoutingTables(*(torch.tensor(column, dtype=torch.int32).to(device) for column in columns))

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertSharding:
        """Return this object, because a copy of the layer has the same sharding."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return only the fields, without cached properties: the process group cannot be pickled."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
