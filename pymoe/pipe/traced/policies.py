"""Policies that cut a captured graph into stages which cost the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import fx

from pymoe.pipe.balance.cost import balance_cost, least_maximum
from pymoe.pipe.traced import costs
from pymoe.pipe.traced.boundaries import is_number, works
from pymoe.pipe.traced.effects import Effects
from pymoe.pipe.traced.split_points import mark

__all__ = ["split_by_flops", "split_by_time", "split_into_equal_parameters"]

ENOUGH = 1.1  # how much slower than it has to be the slowest stage may be, for fewer values that cross


def split_into_equal_parameters(stages: int) -> Policy:
    """Make stages with about the same number of parameters.

    Args:
        stages: how many, from 1 up to the number of the graph's operators.

    Returns:
        a ``split_policy`` for :func:`pymoe.pipeline`.
    """
    return Policy(stages, costs.parameters)


def split_by_time(stages: int) -> Policy:
    """Make stages whose forward and backward passes take about the same time, as measured with the example's sizes.

    Args:
        stages: how many, from 1 up to the number of the graph's operators.

    Returns:
        a ``split_policy`` for :func:`pymoe.pipeline`.
    """
    return Policy(stages, costs.seconds)


def split_by_flops(stages: int) -> Policy:
    """Make stages with about the same number of floating point operations, for the example's sizes; nothing is run.

    Args:
        stages: how many, from 1 up to the number of the graph's operators.

    Returns:
        a ``split_policy`` for :func:`pymoe.pipeline`.
    """
    return Policy(stages, costs.flops)


@dataclass(frozen=True)
class Policy:
    """Cuts so that the most expensive stage costs at most a tenth more than it has to, where the fewest values cross.

    Raises:
        ValueError: there are more stages than operators, or less than one.
    """

    stages: int
    cost: Callable[[fx.GraphModule], dict[fx.Node, float]]

    def __call__(self, graph: fx.GraphModule) -> fx.GraphModule:
        """The graph, with markers."""
        nodes = works(graph.graph)
        if not 1 <= self.stages <= len(nodes):
            raise ValueError(f"cannot make {self.stages} stages of a model with {len(nodes)} operators")
        found = self.cost(graph)
        every = _row(graph.graph, nodes, found)
        for position in _boundaries(every, _alive(graph.graph, nodes), self.stages):
            mark(graph.graph, nodes[position])
        graph.recompile()
        return graph


def _row(graph: fx.Graph, nodes: list[fx.Node], found: dict[fx.Node, float]) -> list[float]:
    """The costs of ``nodes``; those of nodes in between count for the one before."""
    places = {node: place for place, node in enumerate(nodes)}
    row, place = [0.0] * len(nodes), 0
    for node in graph.nodes:
        place = places.get(node, place)
        row[place] += found.get(node, 0.0)
    return row if sum(row) > 0 else [1.0] * len(nodes)


def _alive(graph: fx.Graph, nodes: list[fx.Node]) -> list[int]:
    """For every node how many tensors, made by those before, it or later ones take. Inputs go to any stage directly."""
    effects, places = Effects(graph), {node: place for place, node in enumerate(nodes)}
    position: dict[fx.Node, int] = {}
    place = -1
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        place = places.get(node, place)
        position[node] = place if node.op != "output" else len(nodes)
        for source in node.all_input_nodes:
            if not is_number(source):
                last[effects.base(source)] = position[node]
    changes = [0] * (len(nodes) + 1)
    for node, end in last.items():
        begin = position[node]
        if node.op not in ("placeholder", "get_attr") and 0 <= begin < end:
            changes[begin + 1] += 1
            if end < len(nodes):
                changes[end + 1] -= 1
    return list(accumulate(changes[: len(nodes)]))


def _boundaries(row: list[float], alive: list[int], stages: int) -> list[int]:
    """Where stages begin, but the first."""
    if stages == 1:
        return []
    best = least_maximum(row, stages)
    for limit in sorted(set(alive[1:])):
        starts = [0, *_cheapest(row, alive, limit)]
        segments = [sum(row[begin:end]) for begin, end in pairwise([*starts, len(row)])]
        if len(segments) >= stages and least_maximum(segments, stages) <= ENOUGH * best:
            sizes = balance_cost(segments, stages)
            return [starts[end] for end in list(accumulate(sizes))[:-1]]
    raise AssertionError("with all boundaries allowed the best way is there")


def _cheapest(row: list[float], alive: list[int], limit: int) -> list[int]:
    """The boundaries with few values; of those with nothing but free nodes in between, the one with the fewest."""
    found: list[int] = []
    for place in range(1, len(row)):
        if alive[place] > limit:
            continue
        if found and not any(row[found[-1] : place]):
            if alive[place] < alive[found[-1]]:
                found[-1] = place
        else:
            found.append(place)
    return found
