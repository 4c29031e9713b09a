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
    """In an order in which each comes after those that it leads to."""
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
    edges: dict[Node, list[tuple[int, Node]]] = {}
    leads: dict[Node, bool] = dict.fromkeys(inputs, True)  # to an input?
    side: dict[Node, int] = {}  # nodes of weight sides -> what they hang together with
    together: list[int] = []  # each points to a smaller one, or to itself
    leaf_sides = [-1] * len(leaves)  # in no weight side
    input_side: list[Node] = []

    def find(number: int) -> int:
        while together[number] != number:
            together[number] = number = together[together[number]]
        return number

    stack = list(roots[::-1])
    while stack:
        node = stack[-1]
        if node in leads:
            stack.pop()
            continue
        following = edges.get(node)
        if following is None:
            following = [(place, after) for place, (after, _) in enumerate(node.next_functions) if after is not None]
            edges[node] = following
            ahead = [after for _, after in following if after not in leads]
            if ahead:
                stack.extend(ahead[::-1])
                continue
        stack.pop()
        leads[node] = leading = any([leads[after] for _, after in following])
        if leading:
            input_side.append(node)
            continue
        leaf = -1 if following else leaves.get(id(getattr(node, "variable", None)), -1)
        behind = [side[after] for _, after in following if after in side]
        if not behind and leaf < 0:
            continue  # it leads to nothing that is wanted
        mine = len(together)
        together.append(mine)
        side[node] = mine
        if leaf >= 0:
            leaf_sides[leaf] = mine
        for other in behind:
            first, second = find(other), find(mine)
            together[max(first, second)] = min(first, second)

    cuts: list[PutOff] = []
    early: set[int] = set()
    for node in input_side:
        places = tuple([place for place, after in edges[node] if after in side])
        if places:
            if can_put_off(node, places):
                cuts.append(PutOff(node, places))
            else:
                early.update([find(side[after]) for _, after in edges[node] if after in side])
    put_off = []
    for node, _ in cuts:
        following = edges[node]
        late = tuple([place for place, after in following if after in side and find(side[after]) not in early])
        if late:
            put_off.append(PutOff(node, late))
    return GraphCut(
        input_side,
        put_off,
        [not leads[root] and root in side and find(side[root]) not in early for root in roots],
        [number >= 0 and find(number) not in early for number in leaf_sides],
    )
