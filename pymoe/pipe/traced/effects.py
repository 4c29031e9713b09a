"""Which tensors the nodes of a graph change in place, and which are views of others: what their schemas say."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

__all__ = ["Effects"]


class Effects:
    """Edits in a graph. The base of a view is the tensor whose memory it has."""

    def __init__(self, graph: fx.Graph) -> None:
        self._bases: dict[fx.Node, fx.Node] = {}
        self._editors: dict[fx.Node, list[fx.Node]] = {}  # by base
        for node in graph.nodes:
            seen = _seen_through(node)
            if seen is not None:
                self._bases[node] = self.base(seen)
            for edited in _edited(node):
                self._editors.setdefault(self.base(edited), []).append(node)

    def base(self, node: fx.Node) -> fx.Node:
        """The node whose memory this one's tensor has; itself for a tensor of its own."""
        return self._bases.get(node, node)

    def editors(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that change its tensor, in their order."""
        return self._editors.get(self.base(node), [])


def _edited(node: fx.Node) -> Iterator[fx.Node]:
    if isinstance(node.target, torch._ops.OpOverload):
        for argument, value in _arguments(node):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _nodes(value)
    else:
        block = _block(node)
        if block is not None:
            effects = Effects(block)
            for placeholder, value in zip(block.find_nodes(op="placeholder"), node.args, strict=False):
                if effects.editors(placeholder):
                    yield from _nodes(value)


def _seen_through(node: fx.Node) -> fx.Node | None:
    """The node whose memory the result of this one is."""
    if node.target is operator.getitem:
        first = node.args[0]
        return _out_of_block(first, node.args[1]) if isinstance(first, fx.Node) else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    returned = [info for result in node.target._schema.returns if (info := result.alias_info) is not None]
    if not returned:
        return None
    names = set(returned[0].before_set)
    for argument, value in _arguments(node):
        if argument.alias_info is not None and names & set(argument.alias_info.before_set):
            return next(_nodes(value), None)
    return None


def _block(node: fx.Node) -> fx.Graph | None:
    """The graph of a region that the node calls."""
    block = getattr(node.target, "graph", None)
    return block.graph if isinstance(block, fx.GraphModule) else None


def _out_of_block(node: fx.Node, number: Any) -> fx.Node | None:
    """What a region gives out as its output ``number``, if that is one of its arguments; else the region."""
    block = _block(node)
    if block is None:
        return node
    outputs = block.output_node().args[0]
    result = outputs[number] if isinstance(outputs, (tuple, list)) else outputs
    inside = block.find_nodes(op="placeholder")
    base = Effects(block).base(result) if isinstance(result, fx.Node) else None
    given = node.args[inside.index(base)] if base in inside else node
    return given if isinstance(given, fx.Node) else None


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    target: Any = node.target
    for number, argument in enumerate(target._schema.arguments):
        if number < len(node.args):
            yield argument, node.args[number]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from _nodes(item)
