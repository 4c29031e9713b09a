"""Opaque modules of a captured graph: nodes that call them get the module from whoever runs the graph."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx, nn
from torch.utils import _pytree

from pymoe.pipe.capture.graph import Region
from pymoe.pipe.capture.opaque import OpaqueModule

__all__ = ["ModuleCall", "modules_as_arguments"]


class ModuleCall:
    """The target of a node: takes a module and the computed leaves of its arguments, returns those of its result."""

    def __init__(self, call: OpaqueModule) -> None:
        self.__name__ = call.__name__
        self._form = copy.copy(call)  # how leaves become arguments, without the module
        self._form.function = self._form.module = None  # type: ignore[assignment]

    def __call__(self, module: nn.Module, *computed: Any) -> list[Any]:
        args, kwargs = self._form.arguments(computed)
        leaves = _pytree.tree_leaves(module(*args, **kwargs))
        return [leaves[number] for number in self._form._kept]

    def __repr__(self) -> str:
        return self.__name__


def modules_as_arguments(graph: fx.Graph) -> None:
    """Let ``get_attr`` name the opaque modules that a graph calls, so that they are part of a stage's state.

    Raises:
        ValueError: the whole model is opaque.
    """
    for node in list(graph.nodes):
        paths = _convert(node)
        if "" in paths:
            raise ValueError("the model itself is opaque, so there is nothing to cut: name modules inside of it")
        for path in paths:
            with graph.inserting_before(node):
                node.args = (graph.get_attr(path), *node.args) if _is_call(node) else (*node.args, graph.get_attr(path))


def _is_call(node: fx.Node) -> bool:
    return isinstance(node.target, ModuleCall)


def _convert(node: fx.Node) -> list[str]:
    """Make the node take modules as arguments, and say which: a call before, a region after the others."""
    target = node.target
    if isinstance(target, OpaqueModule):
        node.target = ModuleCall(target)
        return [target.path]
    if not isinstance(target, Region):
        return []
    block = target.graph.graph
    found = []
    for inner in list(block.nodes):
        for path in _convert(inner):
            last = block.find_nodes(op="placeholder")
            with block.inserting_after(last[-1]) if last else block.inserting_before():
                module = block.placeholder(f"module_{path.replace('.', '_')}")
            inner.args = (module, *inner.args) if _is_call(inner) else (*inner.args, module)
            found.append(path)
    if found:
        target.graph.recompile()
    return found
