"""The plan of a call in which ranks with few rows take clones of experts that have many.

Every rank makes it from what all have announced, so it costs no message. The rows of clones travel in one more chunk,
the last: their weights come while the experts that a rank has compute.
"""

from __future__ import annotations

import torch

from pymoe.ep.agreement import Announced
from pymoe.ep.arrangement import Arrangement
from pymoe.ep.clones import balance
from pymoe.ep.placement import divide_rows
from pymoe.ep.plan import Loan, Plan, RowCounts
from pymoe.reference.types import Routing


class ClonedPlan(Plan):
    """A plan with clones, as many as :func:`pymoe.ep.clones.plan_clones` finds worth their way.

    Args:
        arrangement: of the layer.
        announced: by all ranks.
        top_k: K.
        capacity_factor: of the layer, or None.

    Raises:
        GroupError: a rank, this or another, would receive more rows than its room.
    """

    def __init__(
        self, arrangement: Arrangement, announced: Announced, top_k: int, capacity_factor: float | None
    ) -> None:
        super().__init__(arrangement, announced, top_k, capacity_factor)
        if any(self._clones):
            rank = arrangement.rank
            own = self._rows[rank]
            self.sent.append([sum(own[e][place] for e, place in clones) for clones in self._clones])
            self.received.append([sum(rows[e][place] for e, place in self._clones[rank]) for rows in self._rows])
            self.loan = self._loan()

    def rows_of_ranks(self) -> list[int]:
        """Return how many rows each rank computes, of its experts and of clones."""
        of_clones = [sum(rows[e][place] for rows in self._rows for e, place in clones) for clones in self._clones]
        return [own + more for own, more in zip(super().rows_of_ranks(), of_clones, strict=True)]

    def lengths(self, chunk: int) -> list[list[int]]:
        """Return the rows of a chunk that this rank receives from every rank for each of the chunk's experts here."""
        if chunk < self.arrangement.chunks:
            return super().lengths(chunk)
        clones = self._clones[self.arrangement.rank]
        return [[rows[e][place] for e, place in clones] for rows in self._rows]

    def in_order_of_travel(self, routing: Routing) -> Routing:
        """Return a routing in which the rows for clones are behind all others, sorted by the rank they go to.

        Of the rows for an expert its own rank gets the first, and the ranks of its clones the next.

        Args:
            routing: of the choices that this rank sends, in the order of the arrangement.
        """
        if self.loan is None:
            return routing
        order = self.arrangement.sent_order
        own = self._rows[self.arrangement.rank]
        starts, start = {}, 0
        for expert in order:
            for place, rows in enumerate(own[expert]):
                starts[expert, place] = start
                start += rows
        pieces = [(e, 0) for e in order] + [piece for clones in self._clones for piece in clones]
        lengths = [own[e][place] for e, place in pieces]
        device = routing.slot.device
        shift = torch.tensor([starts[piece] for piece in pieces]) - torch.tensor([0, *lengths[:-1]]).cumsum(0)
        moved = torch.stack([shift, torch.tensor(lengths)]).to(device)
        places = torch.arange(start, device=device)
        came_from = moved[0].repeat_interleave(moved[1], output_size=start) + places
        token = routing.token.clone()
        token[:start] = routing.token[came_from]
        new_place = torch.empty_like(places, dtype=torch.int32)
        new_place[came_from] = places.int()
        slot = routing.slot
        if start:
            slot = torch.where(slot < 0, slot, new_place[slot.clamp(min=0).long()])
        return Routing(slot, token, routing.offsets)

    def _owned(self) -> list[list[int]]:
        arrangement = self.arrangement
        total = [sum(column) for column in zip(*self.kept, strict=True)]
        hosts, quotas = balance(
            total, arrangement.owner, arrangement.ranks, clones=arrangement.clones, worth=arrangement.worth
        )
        self._rows = divide_rows(self.kept, hosts, quotas)  # (R, E, P), as Shares has them
        # By rank: its clones, and which host of its expert it is; sorted as their weights arrive.
        self._clones: list[list[tuple[int, int]]] = [[] for _ in range(arrangement.ranks)]
        for expert in arrangement.order or range(arrangement.num_experts):
            for place, rank in enumerate(hosts[expert][1:], 1):
                self._clones[rank].append((expert, place))
        return [[rows[0] for rows in of_rank] for of_rank in self._rows]

    def _loan(self) -> Loan:
        arrangement = self.arrangement
        own = set(arrangement.own)
        lent = [[e for e, _ in clones if e in own] for clones in self._clones]
        received = [0] * arrangement.ranks
        for expert, _ in self._clones[arrangement.rank]:
            received[arrangement.owner[expert]] += 1
        return Loan(lent, RowCounts(arrangement, [[len(experts) for experts in lent]], [received]))
