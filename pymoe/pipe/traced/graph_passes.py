"""Rewrites of a captured graph before it is partitioned: stage boundaries leave regions, and opaque modules become
arguments of the nodes that call them.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from pymoe.pipe.capture.graph import Region
from pymoe.pipe.capture.opaque import OpaqueModule
from pymoe.pipe.traced.split_points import is_marker, mark


def split_regions(graph: fx.Graph) -> None:
    """Split regions, blocks without gradients or in autocast, at the markers inside, which then stand between them."""
    for node in list(graph.nodes):
        if isinstance(node.target, Region):
            split_regions(node.target.graph.graph)
            if any(is_marker(inner) for inner in node.target.graph.graph.nodes):
                _split_region(graph, node, node.target)


def _split_region(graph: fx.Graph, node: fx.Node, region: Region) -> None:
    """Put several regions, with markers between them, where one was."""
    block = region.graph.graph
    # What stands in the outer graph for nodes of the block.
    outside: dict[fx.Node, Any] = dict(zip(block.find_nodes(op="placeholder"), node.args, strict=True))
    for number, segment in enumerate(_segments(block)):
        if number:
            mark(graph, node)
        if segment:
            _insert_region(graph, node, region, segment, outside)
    results: Any = block.output_node().args[0]
    for user in list(node.users):  # each takes one of the results
        result = results[user.args[1]]
        user.replace_all_uses_with(outside[result])
        graph.erase_node(user)
    graph.erase_node(node)


def _insert_region(
    graph: fx.Graph, before: fx.Node, region: Region, segment: list[fx.Node], outside: dict[fx.Node, Any]
) -> None:
    """Insert a region of some of the nodes, and add what it gives to ``outside``."""
    inside = set(segment)
    taken = dict.fromkeys(source for node in segment for source in node.all_input_nodes if source not in inside)
    given = [node for node in segment if any(user not in inside for user in node.users)]
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in taken:
        copies[source] = part.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in segment:
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output([copies[node] for node in given])
    target = Region(region.__name__, fx.GraphModule({}, part), region.grad, region.autocast)
    with graph.inserting_before(before):
        call = graph.call_function(target, tuple(outside[source] for source in taken))
        call.meta = {key: value for key, value in segment[0].meta.items() if key != "val"}
        for number, node in enumerate(given):
            outside[node] = graph.call_function(operator.getitem, (call, number))
            outside[node].meta = dict(node.meta)


def _segments(block: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the nodes between markers."""
    segment: list[fx.Node] = []
    for node in block.nodes:
        if is_marker(node):
            yield segment
            segment = []
        elif node.op not in ("placeholder", "output"):
            segment.append(node)
    yield segment


class ModuleCall:
    """The target of a node: takes a module and the computed leaves of its arguments, returns those of its result."""

    def __init__(self, call: OpaqueModule) -> None:
        self.__name__ = call.__name__
        self._call = copy.copy(call)  # how leaves become arguments, without the module
        self._call.function = self._call.module = None  # type: ignore[assignment]

    def __call__(self, module: nn.Module, *computed: Any) -> list[Any]:
        return self._call.call(module, computed)

    def __repr__(self) -> str:
        return self.__name__


def modules_as_arguments(graph: fx.Graph) -> None:
    """Let ``get_attr`` fetch the opaque modules that a graph calls, so that they are part of a stage's state.

    Raises:
        ValueError: the whole model is opaque.
    """
    for node in list(graph.nodes):
        paths = _convert(node)
        if "" in paths:
            raise ValueError("opaque: the whole model is opaque and cannot be split: list modules inside it")
        for path in paths:
            with graph.inserting_before(node):
                _give(node, graph.get_attr(path))


def _give(node: fx.Node, module: fx.Node) -> None:
    node.args = (module, *node.args) if isinstance(node.target, ModuleCall) else (*node.args, module)


def _convert(node: fx.Node) -> list[str]:
    """Make the node take modules as arguments, a call before and a region after the others; return their paths."""
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
            _give(inner, module)
            found.append(path)
    if found:
        target.graph.recompile()
    return found
