"""Where the positions of stacked parameters are, and the exchange that changes which expert is at which.

For parameters, their gradients and an optimizer's state alike: DTensors, cut along the experts. FSDP cuts the experts
of a rank once more, among the ranks that have the same ones, so a layout is a span of positions for each rank of a
group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pymoe.ep.arrangement import Arrangement, shards


def local_of(parameter: Tensor) -> Tensor:
    """Return this rank's part, in the graph."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, or of its gradient, outside of the graph; the memory is the same."""
    return local_of(parameter.detach())


@dataclass(frozen=True)
class Layout:
    """Which positions of a stacked parameter each rank of a group has."""

    own: range
    """The positions of this rank."""
    group: dist.ProcessGroup | None
    """All ranks that have some; None if they are not known."""
    spans: list[range]
    """By rank of the group."""


def layout_of(parameter: Tensor, arrangement: Arrangement) -> Layout:
    """Return the layout of a parameter of a layer, or of what is stacked as it is.

    Args:
        parameter: with as many positions as the layer has experts.
        arrangement: of the layer.

    Raises:
        ValueError: the parameter is not cut along its experts alone.
    """
    # FSDP's placement on the ranks with the same experts is no Shard, but has a dimension, too.
    if not isinstance(parameter, DTensor) or any(getattr(one, "dim", None) != 0 for one in parameter.placements):
        seen = parameter.placements if isinstance(parameter, DTensor) else type(parameter).__name__
        raise ValueError(f"MoE {arrangement.title}: experts must be a DTensor cut along the experts, got {seen}")
    mesh = parameter.device_mesh
    if mesh.ndim == 1:
        return Layout(arrangement.spans[arrangement.rank], arrangement.group, arrangement.spans)
    twins = mesh.size(0)
    parts = [
        [span[part.start : part.stop] for span in arrangement.spans for part in [shards(len(span), twins)[twin]]]
        for twin in range(twins)
    ]
    own = parts[mesh.get_local_rank(0)][arrangement.rank]
    if arrangement.everyone is None:
        return Layout(own, None, [])
    group = arrangement.everyone.get_group()
    spans = [own] * arrangement.everyone.size()
    for ranks, of_twin in zip(mesh.mesh.tolist(), parts, strict=True):
        for rank, part in zip(ranks, of_twin, strict=True):
            spans[dist.get_group_rank(group, rank)] = part
    return Layout(own, group, spans)


class Move:
    """A change of the experts' order. Every rank of the group makes it, and calls it for the same tensors.

    Args:
        layout: of the tensors.
        before: (E,), the expert at each position.
        after: (E,), the expert that is to be there.

    Raises:
        ValueError: nobody knows all ranks that have the positions.
    """

    def __init__(self, layout: Layout, before: Sequence[int], after: Sequence[int]) -> None:
        if layout.group is None:
            raise ValueError(
                "MoE: experts that fully_shard has cut must have been given to pymoe.ep.data_parallel before they move"
            )
        self._group = layout.group
        rank, ranks = dist.get_rank(layout.group), len(layout.spans)
        start = layout.own.start
        was = {expert: position for position, expert in enumerate(before)}
        owner = {position: number for number, span in enumerate(layout.spans) for position in span}

        def arrivals(span: range) -> list[tuple[int, int, int]]:
            """For the positions of a rank: from which rank, to which position, from which position; by rank."""
            return sorted((owner[was[after[position]]], position, was[after[position]]) for position in span)

        own = arrivals(layout.own)
        self._kept = [(position - start, old - start) for source, position, old in own if source == rank]
        self._came = [position - start for source, position, _ in own if source != rank]
        self._received = [sum(source == number != rank for source, _, _ in own) for number in range(ranks)]
        goes = [
            [old - start for source, _, old in arrivals(span) if source == rank != number]
            for number, span in enumerate(layout.spans)
        ]
        self._sent = [len(positions) for positions in goes]
        self._gone = [position for positions in goes for position in positions]

    def __call__(self, local: Tensor) -> Tensor:
        """Return this rank's part in the new order, (n, ...), in memory of its own."""

        def index(positions: Sequence[int]) -> Tensor:
            return torch.tensor(positions, dtype=torch.int64, device=local.device)

        result = torch.empty_like(local, memory_format=torch.contiguous_format)
        came = local.new_empty(len(self._came), *local.shape[1:])
        gone = local.index_select(0, index(self._gone))
        dist.all_to_all_single(came, gone, self._received, self._sent, group=self._group)
        result[index(self._came)] = came
        result[index([new for new, _ in self._kept])] = local.index_select(0, index([old for _, old in self._kept]))
        return result


def as_in_one_process(tensor: DTensor, arrangement: Arrangement) -> DTensor:
    """Return a parameter, or what is stacked as it is, with expert e at position e. All ranks of its mesh call this."""
    return _reordered(tensor, arrangement, arrangement.order, None)


def as_placed(tensor: DTensor, arrangement: Arrangement) -> DTensor:
    """Undo :func:`as_in_one_process`."""
    return _reordered(tensor, arrangement, None, arrangement.order)


def _reordered(
    tensor: DTensor, arrangement: Arrangement, before: Sequence[int] | None, after: Sequence[int] | None
) -> DTensor:
    plain = range(arrangement.num_experts)
    moved: DTensor = torch.empty_like(tensor)  # type: ignore[assignment]
    if not tensor.is_meta:
        move = Move(layout_of(tensor, arrangement), before or plain, after or plain)
        local_part(moved).copy_(move(local_part(tensor)))
    return moved
