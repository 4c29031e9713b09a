"""Partition a captured graph at its stage boundaries: one graph a stage, and the edges between them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pymoe._torch_private import OpOverload
from pymoe.pipe.capture.graph import CONSTANT
from pymoe.pipe.capture.opaque import Computed
from pymoe.pipe.stages import INPUT, Source
from pymoe.pipe.traced.shared_state import Aliases, State
from pymoe.pipe.traced.split_points import is_marker


@dataclass(frozen=True, eq=False)
class StageGraph:
    """The part of a graph that is a stage."""

    graph: fx.Graph
    """Placeholders for the values of ``inputs``; returns a list."""
    inputs: tuple[Source, ...]
    outputs: int
    state: tuple[str, ...]
    """Names of the parameters, buffers and constants that it uses."""


@dataclass(frozen=True, eq=False)
class Partition:
    """The graphs of the stages, and what comes out of them."""

    stages: tuple[StageGraph, ...]
    outputs: tuple[Source, ...]
    """Of the model's output leaves those that are computed."""
    leaves: tuple[Any, ...]
    """The model's output leaves; ``Computed`` stands for the next of ``outputs``."""


def partition(graph: fx.Graph, state: State, devices: Sequence[torch.device | None] = ()) -> Partition:
    """Partition a captured graph at its markers.

    Every value comes straight from the stage that computes it; one that is changed in place, from the last that does.
    Sizes are taken anew from tensors that a stage has anyway. ``devices``: for every stage, where the tensors that it
    creates go; None, or none: where they were captured.

    Raises:
        ValueError: a buffer is changed in a later stage than it is read in.
    """
    return _Partitioner(graph, state, devices).partition()


class _Partitioner:
    def __init__(self, graph: fx.Graph, state: State, devices: Sequence[torch.device | None]) -> None:
        self._graph = graph
        self._aliases = Aliases(graph)
        self._numbers = _stage_numbers(graph)
        self._count = max(self._numbers.values(), default=0) + 1
        self._inputs = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
        self._transmitted = state.transmitted(graph, self._numbers, self._aliases)
        self._builders = [
            _StageBuilder(number, self, devices[number] if number < len(devices) else None)
            for number in range(self._count)
        ]

    def partition(self) -> Partition:
        for node, number in self._numbers.items():
            if not _is_arithmetic(node):  # these are computed where they are needed
                self._builders[number].copy(node)
        results: Any = self._graph.output_node().args[0]
        outputs = [self.source(leaf, self._count) for leaf in results if isinstance(leaf, fx.Node)]
        leaves = [Computed if isinstance(leaf, fx.Node) else leaf for leaf in results]
        return Partition(tuple(builder.finish() for builder in self._builders), tuple(outputs), tuple(leaves))

    def home(self, node: fx.Node, stage: int) -> int:
        """Return where ``stage`` has this value from: itself, an earlier one, or ``INPUT``."""
        if node.op == "get_attr":
            first = self._transmitted.get(node)
            return min(stage, self._count - 1) if first is None or first >= stage else first
        made = self._numbers.get(node, INPUT)
        changed = [
            number
            for writer in self._aliases.writers(node)
            if made < (number := self._numbers[writer]) < stage and self._builders[number].has(node)
        ]
        return max(changed, default=made)

    def source(self, node: fx.Node, stage: int) -> Source:
        """Return the edge to ``stage`` from where it has this value."""
        home = self.home(node, stage)
        return Source(INPUT, self._inputs[node]) if home == INPUT else self._builders[home].give(node)

    def is_changing_buffer(self, node: fx.Node) -> bool:
        """Return whether the value is a buffer, or a view of one, that a stage changes."""
        return self._aliases.base(node).op == "get_attr" and bool(self._aliases.writers(node))


class _StageBuilder:
    """The graph of one stage, as it grows."""

    def __init__(self, number: int, partitioner: _Partitioner, device: torch.device | None) -> None:
        self._number = number
        self._partitioner = partitioner
        self._device = device
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._inputs: dict[fx.Node, Source] = {}  # nodes of the whole graph
        self._given: dict[fx.Node, int] = {}
        self._end: fx.Node | None = None  # of the placeholders
        self._state: list[str] = []

    def has(self, node: fx.Node) -> bool:
        return node in self._copies

    def copy(self, node: fx.Node) -> fx.Node:
        """Add the same node to this stage."""

        def here(leaf: Any) -> Any:
            return self._device if isinstance(leaf, torch.device) and self._device is not None else leaf

        arguments = fx.map_arg((node.args, node.kwargs), self._local)
        args, kwargs = fx.node.map_aggregate(arguments, here)
        if node.op == "call_module":
            self._state.append(str(node.target))
        return self._add(node, self._graph.create_node(node.op, node.target, args, kwargs, node.name))

    def give(self, node: fx.Node) -> Source:
        """Return a value of this stage for others."""
        if node not in self._given:
            self._local(node)
            self._given[node] = len(self._given)
        return Source(self._number, self._given[node])

    def finish(self) -> StageGraph:
        given = []
        for node in self._given:
            local = self._copies[node]
            if self._partitioner.is_changing_buffer(node):
                # Others get its present contents, not the next micro-batch's.
                local = self._graph.call_function(torch.ops.aten.clone.default, (local,))
            given.append(local)
        self._graph.output(given)
        self._graph.lint()
        return StageGraph(self._graph, tuple(self._inputs.values()), len(given), tuple(dict.fromkeys(self._state)))

    def _add(self, node: fx.Node, made: fx.Node) -> fx.Node:
        made.meta = dict(node.meta)
        self._copies[node] = made
        return made

    def _local(self, node: fx.Node) -> fx.Node:
        """Return the node's value in this stage."""
        if node in self._copies:
            return self._copies[node]
        is_home = self._partitioner.home(node, self._number) == self._number
        if node.op == "get_attr" and is_home:
            self._state.append(str(node.target))
            return self._add(node, self._graph.get_attr(str(node.target)))
        if _is_arithmetic(node):
            if (again := self._again(node)) is not None:
                return self._add(node, again)
            if is_home:
                return self.copy(node)
        self._inputs[node] = self._partitioner.source(node, self._number)
        with self._graph.inserting_after(self._end) if self._end else self._graph.inserting_before():
            self._end = self._graph.placeholder(node.name)
        return self._add(node, self._end)

    def _again(self, node: fx.Node) -> fx.Node | None:
        """Compute a size, or arithmetic on sizes, from what this stage has; None if that does not tell."""
        if (size := self._same_size(node)) is not None:
            return self._graph.call_function(torch.ops.aten.sym_size.int, size)
        sources = node.all_input_nodes
        if isinstance(node.target, OpOverload) or not all(map(_is_arithmetic, sources)):
            return None
        for source in sources:
            if source not in self._copies:
                if (local := self._again(source)) is None:
                    return None
                self._add(source, local)
        args = fx.map_arg(node.args, self._copies.__getitem__)
        return self._graph.create_node(node.op, node.target, args, node.kwargs, node.name)

    def _same_size(self, node: fx.Node) -> tuple[fx.Node, int] | None:
        """Return the input of this stage, and the dimension, that the capture knows to be this size."""
        wanted = node.meta["val"]
        if not isinstance(wanted, torch.SymInt):
            return None
        for given in self._inputs:
            value = given.meta.get("val")
            for dimension, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == wanted.node.expr:
                    return self._copies[given], dimension
        return None


def _stage_numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the stage of every call in the graph but the markers, from 0 up.

    Markers end stages, and those with nothing between them are one: no stage is empty.
    """
    dependent = _dependent(graph)
    numbers: dict[fx.Node, int] = {}
    stage, computes, is_over = 0, False, False
    waiting: list[fx.Node] = []  # views behind a boundary: they belong to the stage that begins there, if one does
    for node in graph.nodes:
        if is_marker(node):
            is_over = computes
        elif node.op in ("call_function", "call_module"):
            if node in dependent and _computes(node):
                if is_over:
                    stage += 1
                    numbers.update(dict.fromkeys(waiting, stage))
                computes, is_over = True, False
                waiting.clear()
            elif is_over:
                waiting.append(node)
            numbers[node] = stage
            if node.target is operator.getitem:  # goes with what it is a part of
                numbers[node] = numbers.get(node.all_input_nodes[0], stage)
    for node in reversed(graph.nodes):
        if node in numbers and node not in dependent:  # a constant: computed where it is used first
            numbers[node] = min([numbers[user] for user in node.users if user in numbers], default=numbers[node])
    return numbers


def compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that compute something of inputs, parameters or buffers, in their order."""
    dependent = _dependent(graph)
    return [node for node in graph.nodes if node in dependent and _computes(node)]


def _computes(node: fx.Node) -> bool:
    """Return whether a node is neither a number nor just a view of a tensor."""
    if node.op not in ("call_function", "call_module") or is_number(node) or node.target is operator.getitem:
        return False
    if not isinstance(node.target, OpOverload):
        return True
    schema = node.target._schema
    only_asserts = not schema.returns and not any(x.alias_info and x.alias_info.is_write for x in schema.arguments)
    return not (node.target.is_view or only_asserts)


def is_number(node: fx.Node) -> bool:
    """Return whether a node's value is a number, such as a size."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_arithmetic(node: fx.Node) -> bool:
    """Return whether a node's value is a size, or what Python computes of sizes."""
    if node.op != "call_function" or not is_number(node):
        return False
    return node.target is torch.ops.aten.sym_size.int or not isinstance(node.target, OpOverload)


def _dependent(graph: fx.Graph) -> set[fx.Node]:
    """Return what depends on inputs, parameters or buffers."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_source = node.op == "placeholder" or (node.op == "get_attr" and not str(node.target).startswith(CONSTANT))
        if is_source or found.intersection(node.all_input_nodes):
            found.add(node)
    return found
