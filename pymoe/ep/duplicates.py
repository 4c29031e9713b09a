"""A token that chose several experts of one rank travels there once, and their weighted sum comes back once.

Numbers of experts and weights travel with the rows (:mod:`pymoe.ep.labels`). The rank of the experts sums what a token
chose there, in the order of its choices; the rank of the token adds up these sums. Grouped so, a sum of K terms is
rounded otherwise than in one process, which adds one after the other: outputs and gradients of inputs are equal to
rounding. Gradients of weights and experts are sums and products of the same numbers in the same order: equal bits.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from pymoe.ep.agreement import Announcement
from pymoe.ep.arrangement import Arrangement
from pymoe.ep.exchange import Crossing
from pymoe.ep.labels import LabelledCrossing
from pymoe.ep.plan import RowCounts
from pymoe.ep.shipment import Shipment
from pymoe.reference.types import Gate, Routing


class ShipmentOfTokens(Shipment):
    """A row for each rank, and chunk, in which a token chose experts.

    The arguments are those of :class:`Shipment`. What is announced ends with how many rows go to each rank, chunk by
    chunk. Where a group shares a capacity, these are counted before any choice is dropped, as that depends on what all
    ranks announce: some rows may travel for nothing.
    """

    weights_travel = True

    def __init__(
        self, arrangement: Arrangement, gate: Gate, top_k: int, capacity_factor: float | None, ops: ModuleType
    ) -> None:
        super().__init__(arrangement, gate, top_k, capacity_factor, ops)
        tables = arrangement.tables(gate.experts.device)
        chosen_TK = gate.experts.long()
        self._to_TK, self._number_TK = tables.destination[chosen_TK], tables.number[chosen_TK]
        if (limit := self._capacity) is not None:
            kept_TK = ops.build_routing(gate.experts, arrangement.num_experts, capacity=limit).slot >= 0
            self._to_TK = torch.where(kept_TK, self._to_TK, arrangement.destinations)
        # The first of a token's choices for a destination has the row; the others find it by that one.
        same_TKK = self._to_TK[:, :, None] == self._to_TK[:, None, :]
        first_TK = same_TKK.to(torch.uint8).argmax(2)
        has_row_TK = first_TK == torch.arange(top_k, device=first_TK.device)
        self.routing = _shortened(
            ops.build_routing(
                torch.where(has_row_TK, self._to_TK, arrangement.destinations),
                arrangement.destinations,
                foreign_experts=True,
            ),
            chosen_TK.shape[0] * min(top_k, arrangement.destinations),
        )

    @property
    def announced(self) -> Tensor:
        return torch.cat([self.gate.load, self.routing.offsets.diff()])

    def pack(self, rows_TH: Tensor, announcement: Announcement) -> None:
        self._rows_SH = self.ops.dispatch(rows_TH, self.routing)
        if self._group_has_a_capacity:
            self.plan = self._planned(announcement)
            self._drop(self.plan.kept[self.arrangement.rank])
            self._numbers_SK = self._numbers()
        else:
            self._numbers_SK = self._numbers()
            self.plan = self._planned(announcement)
        counts = self._counts(self.plan.rows)
        self.crossing = LabelledCrossing(counts, [sum(received) for received in self.plan.received])
        self.home = Crossing(counts, self._rows_SH.shape[0], self._rows_SH)

    def depart(self, weights_TK: Tensor) -> tuple[Tensor, ...]:
        rows_SH, self._rows_SH = self._rows_SH, None
        assert rows_SH is not None
        assert isinstance(self.crossing, LabelledCrossing)
        return self.crossing.depart(rows_SH, self._numbers_SK, self.ops.dispatch(weights_TK, self.routing))

    def _drop(self, kept: list[int]) -> None:
        """Leave out all but the first choices of each expert, ``kept`` of them."""
        limit_E = torch.tensor(kept, dtype=torch.int32).to(self.gate.experts.device)
        kept_TK = first_choices(self.gate.experts, limit_E, self.ops)
        self._to_TK = torch.where(kept_TK, self._to_TK, self.arrangement.destinations)

    def _numbers(self) -> Tensor:
        """Return (S, K) int32: for every row the experts, by number, that its token chose where it goes."""
        none = self.arrangement.num_experts
        starts = self.routing.offsets
        rows = torch.arange(self.routing.token.shape[0], dtype=torch.int32, device=starts.device)
        to_S = torch.searchsorted(starts[1:], rows, right=True, out_int32=True)
        if self._to_TK.shape[0] == 0:
            return self._to_TK
        token_S = self.routing.token.clamp(min=0).long()
        there_SK = (self._to_TK[token_S] == to_S[:, None]) & (self.routing.token >= 0)[:, None]
        return torch.where(there_SK, self._number_TK[token_S], none)

    def _counts(self, announced: list[list[int]]) -> RowCounts:
        ranks, own = self.arrangement.ranks, self.arrangement.rank
        starts = range(0, self.arrangement.destinations, ranks)
        sent = [announced[own][start : start + ranks] for start in starts]
        return RowCounts(self.arrangement, sent, [[rows[start + own] for rows in announced] for start in starts])


def first_choices(experts_TK: Tensor, limit_E: Tensor, ops: ModuleType) -> Tensor:
    """Return (T, K) bool: which choices are among the first of their expert, in the order of tokens.

    Args:
        experts_TK: (T, K) int32.
        limit_E: (E,) int32, how many of each expert.
        ops: :mod:`pymoe.ops` or :mod:`pymoe.reference`.
    """
    slot, _, offsets = ops.build_routing(experts_TK, limit_E.shape[0])
    chosen = experts_TK.long()
    kept: Tensor = slot - offsets[chosen] < limit_E[chosen]
    return kept


def _shortened(routing: Routing, rows: int) -> Routing:
    """Return a routing into a buffer of so many rows, which is at least what is in use."""
    return routing._replace(token=routing.token[:rows])
