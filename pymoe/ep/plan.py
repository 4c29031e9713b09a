"""Who sends how many rows to whom in one call: lists on the host, made from what all ranks have announced."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pymoe.ep.agreement import Announced
from pymoe.ep.arrangement import Arrangement
from pymoe.ep.errors import GroupError
from pymoe.reference.types import Routing


class RowCounts(NamedTuple):
    """The rows of a call that travel between each two ranks."""

    arrangement: Arrangement
    sent: list[list[int]]
    """(chunks, R): those that this rank sends to each."""
    received: list[list[int]]
    """(chunks, R): those that it receives from each."""


class Loan(NamedTuple):
    """The experts whose weights travel in a call."""

    lent: list[list[int]]
    """(R,): the experts of this rank that each takes a clone of."""
    rows: RowCounts
    """How many those are, a row for each, and of how many experts of each rank this one takes a clone."""


class Plan:
    """The rows of one call of a layer, one for each choice.

    Args:
        arrangement: of the layer.
        announced: by all ranks.
        top_k: K.
        capacity_factor: of the layer, or None.

    Raises:
        GroupError: a rank, this or another, would receive more rows than its room.
    """

    loan: Loan | None = None
    """The weights of clones; None if there are no clones in this call."""

    def __init__(
        self, arrangement: Arrangement, announced: Announced, top_k: int, capacity_factor: float | None
    ) -> None:
        self.arrangement = arrangement
        self.loads, self.tokens, self.rows = announced
        self.kept = self.loads
        """(R, E): the rows that each rank sends to each expert."""
        if capacity_factor is not None:
            limits = _Limits(capacity_factor, top_k, arrangement.num_experts)
            of = limits.of_group if arrangement.scope == "group" else limits.of_ranks
            self.kept = of(self.loads, self.tokens)
        self.owned = self._owned()
        """(R, E): those of them that the experts' own ranks compute: all, unless others take clones."""
        if arrangement.room is not None:
            self._check_room(arrangement.room)
        own = self.owned[arrangement.rank]
        self.sent = [[sum(own[e] for e in experts) for experts in cut] for cut in arrangement.cuts]
        """(chunks, R): the rows that this rank sends to each."""
        self.received = [
            [sum(rows[e] for e in cut[arrangement.rank]) for rows in self.owned] for cut in arrangement.cuts
        ]
        """(chunks, R): the rows that it receives from each."""

    @property
    def dropped(self) -> int:
        """How many of this rank's slots are past the capacity of their experts."""
        rank = self.arrangement.rank
        return sum(self.loads[rank]) - sum(self.kept[rank])

    def group_load(self) -> list[int]:
        """Return for how many slots of all ranks each expert was chosen."""
        return [sum(column) for column in zip(*self.loads, strict=True)]

    def rows_of_ranks(self) -> list[int]:
        """Return how many rows each rank computes."""
        return [sum(rows[e] for rows in self.owned for e in experts) for experts in self.arrangement.shards]

    def lengths(self, chunk: int) -> list[list[int]]:
        """Return the rows of a chunk that this rank receives from every rank for each of the chunk's experts here."""
        experts = self.arrangement.cuts[chunk][self.arrangement.rank]
        return [[rows[e] for e in experts] for rows in self.owned]

    def expert_of_rows(self, chunk: int, device: torch.device) -> tuple[Tensor, int]:
        """Return the experts of the received rows of a chunk (n, 1) int32, numbered within it, and how many there are.

        Rows come rank by rank, those of each sorted by expert.
        """
        lengths = torch.tensor(self.lengths(chunk), dtype=torch.int64)
        number = lengths.shape[1]
        numbers = torch.arange(number, dtype=torch.int32).repeat(self.arrangement.ranks)
        total = sum(self.received[chunk])
        lengths, numbers = lengths.reshape(-1).to(device), numbers.to(device)
        return numbers.repeat_interleave(lengths, output_size=total)[:, None], number

    def without_dropped(self, routing: Routing, experts_TK: Tensor) -> Routing:
        """Return a routing in which of each expert's rows the first are left that this rank may send.

        ``build_routing`` has one capacity for all experts; where a group shares it, each rank has another for each.

        Args:
            routing: of all choices.
            experts_TK: (T, K) int32, the choices that it was built from, in the order in which rows are sent.
        """
        own = self.kept[self.arrangement.rank]
        limit_E = torch.tensor([own[e] for e in self.arrangement.sent_order], dtype=torch.int32).to(experts_TK.device)
        chosen = experts_TK.long()
        place_TK = routing.slot - routing.offsets[chosen]
        offsets = torch.cat([limit_E.new_zeros(1), limit_E.cumsum(0, dtype=torch.int32)])
        slot_TK = torch.where(place_TK < limit_E[chosen], offsets[chosen] + place_TK, -1)
        token_TK = torch.arange(chosen.shape[0], dtype=torch.int32, device=chosen.device)[:, None].expand_as(chosen)
        # Dropped choices write to one more row, which is left out.
        rows = slot_TK.numel()
        token = routing.token.new_full((rows + 1,), -1)
        token[torch.where(slot_TK < 0, rows, slot_TK).reshape(-1).long()] = token_TK.reshape(-1)
        return Routing(slot_TK, token[:rows], offsets)

    def _owned(self) -> list[list[int]]:
        return self.kept

    def _check_room(self, room: int) -> None:
        arrangement = self.arrangement
        rows = self.rows_of_ranks()
        full = tuple(rank for rank, count in enumerate(rows) if count > room)
        if full:
            seen = ", ".join(f"rank {rank} would receive {rows[rank]}" for rank in full)
            raise GroupError(
                f"MoE {arrangement.title}: a rank must receive at most room = {room} rows in a call, got {seen}",
                arrangement.layer,
                full,
            )


class _Limits:
    """What a capacity leaves of loads."""

    def __init__(self, factor: float, top_k: int, num_experts: int) -> None:
        self._factor, self._top_k, self._num_experts = factor, top_k, num_experts

    def of_ranks(self, loads: list[list[int]], tokens: list[int]) -> list[list[int]]:
        """Each rank's experts take as much as if it were alone."""
        limits = [capacity(self._factor, count, self._top_k, self._num_experts) for count in tokens]
        return [[min(n, limit) for n in load] for load, limit in zip(loads, limits, strict=True)]

    def of_group(self, loads: list[list[int]], tokens: list[int]) -> list[list[int]]:
        """An expert takes the first rows of all ranks, the tokens of lower ranks before those of higher ones."""
        left = [capacity(self._factor, sum(tokens), self._top_k, self._num_experts)] * self._num_experts
        kept = []
        for load in loads:
            kept.append([min(n, limit) for n, limit in zip(load, left, strict=True)])
            left = [limit - n for n, limit in zip(kept[-1], left, strict=True)]
        return kept


def capacity(factor: float, tokens: int, top_k: int, num_experts: int) -> int:
    """Return how many slots an expert takes: that of :class:`pymoe.nn.MoE`."""
    return max(1, math.ceil(min(factor, num_experts) * (tokens * top_k) / num_experts))
