"""The backward pass of one micro-batch in one stage, in two parts: first the gradients of inputs, later the gradients
of weights.

The previous stage waits only for the first part, so a zero-bubble schedule (Qi et al., arXiv 2401.10241) fills the gaps
of a pipeline with the second part. Together the two parts do the work of one backward pass: some nodes run in both, but
compute different gradients there.

The **input side** of the graph consists of the nodes from which an input can be reached. Where one of them has an edge
to a node that does not lead to an input, a **weight side** begins: everything behind that edge serves gradients of
weights. Weight sides that share a node (for example a weight that is used twice) are connected.

An edge from the input side to a weight side can be **deferred** if the node where it begins can compute the gradients
of its edges one by one. Then the weight side waits for part two. If any edge to a weight side cannot be deferred, all
weight sides connected to it belong to part one, so that none of their nodes runs twice. These nodes can defer:

- Nodes of torch whose derivatives are computed one by one, each only if it is asked for (:data:`ONE_BY_ONE`). A node
  whose saved tensors are packed by hooks cannot defer: with a checkpoint, unpacking them twice would run the forward
  twice.
- An ``autograd.Function`` with a class attribute ``backward_in_parts = True``. Its ``backward`` is then called up to
  twice, each time with a ``ctx.needs_input_grad`` that asks for some of the gradients only, and must compute only
  those, from the same saved tensors. The first call may leave shared results on ``ctx``. In the second call, the
  gradient of an output that received none is zeros, even if the function has turned off materialization; it is None
  only if the class also has ``takes_missing_gradients = True``. Functions without ``backward_in_parts`` are called
  once.

In a graph with nodes of ``torch.compile`` no node can defer: compiled nodes run only in a pass that frees the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pymoe._torch_private import FunctionBase, len_torch_dispatch_stack, run_backward
from pymoe.autograd.graph_nodes import apply_directly
from pymoe.autograd.isolated_graph import differentiate


class SplitBackward:
    """A backward pass in two parts: the constructor runs the first, and :meth:`weight_gradients` the second.

    The parts may run on different threads.

    Neither part adds anything to ``.grad``. Hooks of tensors within the graph run in one of the parts, as in a whole
    backward pass. Hooks of leaves do not run, because they are meant for sums over all micro-batches. Hooks of deferred
    nodes (``Node.register_hook``) get the gradients that the first part computes. The sums are those of a whole
    backward pass, bit for bit; the order of a sum may differ only if the graph uses a weight three or more times in
    different ways (for example, also transposed).

    Args:
        roots: where the backward pass begins. A root that is None is skipped, together with its gradient.
        grads: for every root a gradient of its shape, or None.
        inputs: where the graph begins. Nodes behind them never run.
        leaves: all tensors within the graph whose gradients are wanted, each once.
        is_compiled: whether the graph has nodes of ``torch.compile``.

    Both parts raise whatever the nodes of the graph raise.
    """

    input_gradients: tuple[Tensor | None, ...]
    """A gradient for each of ``inputs``; None for an input on which the roots with gradients do not depend."""

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
        with DeferredGradients(cut.deferred) as deferred:
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
        if not is_compiled:  # a compiled graph has already freed its tensors
            free_saved_tensors([node for node in cut.input_side if node not in cut.deferred])
        self._is_compiled = is_compiled
        self._deferred: DeferredGradients | None = deferred
        self._late_roots = [(root, grad) for root, grad in given if root.node in cut.late]
        self._late_leaves = {number: leaves[number] for number in cut.late_leaves}

    def weight_gradients(self) -> tuple[Tensor | None, ...]:
        """Run the second part, and release the graph, even if the part fails.

        Returns:
            A gradient for each of ``leaves``; None for a leaf on which the roots with gradients do not depend.

        Raises:
            RuntimeError: this was called before.
        """
        deferred, roots, leaves = self._deferred, self._late_roots, self._late_leaves
        if deferred is None:
            raise RuntimeError("SplitBackward: the gradients of the weights are computed once")
        self._deferred, self._late_roots, self._late_leaves = None, [], {}
        edges, values = deferred.gradients()
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
    """The nodes of a graph, divided into those that run in part one and those that run in part two."""

    input_side: set[Node]
    """Nodes of the input side, without the inputs themselves."""
    deferred: dict[Node, tuple[int, ...]]
    """Nodes of the input side with deferred edges: the indices in ``node.next_functions`` that wait for part two."""
    late: set[Node]
    """The weight sides that wait for part two."""
    late_leaves: list[int]
    """The indices of the leaves in these weight sides."""


def cut_graph(
    roots: Sequence[Node],
    inputs: Sequence[Node],
    leaves: Mapping[int, int],
    is_compiled: bool,
) -> GraphCut:
    """Cut the graph between ``roots``, where backward passes begin, and ``inputs``, where they end.

    ``leaves`` maps the id of every tensor whose gradient is wanted to its number. No edge is deferred if the graph has
    nodes of ``torch.compile`` (``is_compiled``).
    """
    behind = set(inputs)
    # For every node to which edges lead: the nodes where these edges begin, and the indices of the edges.
    parents: dict[Node, list[tuple[Node, int]]] = {}
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
    cuts: dict[Node, list[tuple[int, Node]]] = {}  # for each node of the input side: its edges to weight sides
    for after in weight_side:
        for node, place in parents.get(after, ()):
            if node in input_side:
                cuts.setdefault(node, []).append((place, after))

    whole = [node for node in cuts if is_compiled or not can_defer(node)]
    early = {after for node in whole for _, after in cuts[node]}
    _add_connected(early, weight_side, parents)
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
    """Return the nodes and every node from which they can be reached, except for nodes in ``without``."""
    found = set(nodes)
    stack = list(found)
    while stack:
        for node, _ in parents.get(stack.pop(), ()):
            if node not in found and node not in without:
                found.add(node)
                stack.append(node)
    return found


def _add_connected(
    early: set[Node], weight_side: set[Node], parents: Mapping[Node, Sequence[tuple[Node, int]]]
) -> None:
    """Add to ``early`` all nodes in ``weight_side`` that are connected to a node in ``early``, directly or not."""
    stack = list(early)
    while stack:
        node = stack.pop()
        around = [after for after, _ in node.next_functions if after is not None]
        around += [parent for parent, _ in parents.get(node, ())]
        for other in around:
            if other in weight_side and other not in early:
                early.add(other)
                stack.append(other)


# Which nodes can leave gradients of weights to part two.

_MATRICES = "Addmm Mm Addbmm Baddbmm Bmm Addmv Mv Addr Dot Linear MkldnnLinear GroupedMm Trilinear"
_LAYERS = "Convolution ConvolutionOverrideable NativeLayerNorm NativeGroupNorm NativeBatchNorm FusedRmsNorm"
_ELEMENTS = "Add Sub Mul Div"
ONE_BY_ONE = frozenset([f"{name}Backward0" for name in f"{_MATRICES} {_LAYERS} {_ELEMENTS}".split()])


def can_defer(node: Node) -> bool:
    """Return whether the node can compute the gradients of its edges one by one; False in anomaly mode."""
    if torch.is_anomaly_enabled():
        return False
    if isinstance(node, FunctionBase):
        return getattr(getattr(node, "_forward_cls", None), "backward_in_parts", False) is True
    return node.name() in ONE_BY_ONE and not any([saved.unpack_hook is not None for saved in _saved_tensors(node)])


_saved_names: dict[type, tuple[str, ...]] = {}


def _saved_tensors(node: Any) -> list[Any]:
    """Return the objects that hold the saved tensors of one of torch's nodes."""
    kind = type(node)
    names = _saved_names.get(kind)
    if names is None:
        names = _saved_names[kind] = tuple([name for name in dir(kind) if name.startswith("_raw_saved")])
    found: list[Any] = []
    for name in names:
        saved = getattr(node, name)
        found.extend(saved if isinstance(saved, tuple) else [saved])
    return found


def free_saved_tensors(nodes: Iterable[Node]) -> None:
    """Free the saved tensors of nodes that never run again, except those that hooks have packed."""
    for node in nodes:
        if isinstance(node, FunctionBase):
            node.maybe_clear_saved_tensors()  # type: ignore[attr-defined]
            continue
        for saved in _saved_tensors(node):
            if saved.unpack_hook is None:
                try:
                    saved.register_hooks(lambda _: None, lambda _: None)
                except RuntimeError:  # the node saved no tensor here
                    continue


class _Enough(Exception):
    """Raised within a backward pass to end it early."""


class _WithinBackward(torch.autograd.Function):
    """Runs a function within a backward pass, and then ends the pass."""

    @staticmethod
    def forward(ctx: Any, work: Callable[[], None], anchor: Tensor, *leaves: Tensor) -> Tensor:
        ctx.work = work
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.work()
        raise _Enough


class DeferredGradients:
    """Records the gradients reaching nodes with deferred edges; :meth:`gradients` then computes those of the edges."""

    def __init__(self, deferred: Mapping[Node, tuple[int, ...]]) -> None:
        self._edges = deferred
        # The gradients that have reached each node, in the order in which the nodes have run.
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}
        # For each node of an autograd Function: the index of the input to which each edge belongs; -1 for edges without
        # a next node.
        self._places: dict[Any, list[int]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> DeferredGradients:
        for node, edges in self._edges.items():
            self._hooks.append(node.register_prehook(partial(self._arrived.__setitem__, node)))
            if isinstance(node, FunctionBase):
                function: Any = node
                needs = function.needs_input_grad
                asked = iter([place for place, need in enumerate(needs) if need])
                places = [-1 if after is None else next(asked) for after, _ in node.next_functions]
                late = {places[edge] for edge in edges}
                function.needs_input_grad = tuple([need and place not in late for place, need in enumerate(needs)])
                self._places[node] = places
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def gradients(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Run the nodes again, for the deferred gradients only. Return the deferred edges and their gradients.

        torch's nodes ask the running backward pass which of their edges are needed. So this method starts a pass that
        needs the deferred edges, calls the nodes directly within that pass, and then ends the pass.
        """
        found: list[tuple[GradientEdge, Tensor]] = []
        devices: dict[torch.device, list[Node]] = {}
        targets: dict[Node, list[Any]] = {}
        for node, arrived in self._arrived.items():
            given = [grad for grad in arrived if grad is not None]
            if given:
                following: tuple[tuple[Any, int], ...] = node.next_functions
                targets[node] = [GradientEdge(*following[edge]) for edge in self._edges[node]]
                devices.setdefault(_about(targets[node][0]).device, []).append(node)
        for device, nodes in devices.items():

            def work(nodes: list[Node] = nodes) -> None:
                for node in nodes:
                    computed = self._run(node, self._arrived.pop(node))
                    for edge, target in zip(self._edges[node], targets[node], strict=True):
                        gradient = computed[edge]
                        if gradient is not None:
                            found.append((target, gradient))

            ends = list(dict.fromkeys([target for node in nodes for target in targets[node]]))
            leaves = [end.node.variable for end in ends if _is_leaf(end)]  # type: ignore[attr-defined]
            others = [end for end in ends if not _is_leaf(end)]
            with torch.enable_grad():
                anchor = torch.empty(0, device=device, requires_grad=True)
                # Autograd runs the most recently made node first, so the pass begins with this node, whose inputs
                # include the leaves. The gradients passed for the other nodes only make them part of the pass, which
                # ends before they run.
                start = apply_directly(_WithinBackward, work, anchor, *leaves)
            grads = (torch.empty_like(start), *[_blank(end) for end in others])
            roots, inputs = (GradientEdge(start.grad_fn, 0), *others), (anchor, *ends)
            with suppress(_Enough):
                run_backward(roots, grads, True, False, inputs, True, accumulate_grad=False)
        return [edge for edge, _ in found], [gradient for _, gradient in found]

    def _run(self, node: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        places = self._places.get(node)
        if places is None:  # a node of torch's own operators
            computed = node(*grads)
            return computed if isinstance(computed, tuple) else (computed,)
        late = {places[edge] for edge in self._edges[node]}
        node.needs_input_grad = tuple([place in late for place in range(len(node.needs_input_grad))])
        if not getattr(getattr(node, "_forward_cls", None), "takes_missing_gradients", False):
            grads = tuple(
                torch.zeros(about.shape, dtype=about.dtype, device=about.device) if grad is None else grad
                for grad, about in zip(grads, node._input_metadata, strict=True)
            )
        computed = node.apply(*grads)
        given = computed if isinstance(computed, (tuple, list)) else (computed,)
        return tuple([given[place] if place >= 0 else None for place in places])


_zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _is_leaf(edge: GradientEdge) -> bool:
    return not edge.node.next_functions and hasattr(edge.node, "variable")


def _about(edge: GradientEdge) -> Any:
    """Return an object with the shape, dtype and device of the gradient that passes along an edge."""
    return edge.node._input_metadata[edge.output_nr]  # type: ignore[attr-defined]


def _blank(edge: GradientEdge) -> Tensor:
    about = _about(edge)
    kind = about.dtype, about.device
    zero = _zeros.get(kind)
    if zero is None or len_torch_dispatch_stack():
        zero = torch.zeros((), dtype=kind[0], device=kind[1])
        if type(zero) is Tensor:  # keep only plain tensors: a dispatch mode may have made a subclass
            _zeros[kind] = zero
    return zero.expand(about.shape)
