"""ShardedExperts: the experts of a layer, of which each rank stores and computes a part.

:class:`ExpertShards` is the base class of ``ShardedExperts`` and of sharded experts modules of other packages.
:class:`ExpertMove` exchanges experts between the positions of stacked tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.weak import WeakIdKeyDictionary

from pymoe._common.types import QuantizedWeight, Routing
from pymoe.ep.clones import WeightBroadcast
from pymoe.ep.dispatcher import IndexedDispatcher, IndexedRows, TokenDispatcher
from pymoe.ep.exchange import RowPlan, start_combine, wait_dispatch
from pymoe.ep.sharding import PARAMETERS, ExpertSharding, shard_ranges
from pymoe.nn.experts import Experts
from pymoe.nn.low_rank import LowRank, add_adapters
from pymoe.nn.options import Backend, operators, raw_operators
from pymoe.nn.quantized_experts import QuantizedLinear

Adapters = tuple[Sequence[LowRank], Sequence[LowRank]]
"""The adapters of the first and of the second product."""

all_sharded_experts: WeakSet[ExpertShards] = WeakSet()
"""Every ExpertShards of this process."""

outdated_gradients = WeakIdKeyDictionary()
"""The gradients that parameters had when they were replaced, as keys."""


def mark_replaced(parameter: nn.Parameter, function: str) -> None:
    """Mark ``parameter`` as replaced by ``pymoe.ep.<function>``.

    An optimizer that still contains ``parameter`` raises in its next step, unless the parameter is frozen or has
    received a gradient after this call.
    """
    parameter.replaced_by_pymoe_ep = function  # type: ignore[attr-defined]
    if parameter.grad is not None:
        outdated_gradients[parameter.grad] = None


class ExpertShards(nn.Module):
    """Base class for the experts of a layer; each rank stores and computes a part of them.

    Parameters are stacked along the experts, and keep their names and shapes. They are DTensors, cut along the experts
    (``Shard(0)`` on the group's mesh).
    """

    parameter_names: Sequence[str | None] = PARAMETERS
    """The names of the parameters that correspond to those in :data:`PARAMETERS`; None where the module has none."""
    backend: Backend = "native"
    sharding: ExpertSharding
    gradient_divisor: int | None = None
    """Number by which each call divides the gradients of parameters; None before :func:`pymoe.ep.data_parallel`."""
    moves = 0
    """Number of calls of ``redistribute`` that have moved these experts."""

    def shard_parameters(self, sharding: ExpertSharding, made: dict[int, nn.Parameter]) -> None:
        """Replace every parameter with a DTensor that has only this rank's experts in memory.

        In a :class:`pymoe.nn.QuantizedLinear`, replace the buffer ``packed``.

        Args:
            sharding: the layer's sharding.
            made: the DTensors made so far, keyed by the ids of the parameters that they replaced; new ones are added.
                Layers that share parameters thus share the DTensors.
        """
        self.sharding = sharding
        all_sharded_experts.add(self)
        for name in self.parameter_names:
            whole = None if name is None else getattr(self, name)
            if isinstance(whole, QuantizedLinear):
                whole.packed = _own_part(whole.packed, sharding)
            elif name is not None and whole is not None:
                if id(whole) not in made:
                    made[id(whole)] = nn.Parameter(_own_part(whole, sharding), requires_grad=whole.requires_grad)
                    mark_replaced(whole, "shard")
                setattr(self, name, made[id(whole)])

    def stacked(self) -> dict[str, Tensor]:
        """Return the parameters that are not quantised, keyed by the names in :data:`PARAMETERS`."""
        found = {}
        for kind, name in zip(PARAMETERS, self.parameter_names, strict=True):
            parameter = None if name is None else getattr(self, name)
            if isinstance(parameter, Tensor):
                found[kind] = parameter
        return found

    def spread_tensors(self) -> list[tuple[str, DTensor]]:
        """Return the names and values of all DTensors: parameters, and the buffers of packed weights."""
        both = [*self.named_parameters(), *self.named_buffers()]
        return [(name, one) for name, one in both if isinstance(one, DTensor)]

    @property
    def is_quantized(self) -> bool:
        """Return whether each weight is a :class:`pymoe.nn.QuantizedLinear` (with a DTensor as ``packed``)."""
        name = self.parameter_names[0]
        return name is not None and isinstance(getattr(self, name), QuantizedLinear)

    def apply_to_chunks(
        self,
        handles: tuple[Tensor, ...],
        dispatcher: TokenDispatcher,
        activate: Callable[[Tensor], Tensor],
        meanwhile: Callable[[], None] | None = None,
        adapters: Adapters = ((), ()),
    ) -> tuple[Tensor, ...]:
        """Apply the experts to the rows of every chunk as soon as they have arrived, and send the results back.

        Args:
            handles: the handles that ``dispatcher.start`` returned, for the rows of each chunk and for the weights.
            dispatcher: the dispatcher of the call.
            activate: the activation; takes the rows that the first product returns, and returns the operand of the
                second product, computing each row independently of the others.
            meanwhile: called before any row is computed, but after the exchange of the clones' weights, if there are
                clones in this call, has begun. An :class:`IndexedDispatcher`, which has no clones, never calls it.
            adapters: adapters of all E experts, for both products; empty with clones.

        Returns:
            Handles of the results that are being sent back, one for each chunk.
        """
        own: list[Any] = []
        for name in self.parameter_names:
            parameter = None if name is None else getattr(self, name)
            own.append(None if parameter is None else self._local_parameter(parameter))
        by_chunk = [own] if self.sharding.chunks == 1 else list(zip(*map(self._split_by_chunk, own), strict=True))
        back: list[Tensor] = []
        parts: Sequence[Any]
        if isinstance(dispatcher, IndexedDispatcher):
            for chunk, parts in enumerate(by_chunk):
                received = dispatcher.wait(handles, chunk)
                computed = self._apply_by_index(received, activate, self._own_adapters(adapters, chunk), *parts)
                back.append(start_combine(computed, dispatcher.combine, chunk))
            return tuple(back)
        plan, exchange = dispatcher.plan, dispatcher.dispatch
        broadcast = None if plan.weight_sends is None else WeightBroadcast(plan.weight_sends, own, exchange.dtype)
        if meanwhile is not None:
            meanwhile()
        for chunk, handle in enumerate(handles):
            if broadcast is not None and chunk == self.sharding.chunks:
                rows, parts = broadcast.wait_with_rows(handle, exchange, chunk)
                part_of_adapters: Adapters = (), ()
            else:
                rows, parts = wait_dispatch(handle, exchange, chunk), by_chunk[chunk]
                part_of_adapters = self._own_adapters(adapters, chunk)
            computed = self._apply_to_chunk(rows, chunk, plan, activate, part_of_adapters, *parts)
            back.append(start_combine(computed, dispatcher.combine, chunk))
        return tuple(back)

    def operand(self, weight: Tensor) -> Tensor:
        """Return the weights of n experts in the layout that products take, (n, out, in)."""
        return weight

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled object, and add it to :data:`all_sharded_experts`."""
        super().__setstate__(state)
        all_sharded_experts.add(self)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.sharding.order is not None:
            for name, parameter in self.named_parameters(recurse=False):
                placed: Any = parameter.detach()
                destination[prefix + name] = in_expert_order(placed, self.sharding)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, parameter in self.spread_tensors():
            given: Any = state_dict.get(prefix + name)
            known = isinstance(given, DTensor) or type(given) in (Tensor, nn.Parameter)
            if known and given.shape == parameter.shape:
                state_dict[prefix + name] = self._in_own_layout(given.detach(), parameter)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _in_own_layout(self, given: Tensor, parameter: DTensor) -> Tensor:
        """Convert a value for ``parameter``, from a file or another model, to the layout and order of ``parameter``.

        If the sharding has no ``order``, a DTensor is returned unchanged. If it has one, all ranks must call this for a
        DTensor.
        """
        order = self.sharding.order
        if isinstance(given, DTensor):
            if order is None:
                return given
            if (given.device_mesh, given.placements) == (parameter.device_mesh, parameter.placements):
                return in_placed_order(given, self.sharding)
            given = given.full_tensor()
        # `given` is a whole tensor now, such as the state of a model in one process: each rank takes its part.
        if order is not None:
            given = given[torch.tensor(order, device=given.device)]
        return distribute_tensor(
            given.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )

    def _apply_to_chunk(
        self,
        rows: Tensor,
        chunk: int,
        plan: RowPlan,
        activate: Callable[[Tensor], Tensor],
        adapters: Adapters,
        w_in: Tensor | QuantizedWeight,
        w_out: Tensor | QuantizedWeight,
        b_in: Tensor | None,
        b_out: Tensor | None,
    ) -> Tensor:
        """Return (N, H): for every row, the output of the expert to which ``plan`` assigns the row."""
        if _number(w_in) == 0:
            return _without_experts(rows, w_in, w_out, b_in, b_out, *_tensors(adapters))
        # Products take rows in the order of experts, and the rows of one expert in the order of ranks. Then every sum
        # over rows equals the sum in one process with the tokens of all ranks. On the CPU the product reads the rows
        # through `order`, without sorting them in memory. On CUDA the rows are sorted in memory, because torch's
        # grouped product, which may be faster, takes only sorted rows. The products of quantised weights and of
        # adapters take only sorted rows, too, on both devices.
        ops = raw_operators(self.backend)
        experts, number = plan.expert_of_rows(chunk, rows.device)
        routing = ops.build_routing(experts, number)
        sorted_rows = number == 1 or plan.sharding.ranks == 1
        moves = (rows.is_cuda or isinstance(w_in, QuantizedWeight) or any(adapters)) and not sorted_rows
        order = None if moves or sorted_rows else routing.token
        inner = ops.dispatch(rows, routing) if moves else rows
        inner = activate(self._product(ops, inner, w_in, routing.offsets, b_in, adapters[0], order))
        outer = self._product(ops, inner, w_out, routing.offsets, b_out, adapters[1], order)
        return ops.combine(outer, routing) if moves else outer

    def _apply_by_index(
        self,
        received: IndexedRows,
        activate: Callable[[Tensor], Tensor],
        adapters: Adapters,
        w_in: Tensor | QuantizedWeight,
        w_out: Tensor | QuantizedWeight,
        b_in: Tensor | None,
        b_out: Tensor | None,
    ) -> Tensor:
        """Return (N, H): the output of each row's expert or, if weights came, the weighted sum over the row's experts.

        The rows of an expert are computed in the order in which they arrived, sorted by source rank. So sums over them
        equal the sums in one process with the tokens of all ranks. A row without an expert becomes zero.
        """
        rows, indices, weights, max_computed = received
        if _number(w_in) == 0:
            return _without_experts(rows, w_in, w_out, b_in, b_out, weights, *_tensors(adapters))
        ops = raw_operators(self.backend)
        slot, token, offsets = ops.build_routing(indices, _number(w_in), foreign_experts=True)
        routing = Routing(slot, token[:max_computed], offsets)
        inner = activate(self._product(ops, ops.dispatch(rows, routing), w_in, offsets, b_in, adapters[0]))
        outer = self._product(ops, inner, w_out, offsets, b_out, adapters[1])
        combined: Tensor = ops.combine(outer, routing, weights)
        return combined

    def _product(
        self,
        ops: ModuleType,
        rows: Tensor,
        weight: Tensor | QuantizedWeight,
        offsets: Tensor,
        bias: Tensor | None,
        adapters: Sequence[LowRank],
        order: Tensor | None = None,
    ) -> Tensor:
        """Return the product of each row with the weight of its expert, plus the bias and adapters of the expert.

        Rows are sorted by expert, unless ``order`` gives the indices of the rows in that order.
        """
        result: Tensor
        if isinstance(weight, QuantizedWeight):
            bias = None if bias is None else bias.to(rows.dtype)
            result = operators(self.backend).quantized_linear(rows, weight, offsets, bias)
        else:
            result = ops.grouped_linear(rows, self.operand(weight), offsets, bias, order=order)
        return add_adapters(result, rows, offsets, adapters) if adapters else result

    def _own_adapters(self, adapters: Adapters, chunk: int) -> Adapters:
        """Return the adapters of this rank's experts in a chunk."""
        if not any(adapters):
            return adapters
        own = self.sharding.chunk_experts[chunk][self.sharding.rank]

        def part(stacked: Tensor) -> Tensor:
            if isinstance(own, range):  # take a view: it keeps the strides, which influence the rounding of products
                return stacked[own.start : own.stop]
            return stacked[torch.tensor(own, dtype=torch.int64, device=stacked.device)]

        def of(one: LowRank) -> LowRank:
            return LowRank(part(one.down), part(one.up), one.scaling)

        return [of(one) for one in adapters[0]], [of(one) for one in adapters[1]]

    def _local_parameter(self, parameter: Tensor | QuantizedLinear) -> Tensor | QuantizedWeight:
        """Return this rank's part of a parameter; the backward divides the gradient by :attr:`gradient_divisor`."""
        if isinstance(parameter, QuantizedLinear):
            weight = parameter.quantized_weight
            return weight._replace(packed=local_tensor(weight.packed))
        local = local_tensor(parameter)
        divisor = self.gradient_divisor
        if divisor is None or divisor == 1:
            return local
        # Divide the gradient in the graph of the call, not in a hook of the parameter: that hook would be lost when
        # Module.to() or load_state_dict(assign=True) replaces the parameter, and would run twice for a parameter that
        # two layers share.
        local = local.view_as(local)
        if local.requires_grad:
            local.register_hook(lambda gradient: gradient / divisor)
        return local

    def _split_by_chunk(self, own: Any) -> Sequence[Any]:
        """Split a parameter of this rank's experts into a part for each chunk."""
        chunks = self.sharding.chunks
        if own is None:
            return [None] * chunks
        if isinstance(own, QuantizedWeight):
            return [own._replace(packed=part) for part in self._split_by_chunk(own.packed)]
        return own.split([len(by_rank[self.sharding.rank]) for by_rank in self.sharding.chunk_experts])


class ShardedExperts(ExpertShards, Experts):
    """A :class:`pymoe.nn.Experts` that :func:`pymoe.ep.shard` has spread over a group of ranks.

    Parameters have the same names and shapes as in one process. They are DTensors, cut along the experts
    (``Shard(0)`` on the group's mesh); ``to_local()`` returns this rank's part. After :func:`pymoe.ep.redistribute` the
    expert at position p is ``sharding.order[p]`` (p if ``sharding.order`` is None); ``state_dict()`` still has expert e
    at position e.
    """

    def forward(  # type: ignore[override]
        self, handles: tuple[Tensor, ...], dispatcher: TokenDispatcher, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Tensor, ...]:
        """Apply the experts to the rows of every chunk as soon as they have arrived, and send the results back.

        Args:
            handles: the handles that ``dispatcher.start`` returned, for the rows of each chunk and for the weights.
            dispatcher: the dispatcher of the call.
            meanwhile: as for ``apply_to_chunks``.

        Returns:
            Handles of the results that are being sent back, one for each chunk.
        """
        activate = partial(raw_operators(self.backend).expert_activation, kind=self.activation)
        return self.apply_to_chunks(handles, dispatcher, activate, meanwhile)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise this rank's experts with the values that a single process would draw from the same seed.

        Every rank draws the random numbers of all experts, and keeps those of its own experts.
        """
        if isinstance(self, FSDPModule):
            self.reshard()
        for weight, bias in ((self.w_in, self.b_in), (self.w_out, self.b_out)):
            bound = weight.shape[-1] ** -0.5
            for parameter in (weight, bias):
                if parameter is not None:
                    positions = position_layout(parameter, self.sharding).own
                    order = self.sharding.order or range(self.num_experts)
                    _draw(parameter.shape, bound, local_data(parameter), [order[place] for place in positions])


def _tensors(adapters: Adapters) -> list[Tensor]:
    return [tensor for of_weight in adapters for one in of_weight for tensor in (one.down, one.up)]


def _number(weight: Tensor | QuantizedWeight) -> int:
    """Return the number of experts in a stacked weight."""
    return (weight.packed if isinstance(weight, QuantizedWeight) else weight).shape[0]


def _without_experts(rows: Tensor, *parts: Tensor | QuantizedWeight | None) -> Tensor:
    """Return ``rows``, which has no elements, connected in the autograd graph to the parameters and weights ``parts``.

    So ``parts`` get gradients, and this rank's backward pass takes part in the exchanges. Parts are flattened before
    the sum, because otherwise their gradients would have strides of 0, and autograd would copy such DTensors.
    """
    nothing: Any = sum(part.flatten().sum() for part in parts if isinstance(part, Tensor))
    return rows + torch.as_tensor(nothing).to(rows.dtype)


def _draw(shape: torch.Size, bound: float, local: Tensor, experts: Sequence[int]) -> None:
    """Draw a parameter of all experts (E, ...) uniformly from ±bound; write the values of ``experts`` to ``local``."""
    if local.device.type != "cpu":
        local.copy_(torch.empty(shape, dtype=local.dtype, device=local.device).uniform_(-bound, bound)[list(experts)])
        return
    # Draw expert by expert to save memory: on the CPU, several draws give the same numbers as one large draw.
    places = {expert: place for place, expert in enumerate(experts)}
    for expert in range(shape[0]):
        drawn = torch.empty(shape[1:], dtype=local.dtype).uniform_(-bound, bound)
        if expert in places:
            local[places[expert]] = drawn


def _own_part(whole: Tensor, sharding: ExpertSharding) -> DTensor:
    """Return the DTensor with this rank's experts. ``whole`` has all experts, or is already cut to this rank's."""
    own, part = sharding.ranges[sharding.rank], whole.detach()
    if part.shape[0] == sharding.num_experts:
        part = part[own.start : own.stop].clone(memory_format=torch.contiguous_format)
    assert part.shape[0] == len(own)
    shape = sharding.num_experts, *part.shape[1:]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, sharding.mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)


# Positions in stacked tensors. Parameters, their gradients and their optimizer state are DTensors cut along the
# experts. FSDP cuts the experts of a rank again, over the ranks that have the same experts.


def local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, connected to the parameter in the autograd graph."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_data(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter or gradient, detached from the autograd graph, sharing its memory."""
    return local_tensor(parameter.detach())


@dataclass(frozen=True)
class PositionLayout:
    """Describes which positions of a stacked tensor each rank has."""

    own: range
    """Positions of this rank."""
    group: dist.ProcessGroup | None
    """The group of all ranks that have a part of the tensor; None if it is unknown."""
    ranges: list[range]
    """Positions of each rank of ``group``; empty if ``group`` is None."""


def position_layout(parameter: Tensor, sharding: ExpertSharding) -> PositionLayout:
    """Return the layout of a parameter of a layer, or of a tensor that is stacked in the same way.

    Args:
        parameter: a tensor whose first dimension is E, the number of experts of the layer.
        sharding: the layer's sharding.

    Raises:
        ValueError: the parameter is not cut along its experts on every dimension of its mesh.
    """
    # FSDP's placement over the ranks with the same experts is not a Shard, but it also has the attribute `dim`.
    if not isinstance(parameter, DTensor) or any(getattr(one, "dim", None) != 0 for one in parameter.placements):
        seen = parameter.placements if isinstance(parameter, DTensor) else type(parameter).__name__
        raise ValueError(f"MoE {sharding.title}: experts must be a DTensor cut along the experts, got {seen}")
    mesh = parameter.device_mesh
    if mesh.ndim == 1:
        return PositionLayout(sharding.ranges[sharding.rank], sharding.group, sharding.ranges)
    replicas = mesh.size(0)
    parts = [
        [own[part.start : part.stop] for own in sharding.ranges for part in [shard_ranges(len(own), replicas)[replica]]]
        for replica in range(replicas)
    ]
    own = parts[mesh.get_local_rank(0)][sharding.rank]
    if sharding.data_parallel_mesh is None:
        return PositionLayout(own, None, [])
    group = sharding.data_parallel_mesh.get_group()
    ranges = [own] * sharding.data_parallel_mesh.size()
    for ranks, of_replica in zip(mesh.mesh.tolist(), parts, strict=True):
        for rank, part in zip(ranks, of_replica, strict=True):
            ranges[dist.get_group_rank(group, rank)] = part
    return PositionLayout(own, group, ranges)


class ExpertMove:
    """Exchanges experts between the positions of stacked tensors.

    Every rank of the group must create such an object with the same orders, and call it for the same tensors.

    Args:
        layout: the layout of the tensors.
        before: (E,), the expert at each position.
        after: (E,), the expert at each position after the move.

    Raises:
        ValueError: ``layout.group`` is None.
    """

    def __init__(self, layout: PositionLayout, before: Sequence[int], after: Sequence[int]) -> None:
        if layout.group is None:
            raise ValueError(
                "MoE: experts that fully_shard has cut must have been given to pymoe.ep.data_parallel before they move"
            )
        self._group = layout.group
        rank, ranks = dist.get_rank(layout.group), len(layout.ranges)
        start = layout.own.start
        was = {expert: position for position, expert in enumerate(before)}
        owner = {position: number for number, positions in enumerate(layout.ranges) for position in positions}

        def arrivals(positions: range) -> list[tuple[int, int, int]]:
            """Return a sorted list of (source rank, new position, old position) for the new positions of a rank."""
            return sorted((owner[was[after[position]]], position, was[after[position]]) for position in positions)

        own = arrivals(layout.own)
        self._kept = [(position - start, old - start) for source, position, old in own if source == rank]
        self._received_at = [position - start for source, position, _ in own if source != rank]
        self._received = [sum(source == number != rank for source, _, _ in own) for number in range(ranks)]
        sent = [
            [old - start for source, _, old in arrivals(positions) if source == rank != number]
            for number, positions in enumerate(layout.ranges)
        ]
        self._sent = [len(positions) for positions in sent]
        self._sent_from = [position for positions in sent for position in positions]

    def __call__(self, local: Tensor) -> Tensor:
        """Return this rank's part of a tensor after the move, in new memory.

        Args:
            local: (n, ...), this rank's part before the move.
        """

        def index(positions: Sequence[int]) -> Tensor:
            return torch.tensor(positions, dtype=torch.int64, device=local.device)

        result = torch.empty_like(local, memory_format=torch.contiguous_format)
        received = local.new_empty(len(self._received_at), *local.shape[1:])
        sent = local.index_select(0, index(self._sent_from))
        dist.all_to_all_single(received, sent, self._received, self._sent, group=self._group)
        result[index(self._received_at)] = received
        result[index([new for new, _ in self._kept])] = local.index_select(0, index([old for _, old in self._kept]))
        return result


def in_expert_order(tensor: DTensor, sharding: ExpertSharding) -> DTensor:
    """Return a copy of a stacked tensor, reordered from the order of the current placement to expert e at position e.

    All ranks must call this.
    """
    return _reordered(tensor, sharding, sharding.order, None)


def in_placed_order(tensor: DTensor, sharding: ExpertSharding) -> DTensor:
    """Return a copy of a stacked tensor, reordered from expert e at position e to the order of the current placement.

    All ranks must call this.
    """
    return _reordered(tensor, sharding, None, sharding.order)


def _reordered(
    tensor: DTensor, sharding: ExpertSharding, before: Sequence[int] | None, after: Sequence[int] | None
) -> DTensor:
    plain = range(sharding.num_experts)
    moved: DTensor = torch.empty_like(tensor)  # type: ignore[assignment]
    if not tensor.is_meta:
        move = ExpertMove(position_layout(tensor, sharding), before or plain, after or plain)
        local_data(moved).copy_(move(local_data(tensor)))
    return moved
