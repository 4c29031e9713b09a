"""The backward pass of one micro-batch in one stage, in two parts: gradients of inputs first, those of weights later.

The stage before waits for the first part alone, so a zero-bubble schedule (Qi et al., arXiv 2401.10241) fills the gaps
of a pipeline with the second. Both together are one backward pass, cut in two: they do the same work, and no node runs
twice.

The **input side** of the graph are the nodes from which an input can be reached. Where one of them has an edge to a
node that does not lead to an input, a **weight side** begins: everything behind that edge serves gradients of weights.
Weight sides that share a node (a weight that is used twice, say) are connected.

An edge from the input side to a weight side can be **deferred** if its node can compute the gradients of its edges one
by one (``deferred_weight_grad.py``). Then the weight side waits for part two. If any edge to it cannot be deferred, all
weight sides that are connected to it belong to part one, so that no node of them runs twice.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pymoe.autograd.isolated_graph import differentiate
from pymoe.pipe.split_backward.deferred_weight_grad import Recorder, can_defer, free_saved_tensors


class SplitBackward:
    """A backward pass in two parts, on any threads: the first runs when this is made, the second is called for.

    Accumulates nothing. Hooks of tensors within the graph run in one of the parts, as in a whole backward pass; those
    of leaves do not run, being for sums over all micro-batches. Hooks of deferred nodes
    (``Node.register_hook``) see what the first part computes. The sums are those of a whole backward pass, bit for bit;
    only where the graph uses a weight three times or more, and in different ways (as it is and transposed, say), their
    order may be another.

    Args:
        roots: where the backward pass begins. None is skipped, and so is its gradient.
        grads: for every root a gradient of its shape, or None.
        inputs: where the graph begins. What is behind them is never run.
        leaves: all tensors within the graph whose gradients are wanted, each once.
        is_compiled: whether there are nodes of ``torch.compile``.

    Raises what the graph raises.
    """

    input_gradients: tuple[Tensor | None, ...]
    """A gradient for every one of ``inputs``; None for one that the roots with gradients do not depend on."""

    def __init__(
        self,
        roots: Sequence[GradientEdge | None],
        grads: Sequence[Tensor | None],
        inputs: Sequence[GradientEdge],
        leaves: Sequence[Tensor],
        is_compiled: bool,
    ) -> None:
        given = [(root, grad) for root, grad in zip(roots, grads, strict=True) if root and grad is not None]
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        cut = cut_graph([root.node for root, _ in given], [edge.node for edge in inputs], numbers, is_compiled)
        early = [number for number in range(len(leaves)) if number not in cut.late_leaves]
        now = [(root, grad) for root, grad in given if root.node not in cut.late]
        with Recorder(cut.deferred) as recorder:
            found = differentiate(
                [root for root, _ in now],
                [grad for _, grad in now],
                inputs,
                [leaves[number] for number in early],
                inputs[0].node if inputs else None,
                keep=not is_compiled,
            )
        self.input_gradients = found[: len(inputs)]
        self._gradients: list[Tensor | None] = [None] * len(leaves)
        for number, gradient in zip(early, found[len(inputs) :], strict=True):
            self._gradients[number] = gradient
        if not is_compiled:  # these are free
            free_saved_tensors([node for node in cut.input_side if node not in cut.deferred])
        self._is_compiled = is_compiled
        self._recorder: Recorder | None = recorder
        self._late_roots = [(root, grad) for root, grad in given if root.node in cut.late]
        self._late_leaves = {number: leaves[number] for number in cut.late_leaves}

    def weight_gradients(self) -> tuple[Tensor | None, ...]:
        """Run the second part, once. Lets go of the graph, also if it fails.

        Returns:
            A gradient for every one of ``leaves``; None for one that the roots with gradients do not depend on.
        """
        recorder, roots, leaves = self._recorder, self._late_roots, self._late_leaves
        if recorder is None:
            raise RuntimeError("SplitBackward: the gradients of the weights are computed once")
        self._recorder, self._late_roots, self._late_leaves = None, [], {}
        edges, values = recorder.gradients()
        found = differentiate(
            [*edges, *[root for root, _ in roots]],
            [*values, *[grad for _, grad in roots]],
            [],
            [*leaves.values()],
            None,
            keep=not self._is_compiled,
        )
        for number, gradient in zip(leaves, found, strict=True):
            self._gradients[number] = gradient
        return tuple(self._gradients)


class GraphCut(NamedTuple):
    """A graph in two parts."""

    input_side: set[Node]
    """Without the inputs."""
    deferred: dict[Node, tuple[int, ...]]
    """The nodes of the input side whose gradients for some of ``node.next_functions`` wait for part two: for which."""
    late: set[Node]
    """The weight sides that wait for part two."""
    late_leaves: list[int]
    """The numbers of the leaves among them."""


def cut_graph(
    roots: Sequence[Node],
    inputs: Sequence[Node],
    leaves: Mapping[int, int],
    is_compiled: bool,
) -> GraphCut:
    """Cut the graph from ``roots``, where backward passes begin, to ``inputs``, behind which it belongs to others.

    ``leaves`` has the number of every tensor whose gradient is wanted, by its id. Nothing is deferred if there are
    nodes of ``torch.compile``.
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

    input_side = _with_users(behind, parents)
    weight_side = _with_users([node for node in leaf_nodes if node not in input_side], parents, input_side)
    cuts: dict[Node, list[tuple[int, Node]]] = {}  # of nodes of the input side: edges to weight sides
    for after in weight_side:
        for node, place in parents.get(after, ()):
            if node in input_side:
                cuts.setdefault(node, []).append((place, after))

    whole = [node for node in cuts if is_compiled or not can_defer(node)]
    early = {after for node in whole for _, after in cuts[node]}
    _spread(early, weight_side, parents)
    deferred = {
        node: places
        for node, edges in cuts.items()
        if (places := tuple(sorted([place for place, after in edges if after not in early])))
    }
    late = weight_side - early
    late_leaves = sorted([leaf for node, leaf in leaf_nodes.items() if node in late])
    return GraphCut(input_side - behind, deferred, late, late_leaves)


def _with_users(
    nodes: Iterable[Node], parents: Mapping[Node, Sequence[tuple[Node, int]]], without: Container[Node] = ()
) -> set[Node]:
    """Return the nodes and all from which they can be reached, up to those in ``without``."""
    found = set(nodes)
    stack = list(found)
    while stack:
        for node, _ in parents.get(stack.pop(), ()):
            if node not in found and node not in without:
                found.add(node)
                stack.append(node)
    return found


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
