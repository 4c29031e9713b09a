"""What of a stage's graph leads to its inputs, and what to its weights alone.

The **input side** are the nodes from which an input can be reached. Where one of them has an edge to a node that does
not lead to an input, a **weight side** begins: everything behind that edge is there for the gradients of weights. A
weight side hangs together with another if they share a node (a weight that is used twice, say).

An edge from the input side to a weight side can be **put off** if its node can compute the gradients of its edges one
by one. Then the weight side waits for part two. If any edge to it cannot be put off (its node would have to run twice),
all that hangs together with it belongs to part one, so that no node of it runs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch.autograd.graph import Node

__all__ = ["GraphCut", "PutOff", "cut_graph"]


class PutOff(NamedTuple):
    """A node of the input side, whose gradients for some of its edges wait for part two."""

    node: Node
    edges: tuple[int, ...]
    """Which of ``node.next_functions``."""


class GraphCut(NamedTuple):
    """A graph in two parts."""

    input_side: list[Node]
    """But for the inputs."""
    put_off: list[PutOff]
    late_roots: list[bool]
    """For every root: does it wait for part two, whole?"""
    late_leaves: list[bool]
    """For every leaf: does its gradient wait for part two?"""


def cut_graph(
    roots: Sequence[Node],
    inputs: Sequence[Node],
    leaves: Mapping[int, int],
    can_put_off: Callable[[Node, tuple[int, ...]], bool],
) -> GraphCut:
    """Cut the graph that ends in ``roots``.

    Args:
        roots: where backward passes begin.
        inputs: the nodes at which the graph begins; what is behind them belongs to others.
        leaves: for the id of every tensor whose gradient is wanted, its number.
        can_put_off: whether a node can compute its gradients for these edges by themselves, without the others.
    """
    behind = set(inputs)
    parents: dict[Node, list[tuple[Node, int]]] = {}  # of every node but the roots: whose edges lead to it, and which
    leaf_nodes: dict[Node, int] = {}
    seen = set(roots) - behind
    stack = list(seen)
    while stack:
        node = stack.pop()
        following = node.next_functions
        for place, (after, _) in enumerate(following):
            if after is None:
                continue
            if after in parents:
                parents[after].append((node, place))
                continue
            parents[after] = [(node, place)]
            if after not in behind and after not in seen:
                seen.add(after)
                stack.append(after)
        if not following and (leaf := leaves.get(id(getattr(node, "variable", None)))) is not None:
            leaf_nodes[node] = leaf

    input_side = set(behind)
    stack = list(inputs)
    while stack:
        for node, _ in parents.get(stack.pop(), ()):
            if node not in input_side:
                input_side.add(node)
                stack.append(node)

    weight_side = {node for node in leaf_nodes if node not in input_side}
    cuts: dict[Node, list[tuple[int, Node]]] = {}  # of nodes of the input side: edges to weight sides
    stack = list(weight_side)
    while stack:
        after = stack.pop()
        for node, place in parents.get(after, ()):
            if node in input_side:
                cuts.setdefault(node, []).append((place, after))
            elif node not in weight_side:
                weight_side.add(node)
                stack.append(node)

    early: set[Node] = set()
    put_off = []
    for node, edges in cuts.items():
        places = tuple(sorted([place for place, _ in edges]))
        if can_put_off(node, places):
            put_off.append(PutOff(node, places))
        else:
            early.update([after for _, after in edges])
    if early:
        _spread(early, weight_side, parents)
        rest = {node: sorted([place for place, after in cuts[node] if after not in early]) for node, _ in put_off}
        put_off = [PutOff(node, tuple(places)) for node, places in rest.items() if places]
    late = weight_side - early
    late_leaves = {leaf for node, leaf in leaf_nodes.items() if node in late}
    return GraphCut(
        list(input_side - behind),
        put_off,
        [root in late for root in roots],
        [number in late_leaves for number in range(len(leaves))],
    )


def _spread(early: set[Node], weight_side: set[Node], parents: Mapping[Node, Sequence[tuple[Node, int]]]) -> None:
    """Add to ``early`` all of the weight side that hangs together with it."""
    stack = list(early)
    while stack:
        node = stack.pop()
        around = [after for after, _ in node.next_functions if after is not None]
        around += [parent for parent, _ in parents.get(node, ())]
        for other in around:
            if other in weight_side and other not in early:
                early.add(other)
                stack.append(other)
