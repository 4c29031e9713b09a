"""Finds, makes and keeps alive nodes and edges of autograd's graphs, faster than torch's own functions.

The module also adds gradients as autograd does, and finds nodes that ``torch.compile`` has made. A compiled node can be
differentiated only once: its backward overwrites the buffers that its forward has saved ("donated" buffers), and raises
an error under ``retain_graph=True``. Graphs of isolated calls are differentiated with ``retain_graph=True``, because a
call's graph may lead into another graph that is still needed (for example that of a weight that was computed before the
call). Graphs with compiled nodes are the only exception.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pymoe._torch_private import DelayedError, FunctionBase, get_sequence_nr


def _make_anchor() -> tuple[torch.Tensor, GradientEdge]:
    with torch.inference_mode(False), torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True, device="cpu")
        return anchor, get_gradient_edge(anchor)


# ANCHOR is the input of nodes that need an input that requires gradients and have no other. It never gets a gradient.
# Its accumulator is kept alive to avoid a deadlock: torch creates the accumulator of a leaf under the leaf's lock, and
# under ``detect_anomaly()`` releases the interpreter's lock meanwhile, so two threads that use a leaf without an
# accumulator can block each other. Therefore everything that outlives a call uses this leaf and makes no other.
ANCHOR, _accumulator_of_the_anchor = _make_anchor()


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of ``tensor``; -1 for a tensor made in inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def add_gradients(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``one + other``. Either may be sparse, but torch adds a sparse tensor only on the right of a dense one."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


def apply_directly(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return ``function.apply(*args)``, faster than ``apply``: without its check for ``torch.func`` transforms.

    The check is not needed, because no call is isolated inside such a transform.
    """
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


make_edge: Any = tuple.__new__  # makes a GradientEdge from a tuple, bypassing its slow __new__


def keep_nodes(tensors: Sequence[torch.Tensor], nodes: Sequence[Node]) -> Node | None:
    """Return a node, never run, that keeps the nodes of ``tensors`` alive.

    Only nodes of an ``autograd.Function`` need this, because an edge does not keep such a node alive. If ``nodes`` has
    none of them, return None. Grad mode must be on. A ``view_as`` of each tensor would also work, but takes three times
    as long.

    Args:
        tensors: tensors with a history.
        nodes: the ``grad_fn`` of each tensor.
    """
    own = [tensor for tensor, node in zip(tensors, nodes, strict=True) if isinstance(node, FunctionBase)]
    if not own:
        return None
    return with_failing_node("pymoe: this node is never run", own)[0].grad_fn


def once_only(name: str, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Return ``gradients`` with a history whose backward raises an error.

    Graphs of calls cannot be differentiated twice. Without this history, second derivatives could be silently lost.
    """
    required = [gradient if gradient is None else gradient.detach().requires_grad_() for gradient in gradients]
    message = f"{name}: its backward pass cannot be differentiated again (create_graph=True)"
    return tuple(with_failing_node(message, required))


def with_failing_node(message: str, tensors: Sequence[Any]) -> Sequence[Any]:
    """Return aliases of ``tensors``. Their history is one node, whose backward raises an error with ``message``."""
    made: Any = DelayedError(message, len(tensors))(*tensors)
    return made if len(tensors) > 1 else (made,)


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return ``get_gradient_edge(tensor)``, in half the time. Grad mode must be on."""
    node: Any = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    token = None
    if isinstance(node, FunctionBase):
        nodes: list[Any] = [node]
        token = keep_nodes([tensor], nodes)
    return make_edge(GradientEdge, (node, tensor.output_nr, token))  # type: ignore[no-any-return]


def find_leaves(nodes: Sequence[Node], entry: Node | None) -> list[torch.Tensor]:
    """Return the leaves into which a backward pass from ``nodes`` that stops at ``entry`` would accumulate gradients.

    Their order depends only on the graph, so it is the same in every run.
    """
    return find_leaves_and_nodes(nodes, entry)[0]


def find_leaves_and_nodes(
    nodes: Sequence[Node], entry: Node | None
) -> tuple[list[torch.Tensor], Collection[Node | None]]:
    """Return the result of :func:`find_leaves`, and a set that contains the nodes reached, ``entry`` and None."""
    leaves: list[torch.Tensor] = []
    seen: set[Node | None] = {None, entry}
    stack: list[Any] = [node for node in dict.fromkeys(nodes) if node not in seen]
    seen.update(stack)
    while stack:
        node = stack.pop()
        following = node.next_functions
        if following:
            for after, _ in following:
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
        elif (variable := getattr(node, "variable", None)) is not None:
            leaves.append(variable)
    return leaves, seen


_ACCUMULATION = 2**64 - 1  # the sequence number of the nodes that accumulate gradients into leaves


def put_behind(limit: int, nodes: Sequence[Any]) -> None:
    """Give the nodes of a call sequence numbers below that of the next node of this thread, in their current order.

    ``limit`` is this thread's next sequence number. Of the nodes that are ready, autograd's engine runs the one with
    the greatest sequence number, which is the one made last. But each thread numbers its nodes separately, so nodes
    made by a worker may have greater numbers than the node of the map (``pymoe.parallel.map``), which the calling
    thread makes later. This matters if a tensor has left a call, but not as an output: then a backward pass reaches the
    call's nodes through that tensor, too, and frees what they have saved. The map's node must run before that happens,
    so the call's nodes get smaller numbers.
    """
    by_number: dict[int, list[Any]] = {}
    for node in nodes:
        by_number.setdefault(node._sequence_nr(), []).append(node)
    by_number.pop(_ACCUMULATION, None)
    # If there are fewer numbers below the limit than the nodes need, raise the limit, and this thread's counter with
    # it, by making nodes.
    if limit < len(by_number):
        one = torch.empty(0, requires_grad=True, device="cpu")
        while get_sequence_nr() < len(by_number):
            one.view_as(one)
        limit = len(by_number)
    for number in sorted(by_number, reverse=True):
        limit -= 1
        if number <= limit:
            limit = number
            continue
        for node in by_number[number]:
            node._set_sequence_nr(limit)


_FUNCTION, _NODE = "CompiledFunction", "CompiledFunctionBackward"  # torch.compile makes both classes for each graph

_NATIVE: set[type] = set()  # types of nodes that are made in C++
_latest: Callable[[], type | None] = lambda: None  # noqa: E731  # returns the last class of the latest search
_found = False  # the result of the latest search for compiled classes


def _anything_is_compiled() -> bool:
    global _latest, _found
    classes = torch.autograd.Function.__subclasses__()  # classes in the order of their creation
    if classes and classes[-1] is not _latest():
        _found = any([cls.__name__ == _FUNCTION for cls in classes])
        _latest = weakref.ref(classes[-1])
    return _found


def are_compiled(nodes: Iterable[Node | None]) -> bool:
    """Return whether ``torch.compile`` has made any of ``nodes``; None among them is ignored."""
    kinds = {*map(type, nodes)}
    if kinds <= _NATIVE:
        return False
    of_python = {kind for kind in kinds if issubclass(kind, FunctionBase)}
    _NATIVE.update(kinds - of_python)
    return any([kind.__name__ == _NODE for kind in of_python])


def has_compiled_nodes(nodes: Sequence[Node], entry: Node | None) -> bool:
    """Return whether a backward pass from ``nodes`` that stops at ``entry`` can reach a node of ``torch.compile``."""
    return _anything_is_compiled() and are_compiled(find_leaves_and_nodes(nodes, entry)[1])
