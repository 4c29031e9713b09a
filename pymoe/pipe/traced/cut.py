"""A captured graph in pieces: one graph a stage, and the edges between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pymoe.pipe.stages import INPUT, Source
from pymoe.pipe.traced.boundaries import is_arithmetic, stage_numbers
from pymoe.pipe.traced.effects import Effects
from pymoe.pipe.traced.shared_state import State

__all__ = ["Computed", "Cut", "Piece", "cut"]


@dataclass(frozen=True, eq=False)
class Piece:
    """The part of a graph that is a stage."""

    graph: fx.Graph
    """Placeholders for the values of ``inputs``; returns a list."""
    inputs: tuple[Source, ...]
    outputs: int
    state: tuple[str, ...]
    """Names of the parameters, buffers and constants that it uses."""


@dataclass(frozen=True, eq=False)
class Cut:
    """The pieces, and what comes out of them."""

    pieces: tuple[Piece, ...]
    outputs: tuple[Source, ...]
    """Of the model's output leaves those that are computed."""
    leaves: tuple[Any, ...]
    """The model's output leaves; :class:`Computed` stands for the next of ``outputs``."""


class Computed:
    """Stands for an output that a stage computes."""


def cut(graph: fx.Graph, state: State, devices: Sequence[torch.device | None] = ()) -> Cut:
    """Cut a captured graph at its markers.

    Every value comes straight from the stage that made it; one that is changed in place, from the last that did. Sizes
    are taken anew from tensors that a stage has anyway.

    Args:
        graph: a captured graph.
        state: which parameters travel, and which are in several stages.
        devices: for every stage, where tensors that it makes shall be; None, or none: where they were captured.

    Raises:
        ValueError: a buffer is changed in a later stage than it is read in.
    """
    return _Cutter(graph, state, devices).cut()


class _Cutter:
    def __init__(self, graph: fx.Graph, state: State, devices: Sequence[torch.device | None]) -> None:
        self._graph = graph
        self._effects = Effects(graph)
        self._numbers = stage_numbers(graph)
        self._devices = devices
        self._count = max(self._numbers.values(), default=0) + 1
        self._inputs = {node: number for number, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
        self._travels = state.travels(graph, self._numbers, self._effects)
        self._builders = [_Builder(number, self) for number in range(self._count)]

    def cut(self) -> Cut:
        for node, number in self._numbers.items():
            if not is_arithmetic(node):  # these are made where they are needed
                self._builders[number].copy(node)
        leaves: list[Any] = []
        outputs = []
        results: Any = self._graph.output_node().args[0]
        for leaf in results:
            if isinstance(leaf, fx.Node):
                outputs.append(self.source(leaf, self._count))
                leaves.append(Computed)
            else:
                leaves.append(leaf)
        return Cut(tuple(builder.piece() for builder in self._builders), tuple(outputs), tuple(leaves))

    def home(self, node: fx.Node, stage: int) -> int:
        """Where ``stage`` has this value from: itself, an earlier one, or ``INPUT``."""
        if node.op == "get_attr":
            first = self._travels.get(node)
            return min(stage, self._count - 1) if first is None or first >= stage else first
        made = self._numbers.get(node, INPUT)
        changed = [
            number
            for editor in self._effects.editors(node)
            if made < (number := self._numbers[editor]) < stage and self._builders[number].has(node)
        ]
        return max(changed, default=made)

    def source(self, node: fx.Node, stage: int) -> Source:
        """The edge to ``stage`` from where it has this value."""
        home = self.home(node, stage)
        return Source(INPUT, self._inputs[node]) if home == INPUT else self._builders[home].give(node)

    def is_edited_buffer(self, node: fx.Node) -> bool:
        """Is the value a buffer, or a view of one, that a stage changes?"""
        return self._effects.base(node).op == "get_attr" and bool(self._effects.editors(node))

    def device(self, stage: int) -> torch.device | None:
        """Where it makes its tensors; None: where they were captured."""
        return self._devices[stage] if stage < len(self._devices) else None


class _Builder:
    """The graph of one stage, as it grows."""

    def __init__(self, number: int, cutter: _Cutter) -> None:
        self._number = number
        self._cutter = cutter
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._inputs: dict[fx.Node, Source] = {}  # nodes of the whole graph
        self._given: dict[fx.Node, int] = {}
        self._end: fx.Node | None = None  # of the placeholders
        self._state: list[str] = []

    def has(self, node: fx.Node) -> bool:
        return node in self._copies

    def copy(self, node: fx.Node) -> None:
        """The same node in this stage."""
        args, kwargs = fx.map_arg(node.args, self._local), fx.map_arg(node.kwargs, self._local)
        if (device := self._cutter.device(self._number)) is not None:
            args, kwargs = _on_device(args, device), _on_device(kwargs, device)
        made = self._graph.create_node(node.op, node.target, args, kwargs, node.name)
        made.meta = dict(node.meta)
        self._copies[node] = made
        if node.op == "call_module":
            self._state.append(str(node.target))

    def give(self, node: fx.Node) -> Source:
        """A value of this stage for others."""
        if node not in self._given:
            self._local(node)
            self._given[node] = len(self._given)
        return Source(self._number, self._given[node])

    def piece(self) -> Piece:
        """All of it."""
        given = []
        for node in self._given:
            local = self._copies[node]
            if self._cutter.is_edited_buffer(node):  # others shall see what is in it now, not the next micro-batch's
                local = self._graph.call_function(torch.ops.aten.clone.default, (local,))
            given.append(local)
        self._graph.output(given)
        self._graph.lint()
        return Piece(self._graph, tuple(self._inputs.values()), len(given), tuple(dict.fromkeys(self._state)))

    def _local(self, node: fx.Node) -> fx.Node:
        """The node's value in this stage."""
        known = self._copies.get(node)
        if known is not None:
            return known
        if node.op == "get_attr" and self._cutter.home(node, self._number) == self._number:
            made = self._graph.get_attr(str(node.target))
            self._state.append(str(node.target))
        elif is_arithmetic(node) and (again := self._again(node)) is not None:
            made = again
        elif is_arithmetic(node) and self._cutter.home(node, self._number) == self._number:
            self.copy(node)
            return self._copies[node]
        else:
            source = self._cutter.source(node, self._number)
            made = self._placeholder(node)
            self._inputs[node] = source
        made.meta = dict(node.meta)
        self._copies[node] = made
        return made

    def _placeholder(self, node: fx.Node) -> fx.Node:
        with self._graph.inserting_after(self._end) if self._end else self._graph.inserting_before():
            self._end = self._graph.placeholder(node.name)
        return self._end

    def _again(self, node: fx.Node) -> fx.Node | None:
        """A size, or what is computed of sizes, by what this stage has; None if that does not tell."""
        for size in _same_sizes(node, self._tensors()):
            return self._graph.call_function(torch.ops.aten.sym_size.int, size)
        sources = node.all_input_nodes
        if isinstance(node.target, torch._ops.OpOverload) or not all(is_arithmetic(source) for source in sources):
            return None
        for source in sources:
            if source not in self._copies:
                if (local := self._again(source)) is None:
                    return None
                local.meta = dict(source.meta)
                self._copies[source] = local
        args = fx.map_arg(node.args, self._copies.__getitem__)
        return self._graph.create_node(node.op, node.target, args, node.kwargs, node.name)

    def _tensors(self) -> Iterator[tuple[fx.Node, Any]]:
        """What this stage is given."""
        for node in self._inputs:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                yield self._copies[node], value


def _on_device(value: Any, device: torch.device) -> Any:
    return torch.fx.node.map_aggregate(value, lambda leaf: device if isinstance(leaf, torch.device) else leaf)


def _same_sizes(node: fx.Node, tensors: Iterator[tuple[fx.Node, Any]]) -> Iterator[tuple[fx.Node, int]]:
    """Dimensions of tensors that are this number, as the capture knows it."""
    value = node.meta["val"]
    if not isinstance(value, torch.SymInt):
        return
    for local, tensor in tensors:
        for dimension, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                yield local, dimension
