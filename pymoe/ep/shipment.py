"""How the rows of one call are sent: which and in which order, and what their sender makes of those that come home.

A :class:`Shipment` sends a row for each choice. Others are :class:`pymoe.ep.duplicates.ShipmentOfTokens`, a row for
each rank that a token goes to, and :class:`pymoe.ep.padded.PaddedShipment`, as many rows in every call.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from pymoe.ep.agreement import Announcement
from pymoe.ep.arrangement import Arrangement
from pymoe.ep.cloned_plan import ClonedPlan
from pymoe.ep.exchange import Crossing, depart
from pymoe.ep.labels import LabelledCrossing
from pymoe.ep.plan import Plan, capacity
from pymoe.reference.types import Gate, Routing


class Shipment:
    """A row for each choice, sorted by expert.

    Args:
        arrangement: of the layer.
        gate: its router's choice for this rank's tokens.
        top_k: K.
        capacity_factor: of the layer, or None.
        ops: :mod:`pymoe.ops` or :mod:`pymoe.reference`.
    """

    weights_travel = False
    """Whether the ranks of the experts multiply by the weights."""
    crossing: Crossing | LabelledCrossing
    """The way out."""
    home: Crossing
    """The way back."""
    routing: Routing
    """Where in the buffer the rows of each token are."""
    plan: Plan

    def __init__(
        self, arrangement: Arrangement, gate: Gate, top_k: int, capacity_factor: float | None, ops: ModuleType
    ) -> None:
        self.arrangement, self.gate, self.ops = arrangement, gate, ops
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self._rows_SH: Tensor | None = None  # until they depart

    @property
    def announced(self) -> Tensor:
        """(E,) int32 or longer: what the other ranks are told, the load of the gate first."""
        return self.gate.load

    def pack(self, rows_TH: Tensor, announcement: Announcement) -> None:
        """Gather rows into the order in which they are sent, and read meanwhile what all ranks have announced."""
        arrangement, ops = self.arrangement, self.ops
        positions = arrangement.positions
        experts_TK = self.gate.experts
        if positions is not None:
            experts_TK = positions.to(experts_TK.device)[experts_TK.long()]
        routing = ops.build_routing(experts_TK, arrangement.num_experts, capacity=self._capacity)
        if not self._group_has_a_capacity and not arrangement.clones:
            # Where rows go does not depend on what the others announce.
            rows_SH = ops.dispatch(rows_TH, routing)
            self.plan = self._planned(announcement)
        else:
            self.plan = self._planned(announcement)
            if self._group_has_a_capacity:
                routing = self.plan.without_dropped(routing, experts_TK)
            if isinstance(self.plan, ClonedPlan):
                routing = self.plan.in_order_of_travel(routing)
            rows_SH = ops.dispatch(rows_TH, routing)
        self.routing = routing
        self._rows_SH = rows_SH
        self.crossing, self.home = (Crossing(self.plan, rows_SH.shape[0], rows_SH) for _ in range(2))

    def depart(self, weights_TK: Tensor) -> tuple[Tensor, ...]:
        """Start all chunks; return what the experts are called with."""
        rows_SH, self._rows_SH = self._rows_SH, None
        assert rows_SH is not None
        assert isinstance(self.crossing, Crossing)
        return depart(rows_SH, self.crossing)

    def unpack(self, y_SH: Tensor, weights_TK: Tensor) -> Tensor:
        """Return (T, H), the sum of what has come home for each token."""
        y_TH: Tensor = self.ops.combine(y_SH, self.routing, None if self.weights_travel else weights_TK)
        return y_TH

    @property
    def loads(self) -> list[list[int]] | Tensor:
        """(R, E): for how many slots of each rank each expert was chosen."""
        return self.plan.loads

    def rows_of_ranks(self) -> list[int] | None:
        """Return (R,), how many rows each rank computes, if the host knows it."""
        return self.plan.rows_of_ranks()

    def dropped(self) -> Tensor:
        """Return, as a scalar int32, how many of this rank's choices were not computed."""
        return torch.full((), self.plan.dropped, dtype=torch.int32, device=self.gate.load.device)

    def of_group(self) -> tuple[Tensor, float | Tensor]:
        """Return (E,) int64, the load of all ranks, and this one's share of a loss over their tokens, times R."""
        everyone = sum(self.plan.tokens)
        share = self.arrangement.ranks * self.gate.experts.shape[0] / everyone if everyone else 1.0
        load = torch.tensor(self.plan.group_load(), dtype=torch.int64).to(self.gate.load.device)
        return load, share

    @property
    def _capacity(self) -> int | None:
        """The most slots that an expert takes of this rank's, if that does not depend on other ranks."""
        if self.capacity_factor is None or self._group_has_a_capacity:
            return None
        return capacity(self.capacity_factor, self.gate.experts.shape[0], self.top_k, self.arrangement.num_experts)

    @property
    def _group_has_a_capacity(self) -> bool:
        return self.capacity_factor is not None and self.arrangement.scope == "group"

    def _planned(self, announcement: Announcement) -> Plan:
        kind = ClonedPlan if self.arrangement.clones else Plan
        return kind(self.arrangement, announcement.read(), self.top_k, self.capacity_factor)
