"""ShardedExperts: the experts that one rank has of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pymoe.ep.arrangement import Arrangement
from pymoe.ep.exchange import Crossing, arrive, send_back
from pymoe.nn.experts import Experts
from pymoe.nn.options import operators

NAMES = ("w_in", "w_out", "b_in", "b_out")


class ShardedExperts(Experts):
    """The experts of one rank, of a :class:`pymoe.nn.Experts` that :func:`pymoe.ep.shard` has spread over a group.

    Its parameters have the names and shapes of the whole layer's. They are DTensors, cut along the experts
    (``Shard(0)`` on the group's mesh); ``to_local()`` has this rank's.
    """

    arrangement: Arrangement
    gradient_divisor: int | None = None
    """What each call divides its gradients of parameters by; None before :func:`pymoe.ep.data_parallel` sets it."""

    def spread(self, arrangement: Arrangement, made: dict[int, nn.Parameter]) -> None:
        """Keep this rank's experts.

        Args:
            arrangement: of the layer.
            made: parameters that were spread before, by the id of what they were: shared ones stay shared.
        """
        self.arrangement = arrangement
        for name in NAMES:
            whole = getattr(self, name)
            if whole is not None:
                if id(whole) not in made:
                    made[id(whole)] = _own_part(whole, arrangement)
                setattr(self, name, made[id(whole)])

    def reset_parameters(self) -> None:
        """Initialise all experts as one process does, from the same random numbers, and keep this rank's."""
        for weight, bias in ((self.w_in, self.b_in), (self.w_out, self.b_out)):
            bound = weight.shape[-1] ** -0.5
            for parameter in (weight, bias):
                if parameter is not None:
                    local = local_part(parameter)
                    whole = torch.empty(parameter.shape, dtype=local.dtype, device=local.device).uniform_(-bound, bound)
                    with torch.no_grad():
                        own = self.arrangement.own
                        local.copy_(whole[own.start : own.stop])

    def forward(self, tokens: tuple[Tensor, ...], crossing: Crossing, home: Crossing) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Apply to the rows of every chunk their experts, as soon as they are there, and send them back.

        Args:
            tokens: of the chunks that are under way.
            crossing: by which they come.
            home: by which they go back.

        Returns:
            The tokens of the way back.
        """
        parts = zip(*(self._parts_by_chunk(name) for name in NAMES), strict=True)
        return tuple(
            send_back(self._apply_to_chunk(arrive(token, crossing, chunk), chunk, crossing, *parameters), home, chunk)
            for chunk, (token, parameters) in enumerate(zip(tokens, parts, strict=True))
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # From whole tensors, as a model in one process saves them, each rank takes its part.
        for name, parameter in self.named_parameters(recurse=False):
            whole: Any = state_dict.get(prefix + name)
            if (
                isinstance(parameter, DTensor)
                and type(whole) in (Tensor, nn.Parameter)
                and whole.shape == parameter.shape
            ):
                whole = whole.detach().to(parameter.device)
                state_dict[prefix + name] = distribute_tensor(
                    whole, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

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
        ops = operators(self.backend)
        # Rows in the order of experts, and those of an expert in the order of ranks: then every sum over rows is that
        # of one process with the tokens of all ranks.
        experts, number = crossing.plan.expert_of_rows(chunk, rows.device)
        routing = ops.build_routing(experts, number)
        moves = number > 1 and self.arrangement.ranks > 1
        inner = ops.grouped_linear(ops.dispatch(rows, routing) if moves else rows, w_in, routing.offsets, b_in)
        inner = ops.expert_activation(inner, self.activation)
        outer = ops.grouped_linear(inner, w_out, routing.offsets, b_out)
        return ops.combine(outer, routing) if moves else outer

    def _parts_by_chunk(self, name: str) -> Iterator[Any]:
        """Return the experts of every chunk, of one parameter."""
        parameter = getattr(self, name)
        chunks = self.arrangement.chunks
        if parameter is None:
            return iter([None] * chunks)
        local = self._with_divided_gradient(_local(parameter))
        if chunks == 1:
            return iter([local])
        return iter(local.split([len(cut[self.arrangement.rank]) for cut in self.arrangement.cuts]))

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


def _own_part(whole: nn.Parameter, arrangement: Arrangement) -> nn.Parameter:
    own = arrangement.own
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


def _local(parameter: Tensor) -> Tensor:
    """Return this rank's part, in the graph."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, or of its gradient, outside of the graph; the memory is the same."""
    return _local(parameter.detach())
