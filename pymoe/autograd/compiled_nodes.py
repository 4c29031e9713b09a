"""Graphs with nodes of ``torch.compile``, which can be differentiated only once.

Their backward works in the buffers that their forward has saved ("donated" buffers), and refuses to run if the graph is
kept. Graphs of isolated calls are kept, although each is differentiated once, because they may lead into other graphs
that are still needed (of a weight that was computed before the call, say). Graphs with compiled nodes are not kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import Node

from pymoe._torch_private import FunctionBase
from pymoe.autograd.graph_nodes import find_leaves_and_nodes

_FUNCTION, _NODE = "CompiledFunction", "CompiledFunctionBackward"  # torch.compile makes such a class for each graph

_NATIVE: set[type] = set()  # types of nodes that no class of Python makes
_latest: Callable[[], type | None] = lambda: None  # noqa: E731  # the last class that was looked at
_found = False


def _anything_is_compiled() -> bool:
    global _latest, _found
    classes = torch.autograd.Function.__subclasses__()  # in the order in which they were made
    if classes and classes[-1] is not _latest():
        _found = any([cls.__name__ == _FUNCTION for cls in classes])
        _latest = weakref.ref(classes[-1])
    return _found


def are_compiled(nodes: Iterable[Node | None]) -> bool:
    """Return whether one of ``nodes``, all nodes of a graph, comes from ``torch.compile``."""
    kinds = {*map(type, nodes)}
    if kinds <= _NATIVE:
        return False
    of_python = {kind for kind in kinds if issubclass(kind, FunctionBase)}
    _NATIVE.update(kinds - of_python)
    return any([kind.__name__ == _NODE for kind in of_python])


def has_compiled_nodes(nodes: Sequence[Node], entry: Node | None) -> bool:
    """Return whether a backward pass from ``nodes`` that stops at ``entry`` can reach a node of ``torch.compile``."""
    return _anything_is_compiled() and are_compiled(find_leaves_and_nodes(nodes, entry)[1])
