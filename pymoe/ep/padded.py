"""As many rows in every call, so that no rank has to know how many the others send: the host reads nothing.

Every rank has room for the same number of rows of every other, in every chunk, and sends all of it, filled or not.
Numbers of experts travel with the rows (:mod:`pymoe.ep.labels`); empty rows have none. What does not fit is dropped as
what is past an expert's capacity is, in the order of tokens. Shapes follow from shapes alone.

What all ranks have announced stays on the device. Whether they made the same call is noted there, and read on demand.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pymoe.ep.agreement import HEADER, Announcement, raise_for_difference
from pymoe.ep.arrangement import Arrangement
from pymoe.ep.duplicates import first_choices
from pymoe.ep.exchange import Crossing
from pymoe.ep.labels import LabelledCrossing
from pymoe.ep.plan import RowCounts
from pymoe.ep.shipment import Shipment
from pymoe.nn.record import Record
from pymoe.reference.types import Gate, Routing


class PaddedShipment(Shipment):
    """A row for each choice, in buffers with room to spare.

    The arguments are those of :class:`Shipment`, and:

    Args:
        notes: of the layer; see :func:`notes_of`.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        gate: Gate,
        top_k: int,
        capacity_factor: float | None,
        ops: ModuleType,
        notes: Record,
    ) -> None:
        super().__init__(arrangement, gate, top_k, capacity_factor, ops)
        self._notes = notes
        notes.follow(gate.load.device)
        room = arrangement.room_of_pair
        sent = [[room if experts else 0 for experts in cut] for cut in arrangement.cuts]
        received = [[row[arrangement.rank]] * arrangement.ranks for row in sent]
        self._counts = RowCounts(arrangement, sent, received)
        self._said: Tensor  # (R, n) int32, what all ranks have announced

    def pack(self, rows_TH: Tensor, announcement: Announcement) -> None:
        experts_TK, experts = self.gate.experts, self.arrangement.num_experts
        kept_TK = None
        if self._group_has_a_capacity:
            self._said = announcement.wait()
            kept_TK = first_choices(experts_TK, self._left_by_group(), self.ops)
        elif (limit := self._capacity) is not None:
            kept_TK = self.ops.build_routing(experts_TK, experts, capacity=limit).slot >= 0
        self._fill(kept_TK)
        self._rows_SH = self.ops.dispatch(rows_TH, self.routing)
        if not self._group_has_a_capacity:
            self._said = announcement.wait()
        self._note()
        self.crossing = LabelledCrossing(self._counts, [sum(received) for received in self._counts.received])
        self.home = Crossing(self._counts, self._rows_SH.shape[0], self._rows_SH)

    def depart(self, weights_TK: Tensor) -> tuple[Tensor, ...]:
        rows_SH, self._rows_SH = self._rows_SH, None
        assert rows_SH is not None
        assert isinstance(self.crossing, LabelledCrossing)
        return self.crossing.depart(rows_SH, self._numbers_S1, None)

    @property
    def loads(self) -> Tensor:
        return self._said[:, HEADER : HEADER + self.arrangement.num_experts]

    def rows_of_ranks(self) -> None:
        return None

    def dropped(self) -> Tensor:
        return (self.routing.slot < 0).sum(dtype=torch.int32)

    def of_group(self) -> tuple[Tensor, Tensor]:
        own, everyone = self.gate.experts.shape[0], self._tokens_of_group()
        share = torch.where(everyone > 0, self.arrangement.ranks * own / everyone.double(), 1.0)
        return self.loads.sum(0, dtype=torch.int64), share

    def _tokens_of_group(self) -> Tensor:
        return self._said[:, HEADER - 1].sum(dtype=torch.int64)

    def _left_by_group(self) -> Tensor:
        """Return (E,) int32: how many of this rank's choices of each expert a capacity of the group leaves."""
        arrangement = self.arrangement
        assert self.capacity_factor is not None
        experts = arrangement.num_experts
        # In float64, the numbers that pymoe.ep.plan.capacity rounds up.
        slots = min(self.capacity_factor, experts) * (self._tokens_of_group() * self.top_k).double() / experts
        limit = slots.ceil().clamp(min=1).int()
        before_E = self.loads[: arrangement.rank].sum(0, dtype=torch.int32)
        return (limit - before_E).clamp(min=0)

    def _fill(self, kept_TK: Tensor | None) -> None:
        """Give the first choices for each destination its rows, and these the numbers of their experts."""
        arrangement = self.arrangement
        tables = arrangement.tables(self.gate.experts.device)
        chosen_TK = self.gate.experts.long()
        to_TK = tables.destination[chosen_TK]
        if kept_TK is not None:
            to_TK = torch.where(kept_TK, to_TK, arrangement.destinations)
        # The rows for a destination, and what of them is filled.
        rows, destinations = sum(map(sum, self._counts.sent)), arrangement.destinations
        filled = self.ops.build_routing(to_TK, destinations, capacity=arrangement.room_of_pair, foreign_experts=True)
        to = to_TK.long()
        slot_TK = torch.where(filled.slot >= 0, tables.first_row[to] + filled.slot - filled.offsets[to], -1)
        # Choices that are left out write to one more row.
        at = torch.where(slot_TK < 0, rows, slot_TK).reshape(-1).long()
        numbers = slot_TK.new_full((rows + 1,), arrangement.num_experts)
        numbers[at] = tables.number[chosen_TK].reshape(-1)
        token = slot_TK.new_full((rows + 1,), -1)
        token[at] = torch.arange(len(slot_TK), dtype=torch.int32, device=at.device).repeat_interleave(self.top_k)
        self._numbers_S1 = numbers[:rows, None]
        self.routing = Routing(slot_TK, token[:rows], tables.all_rows)
        kept = to_TK.numel() if kept_TK is None else kept_TK.sum()
        self._notes["overflowed"].add_(kept - (slot_TK >= 0).sum())

    def _note(self) -> None:
        """Note on the device if ranks did not make the same call, the first time that it happens."""
        headers = self._said[:, :HEADER]
        differ = (headers[:, : HEADER - 1] != headers[:1, : HEADER - 1]).any()
        noted = self._notes["headers"]
        noted.copy_(torch.where(noted.any() | ~differ, noted, headers))


def notes_of(arrangement: Arrangement, device: torch.device) -> Record:
    """Return what a layer notes on its device: the rows that overflowed, and the headers of ranks that disagreed."""
    return Record(
        overflowed=torch.zeros((), dtype=torch.int64, device=device),
        headers=torch.zeros(arrangement.ranks, HEADER, dtype=torch.int32, device=device),
    )


def check_calls(model: nn.Module) -> None:
    """Raise if ranks did not make the same calls of layers with ``transport="padded"`` since the last check.

    Such layers compare nothing before rows travel, as the host would have to read it. Each notes on its device the
    first call in which ranks disagreed: about the layer, its options, dtypes, or what needs gradients. This reads the
    notes, once for the whole model, and clears them; so call it now and then, where the host waits for the device in
    any case. It is no collective call. Ranks that disagree about sizes may wait for each other, or end in an error of
    the process group, before they come here.

    Args:
        model: any module; layers with ``transport="exact"`` have nothing to check.

    Raises:
        GroupError: ranks disagreed, or one failed before it sent rows; it tells of one layer.
    """
    layers: list[Any] = [layer for layer in model.modules() if isinstance(getattr(layer, "notes", None), Record)]
    found: list[tuple[Arrangement, Record]] = [(layer.arrangement, layer.notes) for layer in layers]
    if not found:
        return
    headers = torch.stack([notes["headers"].flatten().any() for _, notes in found]).tolist()
    said = []
    for (arrangement, notes), differ in zip(found, headers, strict=True):
        if differ:
            said.append((arrangement, notes["headers"].tolist()))
            notes["headers"].zero_()
    for one in said:
        raise_for_difference(*one)
