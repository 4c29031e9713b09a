"""Token dispatchers, which decide which rows of a call are sent and in which order, and sum the returned rows.

- :class:`TokenDispatcher` sends a row for each choice, sorted by expert; receivers use the counts of all ranks.
- :class:`DeduplicatingDispatcher` sends a token, in each chunk, once to every rank that has experts chosen for it, with
  the indices and weights of these experts.
- :class:`PaddedDispatcher` sends the same number of rows in every call, so that the host need not read any counts.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pymoe._common.types import Gate, Routing
from pymoe.ep.clones import RowPlanWithClones
from pymoe.ep.exchange import (
    HEADER,
    AllToAll,
    CountExchange,
    RowCounts,
    RowPlan,
    capacity,
    raise_for_difference,
    start_dispatch,
    wait_dispatch,
)
from pymoe.ep.sharding import ExpertSharding
from pymoe.nn.local_tensors import LocalTensors
from pymoe.ops.index_checks import experts_in_range


class TokenDispatcher:
    """Sends a row for each choice, sorted by expert.

    Args:
        sharding: the layer's sharding.
        gate: the choice of the layer's router for this rank's tokens.
        capacity_factor: the layer's capacity factor, or None.
        ops: :mod:`pymoe.ops.raw` or :mod:`pymoe.reference`.
        own_routing: the routing of the choices to all E experts, if the layer has computed it. Then ``gate.load`` must
            be the load of this routing.
    """

    weights_travel = False
    """True if the ranks of the experts multiply outputs by the weights of the choices, False if the rank of the tokens
    does."""
    plan: RowPlan
    routing: Routing
    """The routing from tokens to rows of the send buffer."""
    counts: RowCounts
    dispatch: AllToAll
    """The exchange towards the ranks of the experts."""
    combine: AllToAll
    """The exchange back to the ranks of the tokens."""

    def __init__(
        self,
        sharding: ExpertSharding,
        gate: Gate,
        capacity_factor: float | None,
        ops: ModuleType,
        own_routing: Routing | None = None,
    ) -> None:
        if own_routing is None and gate.experts.is_cpu:
            # This kernel raises for invalid experts. Without it, subclasses would use them as indices unchecked.
            own_routing = ops.build_routing(gate.experts, sharding.num_experts)
            # Do not trust the load of a user's router: other ranks wait for as many rows as the load says.
            gate = gate._replace(load=own_routing.offsets.diff())
        elif own_routing is None:
            experts_in_range("build_routing", gate.experts, sharding.num_experts, False)
        self.own_routing = own_routing
        self.sharding, self.gate, self.capacity_factor, self.ops = sharding, gate, capacity_factor, ops
        self.top_k = gate.experts.shape[1]
        self.group_has_capacity = capacity_factor is not None and sharding.scope == "group"

    @property
    def own_counts(self) -> Tensor:
        """Return the counts to send to the other ranks, (n,) int32. The first E are the load of the gate."""
        return self.gate.load

    def pack(self, rows_TH: Tensor, exchange: CountExchange) -> Tensor:
        """Gather the rows into the send buffer, in the order in which they are sent, and read the counts of all ranks.

        Args:
            rows_TH: (T, H), the tokens of this rank.
            exchange: the exchange of the counts, already begun.

        Returns:
            (S, H), the send buffer.

        Raises:
            GroupError: ranks disagree, one of them has failed or is late, or a rank would receive too many rows.
        """
        sharding, ops = self.sharding, self.ops
        experts_TK = self.gate.experts
        if sharding.send_positions is not None:
            experts_TK = sharding.send_positions.to(experts_TK.device)[experts_TK.long()]
        routing = self.own_routing
        if routing is None or experts_TK is not self.gate.experts or self._own_capacity is not None:
            routing = ops.build_routing(experts_TK, sharding.num_experts, capacity=self._own_capacity)
        rows_SH: Tensor
        if not self.group_has_capacity and not sharding.clones:
            # Here the order of rows does not depend on other ranks' counts: gather before the host waits for them.
            rows_SH = ops.dispatch(rows_TH, routing)
            self.plan = self._make_plan(exchange)
        else:
            self.plan = self._make_plan(exchange)
            if self.group_has_capacity:
                routing = self.plan.without_dropped(routing, experts_TK)
            if isinstance(self.plan, RowPlanWithClones):
                routing = self.plan.in_send_order(routing)
            rows_SH = ops.dispatch(rows_TH, routing)
        self.routing, self.counts = routing, self.plan.counts
        return rows_SH

    def start(self, rows_SH: Tensor, weights_TK: Tensor) -> tuple[Tensor, ...]:
        """Start sending the rows of all chunks; return a handle for each chunk, with which the experts wait for it.

        Args:
            rows_SH: (S, H), the send buffer.
            weights_TK: (T, K), the weights of the gate.
        """
        self.dispatch = AllToAll(self.counts, rows_SH.shape[0], rows_SH)
        self.combine = AllToAll(self.counts, rows_SH.shape[0], rows_SH)
        return start_dispatch(rows_SH, self.dispatch)

    def unpack(self, y_SH: Tensor, weights_TK: Tensor) -> Tensor:
        """Return (T, H): for each token, the sum of its returned rows, weighted here unless ``weights_travel``."""
        y_TH: Tensor = self.ops.combine(y_SH, self.routing, None if self.weights_travel else weights_TK)
        return y_TH

    @property
    def loads(self) -> list[list[int]] | Tensor:
        """Return (R, E): how often the tokens of each rank chose each expert."""
        return self.plan.loads

    def rows_of_ranks(self) -> list[int] | None:
        """Return (R,): the number of rows that each rank computes. Return None if the host does not read the counts."""
        return self.plan.rows_of_ranks()

    def dropped(self) -> Tensor:
        """Return the number of this rank's choices that were dropped, a scalar int32."""
        own = self.sharding.rank
        number = sum(self.plan.loads[own]) - sum(self.plan.kept[own])
        return torch.full((), number, dtype=torch.int32, device=self.gate.load.device)

    def group_load_and_share(self) -> tuple[Tensor, float | Tensor]:
        """Return the load summed over all ranks, (E,) int64, and R times this rank's fraction of all tokens.

        The fraction counts as 1 / R if no rank has tokens.
        """
        group_tokens = sum(self.plan.tokens)
        share = self.sharding.ranks * self.gate.experts.shape[0] / group_tokens if group_tokens else 1.0
        load = torch.tensor(self.plan.loads, dtype=torch.int64).sum(0).to(self.gate.load.device)
        return load, share

    @property
    def _own_capacity(self) -> int | None:
        """Return the maximum number of rows of this rank per expert.

        Return None if there is no capacity, or if the ranks of the group share it.
        """
        if self.capacity_factor is None or self.group_has_capacity:
            return None
        return capacity(self.capacity_factor, self.gate.experts.shape[0], self.top_k, self.sharding.num_experts)

    def _kept_by_own_capacity(self) -> Tensor | None:
        """Return (T, K) bool: True for choices within :attr:`_own_capacity`. Return None if that is None."""
        limit = self._own_capacity
        if limit is None:
            return None
        kept_TK: Tensor = self.ops.build_routing(self.gate.experts, self.sharding.num_experts, capacity=limit).slot >= 0
        return kept_TK

    def _make_plan(self, exchange: CountExchange) -> RowPlan:
        kind = RowPlanWithClones if self.sharding.clones else RowPlan
        return kind(self.sharding, exchange.read(), self.top_k, self.capacity_factor)


class IndexedRows(NamedTuple):
    """The rows of one chunk as they arrive from all ranks, with the indices of their experts.

    K is the number of choices of a token if a row stands for all of them, and 1 if each choice is a row of its own.
    Only the indices tell the receiving rank which experts compute a row. They number the rank's n experts in the chunk
    from 0; an index of n or more means no expert.
    """

    rows: Tensor
    """(N, H), sorted by source rank."""
    indices: Tensor
    """(N, K) int32, the experts of each row, within the chunk."""
    weights: Tensor | None
    """(N, K), the weights of the experts' outputs; None if each row has at most one expert, whose output is returned
    without a weight."""
    max_computed: int
    """Upper bound on the number of indices that are below n."""


class IndexedDispatcher(TokenDispatcher):
    """Sends rows with the indices of their experts and, if ``weights_travel``, with the weights of these experts.

    K is as in :class:`IndexedRows`.
    """

    indices_SK: Tensor
    """(S, K) int32: for every row of the send buffer, the indices of its experts on the destination rank."""
    max_computed: list[int]
    """(chunks,): for each chunk, an upper bound on the number of rows, one per choice, that this rank's experts
    compute."""

    def start(self, rows_SH: Tensor, weights_TK: Tensor) -> tuple[Tensor, ...]:
        """Start sending all chunks; return handles for the rows of each chunk, then for the weights, if any travel."""
        rows = rows_SH.shape[0]
        weights_SK = self.ops.dispatch(weights_TK, self.routing) if self.weights_travel else None
        self._indices = AllToAll(self.counts, rows, self.indices_SK)
        self._indices.start_dispatch(self.indices_SK)
        handles: tuple[Tensor, ...] = ()
        if weights_SK is not None:
            self._weights = AllToAll(self.counts, rows, weights_SK)
            handles = start_dispatch(weights_SK, self._weights)
        return *super().start(rows_SH, weights_TK), *handles

    def wait(self, handles: tuple[Tensor, ...], chunk: int) -> IndexedRows:
        """Wait until a chunk has arrived; return its rows with their indices and weights."""
        indices = self._indices.wait(chunk)
        weights = None
        if self.weights_travel:
            weights = wait_dispatch(handles[self._weights.chunks + chunk], self._weights, chunk)
        return IndexedRows(
            wait_dispatch(handles[chunk], self.dispatch, chunk), indices, weights, self.max_computed[chunk]
        )


class DeduplicatingDispatcher(IndexedDispatcher):
    """Sends a token, in each chunk, only once to every rank that has some of its experts.

    The arguments are those of the base class.

    A rank that receives a token sums the weighted outputs of its own experts for it, in the order of the choices; the
    rank of the token adds up these sums. A single process adds the K terms one after the other instead. So outputs and
    gradients of inputs equal those of a single process only up to rounding. Gradients of weights and experts are bit
    for bit the same: they are sums and products of the same values in the same order.

    The counts end with the number of rows that go to each rank, chunk by chunk. If the group shares a capacity, rows
    are counted before any choice is dropped, because drops depend on the counts of all ranks; then some of the rows
    that are sent may be unused.
    """

    weights_travel = True

    def __init__(
        self,
        sharding: ExpertSharding,
        gate: Gate,
        capacity_factor: float | None,
        ops: ModuleType,
        own_routing: Routing | None = None,
    ) -> None:
        super().__init__(sharding, gate, capacity_factor, ops, own_routing)
        tables = sharding.tables(gate.experts.device)
        chosen_TK = gate.experts.long()
        self._to_TK, self._index_TK = tables.destination[chosen_TK], tables.index_in_chunk[chosen_TK]
        if (kept_TK := self._kept_by_own_capacity()) is not None:
            self._to_TK = torch.where(kept_TK, self._to_TK, sharding.num_destinations)
        # Of a token's choices with the same destination, only the first is given a row.
        same_TKK = self._to_TK[:, :, None] == self._to_TK[:, None, :]
        first_TK = same_TKK.to(torch.uint8).argmax(2)
        has_row_TK = first_TK == torch.arange(self.top_k, device=first_TK.device)
        routing = ops.build_routing(
            torch.where(has_row_TK, self._to_TK, sharding.num_destinations),
            sharding.num_destinations,
            foreign_experts=True,
        )
        rows = chosen_TK.shape[0] * min(self.top_k, sharding.num_destinations)
        self.routing = routing._replace(token=routing.token[:rows])

    @property
    def own_counts(self) -> Tensor:
        return torch.cat([self.gate.load, self.routing.offsets.diff()])

    def pack(self, rows_TH: Tensor, exchange: CountExchange) -> Tensor:
        rows_SH: Tensor = self.ops.dispatch(rows_TH, self.routing)
        if self.group_has_capacity:
            self.plan = self._make_plan(exchange)
            self._drop(self.plan.kept[self.sharding.rank])
            self.indices_SK = self._make_indices()
        else:
            self.indices_SK = self._make_indices()
            self.plan = self._make_plan(exchange)
        self.counts = self._make_counts(self.plan.exchanged_rows)
        self.max_computed = [sum(received) for received in self.plan.counts.received]
        return rows_SH

    def _drop(self, kept: list[int]) -> None:
        """Drop all choices of this rank's tokens for expert e except the first ``kept[e]``, for every e."""
        limit_E = torch.tensor(kept, dtype=torch.int32).to(self.gate.experts.device)
        kept_TK = _first_choices(self.gate.experts, limit_E, self.ops)
        self._to_TK = torch.where(kept_TK, self._to_TK, self.sharding.num_destinations)

    def _make_indices(self) -> Tensor:
        """Return (S, K) int32: for every row, the indices of those experts of its token that the destination has.

        Other choices of the token get an index that means no expert.
        """
        none = self.sharding.num_experts
        starts = self.routing.offsets
        rows = torch.arange(self.routing.token.shape[0], dtype=torch.int32, device=starts.device)
        to_S = torch.searchsorted(starts[1:], rows, right=True, out_int32=True)
        if self._to_TK.shape[0] == 0:
            return self._to_TK
        token_S = self.routing.token.clamp(min=0).long()
        there_SK = (self._to_TK[token_S] == to_S[:, None]) & (self.routing.token >= 0)[:, None]
        return torch.where(there_SK, self._index_TK[token_S], none)

    def _make_counts(self, rows_of_ranks: list[list[int]]) -> RowCounts:
        ranks, rank = self.sharding.ranks, self.sharding.rank
        starts = range(0, self.sharding.num_destinations, ranks)
        sent = [rows_of_ranks[rank][start : start + ranks] for start in starts]
        return RowCounts(self.sharding, sent, [[rows[start + rank] for rows in rows_of_ranks] for start in starts])


class PaddedDispatcher(IndexedDispatcher):
    """Sends the same number of rows to every rank that has experts in a chunk, filled or not, so that no host has to
    read the counts.

    Rows are filled in the order of tokens. Choices that do not fit are dropped, like choices past an expert's capacity;
    rows that stay empty have an index that means no expert. The shapes of all tensors follow from options and from the
    shapes of inputs. The counts of all ranks stay on the device. Differences between the calls of ranks are recorded
    there, and :func:`check_calls` reads the records.

    Args:
        notes: the layer's records, made by :func:`device_notes`. The other arguments are those of the base class.
    """

    def __init__(
        self,
        sharding: ExpertSharding,
        gate: Gate,
        capacity_factor: float | None,
        ops: ModuleType,
        notes: LocalTensors,
        own_routing: Routing | None = None,
    ) -> None:
        super().__init__(sharding, gate, capacity_factor, ops, own_routing)
        self._notes = notes
        notes.follow(gate.load.device)
        sent = [[sharding.padded_rows if experts else 0 for experts in by_rank] for by_rank in sharding.chunk_experts]
        received = [[by_rank[sharding.rank]] * sharding.ranks for by_rank in sent]
        self.counts = RowCounts(sharding, sent, received)
        self.max_computed = [sum(rows) for rows in received]
        self._messages: Tensor  # (R, n) int32, the messages of the count exchange

    def pack(self, rows_TH: Tensor, exchange: CountExchange) -> Tensor:
        if self.group_has_capacity:
            self._messages = exchange.wait()
            kept_TK: Tensor | None = _first_choices(self.gate.experts, self._left_by_group(), self.ops)
        else:
            kept_TK = self._kept_by_own_capacity()
        self._assign_rows(kept_TK)
        rows_SH: Tensor = self.ops.dispatch(rows_TH, self.routing)
        if not self.group_has_capacity:
            self._messages = exchange.wait()
        self._note_difference()
        return rows_SH

    @property
    def loads(self) -> Tensor:
        return self._messages[:, HEADER : HEADER + self.sharding.num_experts]

    def rows_of_ranks(self) -> None:
        return None

    def dropped(self) -> Tensor:
        return (self.routing.slot < 0).sum(dtype=torch.int32)

    def group_load_and_share(self) -> tuple[Tensor, Tensor]:
        own, group_tokens = self.gate.experts.shape[0], self._group_tokens()
        share = torch.where(group_tokens > 0, self.sharding.ranks * own / group_tokens.double(), 1.0)
        return self.loads.sum(0, dtype=torch.int64), share

    def _group_tokens(self) -> Tensor:
        return self._messages[:, HEADER - 1].sum(dtype=torch.int64)

    def _left_by_group(self) -> Tensor:
        """Return (E,) int32: for each expert, the part of the group's capacity that lower ranks leave to this rank."""
        sharding = self.sharding
        assert self.capacity_factor is not None
        experts = sharding.num_experts
        # In float64, so that ceil() gives exactly the result of pymoe.ep.exchange.capacity.
        slots = min(self.capacity_factor, experts) * (self._group_tokens() * self.top_k).double() / experts
        limit = slots.ceil().clamp(min=1).int()
        before_E = self.loads[: sharding.rank].sum(0, dtype=torch.int32)
        return (limit - before_E).clamp(min=0)

    def _assign_rows(self, kept_TK: Tensor | None) -> None:
        """Assign the rows for each destination to the first choices that go there; set ``routing`` and ``indices_SK``.

        The number of choices that do not fit is added to the record ``overflowed``.

        ``kept_TK`` (T, K) bool is False for choices that are past a capacity; None keeps all choices.
        """
        sharding = self.sharding
        tables = sharding.tables(self.gate.experts.device)
        chosen_TK = self.gate.experts.long()
        to_TK = tables.destination[chosen_TK]
        if kept_TK is not None:
            to_TK = torch.where(kept_TK, to_TK, sharding.num_destinations)
        rows = sum(map(sum, self.counts.sent))
        filled = self.ops.build_routing(
            to_TK, sharding.num_destinations, capacity=sharding.padded_rows, foreign_experts=True
        )
        to = to_TK.long()
        slot_TK = torch.where(filled.slot >= 0, tables.first_row[to] + filled.slot - filled.offsets[to], -1)
        # Dropped choices write to an additional row, which is cut off below.
        at = torch.where(slot_TK < 0, rows, slot_TK).reshape(-1).long()
        indices = slot_TK.new_full((rows + 1,), sharding.num_experts)
        indices[at] = tables.index_in_chunk[chosen_TK].reshape(-1)
        token = slot_TK.new_full((rows + 1,), -1)
        token[at] = torch.arange(len(slot_TK), dtype=torch.int32, device=at.device).repeat_interleave(self.top_k)
        self.indices_SK = indices[:rows, None]
        self.routing = Routing(slot_TK, token[:rows], tables.all_rows)
        kept = to_TK.numel() if kept_TK is None else kept_TK.sum()
        self._notes["overflowed"].add_(kept - (slot_TK >= 0).sum())

    def _note_difference(self) -> None:
        """Record the message headers of this call if it is the first with a disagreement since :func:`check_calls`.

        Nothing is copied to the host.
        """
        headers = self._messages[:, :HEADER]
        differ = (headers[:, : HEADER - 1] != headers[:1, : HEADER - 1]).any()
        noted = self._notes["headers"]
        noted.copy_(torch.where(noted.any() | ~differ, noted, headers))


def _first_choices(experts_TK: Tensor, limit_E: Tensor, ops: ModuleType) -> Tensor:
    """Return (T, K) bool: for each expert e, True for the first ``limit_E[e]`` choices of it, in the order of tokens.

    Args:
        experts_TK: (T, K) int32, the chosen experts.
        limit_E: (E,) int32, the maximum number of choices of each expert.
        ops: :mod:`pymoe.ops.raw` or :mod:`pymoe.reference`.
    """
    slot, _, offsets = ops.build_routing(experts_TK, limit_E.shape[0])
    chosen = experts_TK.long()
    kept: Tensor = slot - offsets[chosen] < limit_E[chosen]
    return kept


def device_notes(sharding: ExpertSharding, device: torch.device) -> LocalTensors:
    """Return new records of a layer on ``device``, filled with zeros.

    ``overflowed`` is the number of choices that did not fit. ``headers`` are the message headers of the first call in
    which ranks disagreed since the last :func:`check_calls`.
    """
    return LocalTensors(
        overflowed=torch.zeros((), dtype=torch.int64, device=device),
        headers=torch.zeros(sharding.ranks, HEADER, dtype=torch.int32, device=device),
    )


def check_calls(model: nn.Module) -> None:
    """Raise if ranks did not make the same calls of layers with ``transport="padded"`` since the last check.

    Such layers do not compare the ranks' calls before rows are sent, because the host would have to wait for the
    device. Instead, each layer records on its device the first call in which ranks disagreed about the layer, its
    options, dtypes, or the need for gradients. This function reads the records, with one wait for the whole model if
    there are none, and clears them. Call it now and then, at a point where the host waits for the device anyway. It is
    not collective. If ranks disagree about sizes, they may wait for each other, or get an error of the process group,
    before they reach this call.

    Args:
        model: any module; layers with ``transport="exact"`` have nothing to check.

    Raises:
        GroupError: ranks disagreed, or one failed before it sent rows. The error describes the first such layer.
    """
    layers: list[Any] = [layer for layer in model.modules() if isinstance(getattr(layer, "notes", None), LocalTensors)]
    if not layers:
        return
    differ = torch.stack([layer.notes["headers"].flatten().any() for layer in layers]).tolist()
    found = []
    for layer in [layer for layer, it_differs in zip(layers, differ, strict=True) if it_differs]:
        found.append((layer.sharding, layer.notes["headers"].tolist()))
        layer.notes["headers"].zero_()
    for sharding, headers in found:
        raise_for_difference(sharding, headers)
