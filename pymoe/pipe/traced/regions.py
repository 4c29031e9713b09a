"""Boundaries inside of blocks with a state of their own (no gradients, autocast): such a block becomes several."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from pymoe.pipe.capture.graph import Region
from pymoe.pipe.traced.split_points import is_marker, mark

__all__ = ["open_regions"]


def open_regions(graph: fx.Graph) -> None:
    """Bring the markers that are inside of regions out of them."""
    for node in list(graph.nodes):
        if isinstance(node.target, Region):
            open_regions(node.target.graph.graph)
            if any(is_marker(inner) for inner in node.target.graph.graph.nodes):
                _Opening(graph, node, node.target).replace()


class _Opening:
    """One region on its way to several."""

    def __init__(self, graph: fx.Graph, node: fx.Node, region: Region) -> None:
        self._graph = graph
        self._node = node
        self._region = region
        block = region.graph.graph
        self._segments = list(_segments(block))
        self._output = block.output_node()
        # What stands in the outer graph for nodes of the block.
        self._outside: dict[fx.Node, fx.Node] = {}
        for placeholder, value in zip(block.find_nodes(op="placeholder"), node.args, strict=True):
            assert isinstance(value, fx.Node)
            self._outside[placeholder] = value

    def replace(self) -> None:
        """Put the parts, and markers between them, where the region was."""
        for number, segment in enumerate(self._segments):
            if number:
                mark(self._graph, self._node)
            self._part(segment)
        results: Any = self._output.args[0]
        for user in list(self._node.users):  # each takes one of the results
            result = results[user.args[1]]
            user.replace_all_uses_with(self._outside[result])
            self._graph.erase_node(user)
        self._graph.erase_node(self._node)

    def _part(self, segment: list[fx.Node]) -> None:
        """A region of some of the nodes, before the one that it is a part of."""
        inside = set(segment)
        taken = dict.fromkeys(source for node in segment for source in node.all_input_nodes if source not in inside)
        given = [node for node in segment if any(user not in inside for user in node.users)]
        if not segment:
            return
        part = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for source in taken:
            copies[source] = part.placeholder(source.name)
            copies[source].meta = dict(source.meta)
        for node in segment:
            copies[node] = part.node_copy(node, copies.__getitem__)
        part.output([copies[node] for node in given])
        region = self._region
        target = Region(region.__name__, fx.GraphModule({}, part), region.grad, region.autocast)
        with self._graph.inserting_before(self._node):
            call = self._graph.call_function(target, tuple(self._outside[source] for source in taken))
            call.meta = {key: value for key, value in segment[0].meta.items() if key != "val"}
            for number, node in enumerate(given):
                self._outside[node] = self._graph.call_function(operator.getitem, (call, number))
                self._outside[node].meta = dict(node.meta)


def _segments(block: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes between markers."""
    segment: list[fx.Node] = []
    for node in block.nodes:
        if is_marker(node):
            yield segment
            segment = []
        elif node.op not in ("placeholder", "output"):
            segment.append(node)
    yield segment
