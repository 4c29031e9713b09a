"""ShardedExperts: the experts that one rank has of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pymoe.ep.arrangement import Arrangement
from pymoe.ep.exchange import Crossing, arrive, send_back
from pymoe.ep.labels import LabelledCrossing, apply_labelled
from pymoe.ep.layouts import as_in_one_process, as_placed, layout_of, local_of, local_part
from pymoe.ep.lending import Lent
from pymoe.nn.experts import Experts
from pymoe.nn.options import raw_operators

NAMES = ("w_in", "w_out", "b_in", "b_out")
everywhere: WeakSet[ShardedExperts] = WeakSet()
"""All that there are in this process."""


def leave(parameter: nn.Parameter, function: str) -> None:
    """Note that a function of :mod:`pymoe.ep` has put another parameter in the place of this one."""
    parameter.left_by_pymoe_ep = function  # type: ignore[attr-defined]


class ShardedExperts(Experts):
    """The experts of one rank, of a :class:`pymoe.nn.Experts` that :func:`pymoe.ep.shard` has spread over a group.

    Its parameters have the names and shapes of the whole layer's. They are DTensors, cut along the experts
    (``Shard(0)`` on the group's mesh); ``to_local()`` has this rank's. After :func:`pymoe.ep.redistribute` the expert
    at position p is ``arrangement.order[p]``; ``state_dict()`` has every expert at its own place.
    """

    arrangement: Arrangement
    gradient_divisor: int | None = None
    """What each call divides its gradients of parameters by; None before :func:`pymoe.ep.data_parallel` sets it."""
    moves = 0
    """How often experts have changed their positions."""

    def spread(self, arrangement: Arrangement, made: dict[int, nn.Parameter]) -> None:
        """Keep this rank's experts.

        Args:
            arrangement: of the layer.
            made: parameters that were spread before, by the id of what they were: shared ones stay shared.
        """
        self.arrangement = arrangement
        everywhere.add(self)
        for name in NAMES:
            whole = getattr(self, name)
            if whole is not None:
                if id(whole) not in made:
                    made[id(whole)] = _own_part(whole, arrangement)
                    leave(whole, "shard")
                setattr(self, name, made[id(whole)])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all experts as one process does, from the same random numbers, and keep this rank's."""
        if isinstance(self, FSDPModule):
            self.reshard()
        for weight, bias in ((self.w_in, self.b_in), (self.w_out, self.b_out)):
            bound = weight.shape[-1] ** -0.5
            for parameter in (weight, bias):
                if parameter is not None:
                    positions = layout_of(parameter, self.arrangement).own
                    order = self.arrangement.order or range(self.num_experts)
                    _draw(parameter.shape, bound, local_part(parameter), [order[place] for place in positions])

    def forward(  # type: ignore[override]
        self,
        tokens: tuple[Tensor, ...],
        crossing: Crossing | LabelledCrossing,
        home: Crossing,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, ...]:
        """Apply to the rows of every chunk their experts, as soon as they are there, and send them back.

        Args:
            tokens: of the chunks that are under way, those of weights last.
            crossing: by which they come.
            home: by which they go back.
            meanwhile: what there is to do once the weights of clones are under way.

        Returns:
            The tokens of the way back.
        """
        own = [self._own(name) for name in NAMES]
        by_chunk: list[Sequence[Any]] = list(zip(*map(self._by_chunk, own), strict=True))
        if isinstance(crossing, LabelledCrossing):
            how: dict[str, Any] = {"activation": self.activation, "ops": raw_operators(self.backend)}
            return tuple(
                send_back(apply_labelled(crossing.arrive(tokens, chunk), *parts, **how), home, chunk)
                for chunk, parts in enumerate(by_chunk)
            )
        loan = crossing.plan.loan
        lent = None if loan is None else Lent(loan, own, crossing.dtype)
        if meanwhile is not None:
            meanwhile()
        back = []
        for chunk, token in enumerate(tokens):
            parts: Sequence[Any]
            if lent is not None and chunk == self.arrangement.chunks:
                rows, parts = lent.arrive(token, crossing, chunk)
            else:
                rows, parts = arrive(token, crossing, chunk), by_chunk[chunk]
            back.append(send_back(self._apply_to_chunk(rows, chunk, crossing, *parts), home, chunk))
        return tuple(back)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Note a copy, too, among all that are spread."""
        super().__setstate__(state)
        everywhere.add(self)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.arrangement.order is not None:
            for name, parameter in self.named_parameters(recurse=False):
                spread: Any = parameter.detach()
                destination[prefix + name] = as_in_one_process(spread, self.arrangement)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            given: Any = state_dict.get(prefix + name)
            known = isinstance(given, DTensor) or type(given) in (Tensor, nn.Parameter)
            if known and isinstance(parameter, DTensor) and given.shape == parameter.shape:
                state_dict[prefix + name] = self._as_own(given.detach(), parameter)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _as_own(self, given: Tensor, parameter: DTensor) -> Tensor:
        """Return what a file or another model has of a parameter, in the layout and order of this one."""
        order = self.arrangement.order
        if isinstance(given, DTensor):
            if order is None:
                return given
            if (given.device_mesh, given.placements) == (parameter.device_mesh, parameter.placements):
                return as_placed(given, self.arrangement)
            given = given.full_tensor()
        # From whole tensors, as a model in one process saves them, each rank takes its part.
        if order is not None:
            given = given[torch.tensor(order, device=given.device)]
        return distribute_tensor(
            given.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )

    def _apply_to_chunk(
        self,
        rows: Tensor,
        chunk: int,
        crossing: Crossing,
        w_in: Tensor,
        w_out: Tensor,
        b_in: Tensor | None,
        b_out: Tensor | None,
    ) -> Tensor:
        if w_in.shape[0] == 0:
            # No expert, and no row. Still the parameters get their gradients, without elements, and the backward pass
            # takes part in the exchange.
            nothing = sum(part.sum() for part in (w_in, w_out, b_in, b_out) if part is not None)
            return rows + torch.as_tensor(nothing).to(rows.dtype)
        ops = raw_operators(self.backend)
        # Products take rows in the order of experts, and those of an expert in the order of ranks: then every sum over
        # rows is that of one process with the tokens of all ranks. On the CPU they find them where they are; on CUDA,
        # where torch's grouped product may be the faster one and takes sorted rows alone, rows move.
        experts, number = crossing.plan.expert_of_rows(chunk, rows.device)
        routing = ops.build_routing(experts, number)
        sorted_rows = number == 1 or self.arrangement.ranks == 1
        moves = rows.is_cuda and not sorted_rows
        order = None if moves or sorted_rows else routing.token
        inner = ops.dispatch(rows, routing) if moves else rows
        inner = ops.grouped_linear(inner, w_in, routing.offsets, b_in, order=order)
        inner = ops.expert_activation(inner, self.activation)
        outer = ops.grouped_linear(inner, w_out, routing.offsets, b_out, order=order)
        return ops.combine(outer, routing) if moves else outer

    def _own(self, name: str) -> Tensor | None:
        """Return this rank's part of a parameter, in the graph of the call."""
        parameter = getattr(self, name)
        return None if parameter is None else self._with_divided_gradient(local_of(parameter))

    def _by_chunk(self, own: Tensor | None) -> Sequence[Tensor | None]:
        """Return the experts of every chunk, of one parameter."""
        chunks = self.arrangement.chunks
        if own is None:
            return [None] * chunks
        if chunks == 1:
            return [own]
        return own.split([len(cut[self.arrangement.rank]) for cut in self.arrangement.cuts])

    def _with_divided_gradient(self, local: Tensor) -> Tensor:
        # In the graph of the call, and not by a hook of the parameter: that one would be lost with a parameter that
        # Module.to() or load_state_dict(assign=True) replaces, and be called twice for one that layers share.
        divisor = self.gradient_divisor
        if divisor is None or divisor == 1:
            return local
        local = local.view_as(local)
        if local.requires_grad:
            local.register_hook(lambda gradient: gradient / divisor)
        return local


def _draw(shape: torch.Size, bound: float, local: Tensor, experts: Sequence[int]) -> None:
    """Draw a parameter uniformly in ±bound, and keep some experts."""
    if local.device.type != "cpu":
        local.copy_(torch.empty(shape, dtype=local.dtype, device=local.device).uniform_(-bound, bound)[list(experts)])
        return
    # Numbers follow each other there whatever they are drawn into, so the whole need not be in memory at once.
    places = {expert: place for place, expert in enumerate(experts)}
    for expert in range(shape[0]):
        drawn = torch.empty(shape[1:], dtype=local.dtype).uniform_(-bound, bound)
        if expert in places:
            local[places[expert]] = drawn


def _own_part(whole: nn.Parameter, arrangement: Arrangement) -> nn.Parameter:
    own = arrangement.spans[arrangement.rank]
    part = whole.detach()[own.start : own.stop].clone(memory_format=torch.contiguous_format)
    spread = DTensor.from_local(
        part,
        arrangement.mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride(),
    )
    return nn.Parameter(spread, requires_grad=whole.requires_grad)
