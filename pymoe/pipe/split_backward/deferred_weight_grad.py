"""Nodes whose gradients of weights are computed later than those of inputs.

These nodes can defer them:

- Nodes of torch whose derivatives are computed one by one, each only if it is asked for (:data:`ONE_BY_ONE`). A node
  whose saved tensors are packed by hooks (a checkpoint would run its forward again) is left whole.
- An ``autograd.Function`` with a class attribute ``backward_in_parts = True``. Its ``backward`` is then called up to
  twice, each time with a ``ctx.needs_input_grad`` that asks for some of the gradients only, and must compute those
  alone, from the same saved tensors. What both calls need, the first may leave on ``ctx``. Gradients of outputs that
  have none are zeros in the second call, even if the function has turned off their materialization. Functions without
  the attribute are called once.

In a graph with nodes of ``torch.compile`` no node can: they run in graphs of which nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pymoe._torch_private import FunctionBase, len_torch_dispatch_stack, run_backward
from pymoe.autograd.graph_nodes import apply_directly

_MATRICES = "Addmm Mm Addbmm Baddbmm Bmm Addmv Mv Addr Dot Linear MkldnnLinear GroupedMm Trilinear"
_LAYERS = "Convolution ConvolutionOverrideable NativeLayerNorm NativeGroupNorm NativeBatchNorm FusedRmsNorm"
_ELEMENTS = "Add Sub Mul Div"
ONE_BY_ONE = frozenset([f"{name}Backward0" for name in f"{_MATRICES} {_LAYERS} {_ELEMENTS}".split()])


def can_defer(node: Node) -> bool:
    """Return whether the node can compute the gradients of its edges one by one. Not in anomaly mode."""
    if torch.is_anomaly_enabled():
        return False
    if isinstance(node, FunctionBase):
        return getattr(getattr(node, "_forward_cls", None), "backward_in_parts", False) is True
    return node.name() in ONE_BY_ONE and not any([saved.unpack_hook is not None for saved in _saved_tensors(node)])


_saved_names: dict[type, tuple[str, ...]] = {}


def _saved_tensors(node: Any) -> list[Any]:
    """Return what holds the tensors that a node of torch has saved."""
    kind = type(node)
    names = _saved_names.get(kind)
    if names is None:
        names = _saved_names[kind] = tuple([name for name in dir(kind) if name.startswith("_raw_saved")])
    found: list[Any] = []
    for name in names:
        saved = getattr(node, name)
        found.extend(saved if isinstance(saved, tuple) else [saved])
    return found


def _drop(saved: Any) -> None:
    return None


def free_saved_tensors(nodes: Iterable[Node]) -> None:
    """Free the tensors that nodes have saved which never run again."""
    for node in nodes:
        if isinstance(node, FunctionBase):
            node.maybe_clear_saved_tensors()  # type: ignore[attr-defined]
            continue
        for saved in _saved_tensors(node):
            if saved.unpack_hook is None:
                try:
                    saved.register_hooks(_drop, _drop)
                except RuntimeError:  # nothing is saved there
                    continue


class _Enough(Exception):
    """Ends a backward pass."""


class _WithinBackward(torch.autograd.Function):
    """Does some work within a backward pass, which then ends."""

    @staticmethod
    def forward(ctx: Any, work: Callable[[], None], anchor: Tensor, *leaves: Tensor) -> Tensor:
        ctx.work = work
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.work()
        raise _Enough


class Recorder:
    """Keeps the gradients that arrive at nodes in part one, after all hooks, for their weights in part two."""

    def __init__(self, deferred: Mapping[Node, tuple[int, ...]]) -> None:
        self._edges = deferred
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}  # in the order in which the nodes have run
        self._places: dict[Any, list[int]] = {}  # of Python functions: which argument each edge belongs to, -1 for none
        self._hooks: list[Any] = []

    def __enter__(self) -> Recorder:
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
        """Return the deferred gradients, and the edges that they go along. Runs the recorded nodes, for these alone.

        torch's nodes look up in the running backward pass which of their edges lead to something that is asked for.
        So this starts one that asks for the weights' sides, runs the nodes by hand in it, and ends it there.
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
                # Leaves come after it in the pass, and others have been made before it: so it is the first to run. The
                # gradients given to these only mark them as part of the pass, which ends before it comes to them.
                start = apply_directly(_WithinBackward, work, anchor, *leaves)
            grads = (torch.empty_like(start), *[_blank(end) for end in others])
            roots, inputs = (GradientEdge(start.grad_fn, 0), *others), (anchor, *ends)
            with suppress(_Enough):
                run_backward(roots, grads, True, False, inputs, True, accumulate_grad=False)
        return [edge for edge, _ in found], [gradient for _, gradient in found]

    def _run(self, node: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        places = self._places.get(node)
        if places is None:  # a node of torch's
            computed = node(*grads)
            return computed if isinstance(computed, tuple) else (computed,)
        late = {places[edge] for edge in self._edges[node]}
        node.needs_input_grad = tuple([place in late for place in range(len(node.needs_input_grad))])
        zeros = [
            torch.zeros(about.shape, dtype=about.dtype, device=about.device) if grad is None else grad
            for grad, about in zip(grads, node._input_metadata, strict=True)
        ]
        computed = node.apply(*zeros)
        given = computed if isinstance(computed, (tuple, list)) else (computed,)
        return tuple([given[place] if place >= 0 else None for place in places])


_zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _is_leaf(edge: GradientEdge) -> bool:
    return not edge.node.next_functions and hasattr(edge.node, "variable")


def _about(edge: GradientEdge) -> Any:
    """Return shape, dtype and device of the gradients that go along an edge."""
    return edge.node._input_metadata[edge.output_nr]  # type: ignore[attr-defined]


def _blank(edge: GradientEdge) -> Tensor:
    about = _about(edge)
    kind = about.dtype, about.device
    zero = _zeros.get(kind)
    if zero is None or len_torch_dispatch_stack():
        zero = torch.zeros((), dtype=kind[0], device=kind[1])
        if type(zero) is Tensor:  # a mode may have made another
            _zeros[kind] = zero
    return zero.expand(about.shape)
