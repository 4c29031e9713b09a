"""Partitions a captured graph at its stage boundaries: one graph per stage, and the edges between them.

Before that, boundaries are moved out of regions, and opaque modules become arguments of the nodes that call them.
Parameters and buffers that several stages use are replicated or transmitted, depending on the user's configuration and
on in-place changes.
"""

from __future__ import annotations

import copy
import enum
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from pymoe._torch_private import OpOverload
from pymoe.pipe.capture.capture import CONSTANT, Region
from pymoe.pipe.capture.opaque import Computed, OpaqueModule
from pymoe.pipe.stages import INPUT, Source
from pymoe.pipe.traced.split_points import is_marker, mark


@dataclass(frozen=True, eq=False)
class StageGraph:
    """The graph of one stage, with its inputs and outputs."""

    graph: fx.Graph
    """A graph with a placeholder for each of ``inputs``, which returns a list of ``outputs`` values."""
    inputs: tuple[Source, ...]
    outputs: int
    state: tuple[str, ...]
    """Names of the parameters, buffers and constants that the stage uses."""


@dataclass(frozen=True, eq=False)
class Partition:
    """The graphs of the stages, and the output of the model."""

    stages: tuple[StageGraph, ...]
    outputs: tuple[Source, ...]
    """Sources of the computed leaves of the model's output."""
    leaves: tuple[Any, ...]
    """The leaves of the model's output; each ``Computed`` stands for the next one of ``outputs``."""


def partition(graph: fx.Graph, state: SharedState, devices: Sequence[torch.device | None] = ()) -> Partition:
    """Partition a captured graph at its markers.

    A stage gets every value directly from the stage that computes it or, if earlier stages change the value in place,
    from the last of these. Where possible, a stage computes sizes from tensors that it has anyway. ``devices``: for
    every stage, the device of the tensors that it creates; None, or an empty sequence: the device of the capture.

    Raises:
        ValueError: some of the stages that use a buffer change it, but not all of them, and not only the first one.
    """
    return _Partitioner(graph, state, devices).partition()


class _Partitioner:
    def __init__(self, graph: fx.Graph, state: SharedState, devices: Sequence[torch.device | None]) -> None:
        self._graph = graph
        self.aliases = Aliases(graph)
        self._numbers = _stage_numbers(graph)
        self._count = max(self._numbers.values(), default=0) + 1
        self._inputs = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
        self._transmitted = state.transmitted(graph, self._numbers, self.aliases)
        self._builders = [
            _StageBuilder(number, self, devices[number] if number < len(devices) else None)
            for number in range(self._count)
        ]

    def partition(self) -> Partition:
        for node, number in self._numbers.items():
            if not _is_arithmetic(node):  # sizes are computed where they are needed
                self._builders[number].copy(node)
        results: Any = self._graph.output_node().args[0]
        outputs = [self.source(leaf, self._count) for leaf in results if isinstance(leaf, fx.Node)]
        leaves = [Computed if isinstance(leaf, fx.Node) else leaf for leaf in results]
        return Partition(tuple(builder.finish() for builder in self._builders), tuple(outputs), tuple(leaves))

    def home(self, node: fx.Node, stage: int) -> int:
        """Return the stage that gives ``stage`` the node's value: ``stage`` itself, an earlier stage, or ``INPUT``."""
        if node.op == "get_attr":
            first = self._transmitted.get(node)
            return min(stage, self._count - 1) if first is None or first >= stage else first
        made = self._numbers.get(node, INPUT)
        changed = [
            number
            for writer in self.aliases.writers(node)
            if made < (number := self._numbers[writer]) < stage and node in self._builders[number].copies
        ]
        return max(changed, default=made)

    def source(self, node: fx.Node, stage: int) -> Source:
        """Return the source of the node's value for ``stage``; make the source's stage return the value if needed."""
        home = self.home(node, stage)
        return Source(INPUT, self._inputs[node]) if home == INPUT else self._builders[home].give(node)


class _StageBuilder:
    """Builds the graph of one stage."""

    def __init__(self, number: int, partitioner: _Partitioner, device: torch.device | None) -> None:
        self._number = number
        self._partitioner = partitioner
        self._device = device
        self._graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self._inputs: dict[fx.Node, Source] = {}  # the sources of this stage's inputs, by node of the whole graph
        self._given: dict[fx.Node, int] = {}
        self._end: fx.Node | None = None  # the last placeholder
        self._state: list[str] = []

    def copy(self, node: fx.Node) -> fx.Node:
        """Add a copy of the node to this stage."""

        def here(leaf: Any) -> Any:
            return self._device if isinstance(leaf, torch.device) and self._device is not None else leaf

        arguments = fx.map_arg((node.args, node.kwargs), self._local)
        args, kwargs = fx.node.map_aggregate(arguments, here)
        if node.op == "call_module":
            self._state.append(str(node.target))
        return self._add(node, self._graph.create_node(node.op, node.target, args, kwargs, node.name))

    def give(self, node: fx.Node) -> Source:
        """Make the value of ``node`` an output of this stage, and return the source from which other stages get it."""
        if node not in self._given:
            self._local(node)
            self._given[node] = len(self._given)
        return Source(self._number, self._given[node])

    def finish(self) -> StageGraph:
        given = []
        for node in self._given:
            local = self.copies[node]
            aliases = self._partitioner.aliases
            # The value is in the memory of a buffer that stages change in place. Send a copy, because the buffer may
            # change again before another stage uses the value.
            if aliases.base(node).op == "get_attr" and aliases.writers(node):
                local = self._graph.call_function(torch.ops.aten.clone.default, (local,))
            given.append(local)
        self._graph.output(given)
        self._graph.lint()
        return StageGraph(self._graph, tuple(self._inputs.values()), len(given), tuple(dict.fromkeys(self._state)))

    def _add(self, node: fx.Node, made: fx.Node) -> fx.Node:
        made.meta = dict(node.meta)
        self.copies[node] = made
        return made

    def _local(self, node: fx.Node) -> fx.Node:
        """Return the node of this stage's graph that has the value of ``node``; add such a node if there is none."""
        if node in self.copies:
            return self.copies[node]
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
        """Add nodes that recompute a size, or arithmetic on sizes, from values that this stage already has.

        Return the last of these nodes, or None if the values do not suffice.
        """
        if (size := self._same_size(node)) is not None:
            return self._graph.call_function(torch.ops.aten.sym_size.int, size)
        sources = node.all_input_nodes
        if isinstance(node.target, OpOverload) or not all(map(_is_arithmetic, sources)):
            return None
        for source in sources:
            if source not in self.copies:
                if (local := self._again(source)) is None:
                    return None
                self._add(source, local)
        args = fx.map_arg(node.args, self.copies.__getitem__)
        return self._graph.create_node(node.op, node.target, args, node.kwargs, node.name)

    def _same_size(self, node: fx.Node) -> tuple[fx.Node, int] | None:
        """Return an input of this stage and one of its dimensions whose size in the capture is the value of ``node``.

        Return None if there is no such dimension.
        """
        wanted = node.meta["val"]
        if not isinstance(wanted, torch.SymInt):
            return None
        for given in self._inputs:
            value = given.meta.get("val")
            for dimension, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == wanted.node.expr:
                    return self.copies[given], dimension
        return None


def _stage_numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the stage number (from 0 up) of every call node of the graph, except for markers.

    Markers end stages. Adjacent markers count as one, so no stage is empty.
    """
    dependent = _dependent(graph)
    numbers: dict[fx.Node, int] = {}
    stage, computes, is_over = 0, False, False
    waiting: list[fx.Node] = []  # views etc. after a boundary: part of the stage that begins there, if any
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
            if node.target is operator.getitem:  # an item of a list belongs to the stage that makes the list
                numbers[node] = numbers.get(node.all_input_nodes[0], stage)
    for node in reversed(graph.nodes):
        if node in numbers and node not in dependent:  # a constant is computed in the stage that uses it first
            numbers[node] = min([numbers[user] for user in node.users if user in numbers], default=numbers[node])
    return numbers


def compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that compute something from inputs, parameters or buffers, in order."""
    dependent = _dependent(graph)
    return [node for node in graph.nodes if node in dependent and _computes(node)]


def _computes(node: fx.Node) -> bool:
    """Return whether a node is a call that does more than return a number, an item or a view, or assert something."""
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
    """Return whether a node's value is a size, or computed from sizes with Python's operators."""
    if node.op != "call_function" or not is_number(node):
        return False
    return node.target is torch.ops.aten.sym_size.int or not isinstance(node.target, OpOverload)


def _dependent(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on inputs, parameters or buffers."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_source = node.op == "placeholder" or (node.op == "get_attr" and not str(node.target).startswith(CONSTANT))
        if is_source or found.intersection(node.all_input_nodes):
            found.add(node)
    return found


# Rewrites of a captured graph before it is partitioned.


def split_regions(graph: fx.Graph) -> None:
    """Split regions (blocks that set the grad mode or autocast) at the markers in them."""
    for node in list(graph.nodes):
        if isinstance(node.target, Region):
            split_regions(node.target.graph.graph)
            if any(is_marker(inner) for inner in node.target.graph.graph.nodes):
                _split_region(graph, node, node.target)


def _split_region(graph: fx.Graph, node: fx.Node, region: Region) -> None:
    """Replace a region that contains markers with several regions, with the markers between them."""
    block = region.graph.graph
    # The nodes of the outer graph that represent nodes of the block.
    outside: dict[fx.Node, Any] = dict(zip(block.find_nodes(op="placeholder"), node.args, strict=True))
    for number, segment in enumerate(_segments(block)):
        if number:
            mark(graph, node)
        if segment:
            _insert_region(graph, node, region, segment, outside)
    results: Any = block.output_node().args[0]
    for user in list(node.users):  # each user is a getitem of the list of results
        result = results[user.args[1]]
        user.replace_all_uses_with(outside[result])
        graph.erase_node(user)
    graph.erase_node(node)


def _insert_region(
    graph: fx.Graph, before: fx.Node, region: Region, segment: list[fx.Node], outside: dict[fx.Node, Any]
) -> None:
    """Insert a region with the nodes in ``segment`` before the node ``before``, and add its results to ``outside``."""
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
    """Yield the nodes of a block in lists that are separated by its markers. A list may be empty."""
    segment: list[fx.Node] = []
    for node in block.nodes:
        if is_marker(node):
            yield segment
            segment = []
        elif node.op not in ("placeholder", "output"):
            segment.append(node)
    yield segment


class ModuleCall:
    """The target of a node that calls an opaque module. It takes the module and the computed leaves of the arguments,
    and returns the computed leaves of the result.
    """

    def __init__(self, call: OpaqueModule) -> None:
        self.__name__ = call.__name__
        # This copy converts leaves to arguments. It must not refer to the module, which is an argument of the node.
        self._call = copy.copy(call)
        self._call.function = self._call.module = None  # type: ignore[assignment]

    def __call__(self, module: nn.Module, *computed: Any) -> list[Any]:
        return self._call.call(module, computed)

    def __repr__(self) -> str:
        return self.__name__


def modules_as_arguments(graph: fx.Graph) -> None:
    """Make ``get_attr`` nodes fetch the opaque modules that a graph calls: such nodes define the state of a stage.

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
    """Prepare the node to take its opaque modules as arguments, and return the names of these modules.

    The caller adds the arguments with :func:`_give`: at the front for a call, at the end for a region.
    """
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


# Parameters and buffers that several stages use.


class MultiUseParameterConfig(enum.Enum):
    """Says how several stages share one parameter.

    In one process, the stages that use a replicated parameter share one object. Across processes, each has a copy, and
    the gradients of the copies are summed.
    """

    TRANSMIT = 1
    """The first stage that uses the parameter holds it, and sends its value to the others, which send gradients
    back."""
    REPLICATE = 2
    """Every stage that uses the parameter holds it."""


MultiUseParamSpec = MultiUseParameterConfig | Mapping[str, MultiUseParameterConfig]
"""One configuration for all parameters, or a dict of them by qualified name."""
Spec = MultiUseParamSpec | None


@dataclass(frozen=True)
class SharedState:
    """Determines which parameters and buffers of a graph are transmitted between stages."""

    parameters: frozenset[str]
    """Names of the parameters."""
    spec: Spec
    """One configuration for all parameters, or one for each by name; None: the default for all."""
    apart: bool = False
    """True if stages are on different devices. Then parameters absent from ``spec`` are transmitted; otherwise they are
    replicated."""

    def transmitted(self, graph: fx.Graph, stage_of: Mapping[fx.Node, int], aliases: Aliases) -> dict[fx.Node, int]:
        """Return the parameters and buffers whose values are transmitted between stages, and for each the number of
        the stage that sends it.

        Raises:
            ValueError: some of the stages that use a buffer change it, but not all of them, and not only the first one.
        """
        found = {}
        default = MultiUseParameterConfig.TRANSMIT if self.apart else MultiUseParameterConfig.REPLICATE
        for node in graph.find_nodes(op="get_attr"):
            users = sorted({stage_of[user] for user in node.users if user in stage_of})
            if len(users) < 2:
                continue
            if node.target in self.parameters:
                spec = self.spec.get(str(node.target)) if isinstance(self.spec, Mapping) else self.spec
                is_sent = (spec or default) is MultiUseParameterConfig.TRANSMIT
            else:
                is_sent = _is_changed(node, users, stage_of, aliases)
            if is_sent:
                found[node] = users[0]
        return found


def by_first_name(spec: Spec, model: nn.Module) -> Spec:
    """Return ``spec`` with each parameter named as in captured graphs, which use the first name of a shared parameter.

    Raises:
        TypeError: ``spec`` is neither a configuration nor a mapping to configurations.
        ValueError: the model has no parameter with one of the names.
    """
    if spec is None or isinstance(spec, MultiUseParameterConfig):
        return spec
    if not isinstance(spec, Mapping) or not all(isinstance(use, MultiUseParameterConfig) for use in spec.values()):
        raise TypeError(
            f"multi_use_param_spec: expected a MultiUseParameterConfig or a dict of them by name, got {spec!r}"
        )
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    if unknown := [name for name in spec if name not in every]:
        raise ValueError(f"multi_use_param_spec: the model has no parameter {unknown[0]!r}")
    return {first[id(every[name])]: use for name, use in spec.items()}


def _is_changed(node: fx.Node, users: list[int], stage_of: Mapping[fx.Node, int], aliases: Aliases) -> bool:
    """Return whether the buffer ``node`` is changed only by the first of its ``users``, so that the later ones must
    receive its value.

    Return False if no stage changes the buffer, or if all its users do.

    Raises:
        ValueError: any other set of stages changes the buffer.
    """
    writers = sorted({stage_of[writer] for writer in aliases.writers(node)})
    if not writers or writers == users:
        return False  # the schedule makes stages that all change a buffer take turns
    if writers == users[:1]:
        return True
    raise ValueError(
        f"the buffer {node.target!r} is used by stages {users} and changed by {writers}: the next micro-batch would "
        "read it before this one has changed it. Move the stage boundaries so that one stage has all of its uses"
    )


class Aliases:
    """Finds, from the schemas of operators, which tensors the nodes of a graph change in place, and which tensors are
    views of others.

    The base of a view is the node whose tensor owns the memory that the view shares.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._bases: dict[fx.Node, fx.Node] = {}
        self._writers: dict[fx.Node, list[fx.Node]] = {}  # for each base: the nodes that write to its memory
        for node in graph.nodes:
            if (viewed := _viewed(node)) is not None:
                self._bases[node] = self.base(viewed)
            for written in _written(node):
                self._writers.setdefault(self.base(written), []).append(node)

    def base(self, node: fx.Node) -> fx.Node:
        """Return the node whose memory this node's tensor shares, or the node itself if it has its own memory."""
        return self._bases.get(node, node)

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that change the tensor of ``node`` in place, in order."""
        return self._writers.get(self.base(node), [])


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments that the node changes in place."""
    if isinstance(node.target, OpOverload):
        for argument, value in _arguments(node):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _nodes(value)
    elif isinstance(node.target, Region):
        block = node.target.graph.graph
        aliases = Aliases(block)
        for placeholder, value in zip(block.find_nodes(op="placeholder"), node.args, strict=False):
            if aliases.writers(placeholder):
                yield from _nodes(value)


def _viewed(node: fx.Node) -> fx.Node | None:
    """Return the argument with which the node's result shares memory; None if there is none."""
    if node.target is operator.getitem:
        first = node.args[0]
        return _out_of_block(first, node.args[1]) if isinstance(first, fx.Node) else None
    if not isinstance(node.target, OpOverload):
        return None
    returned = [info for result in node.target._schema.returns if (info := result.alias_info) is not None]
    if not returned:
        return None
    names = set(returned[0].before_set)
    for argument, value in _arguments(node):
        if argument.alias_info is not None and names & set(argument.alias_info.before_set):
            return next(iter(_nodes(value)), None)
    return None


def _out_of_block(node: fx.Node, number: Any) -> fx.Node | None:
    """Return the argument of the region ``node`` that shares memory with the region's output ``number``, or ``node`` if
    there is no such argument.

    Return None if that argument is not a node; return ``node`` if it is not a region.
    """
    if not isinstance(node.target, Region):
        return node
    block = node.target.graph.graph
    outputs = block.output_node().args[0]
    result = outputs[number] if isinstance(outputs, (tuple, list)) else outputs
    inside = block.find_nodes(op="placeholder")
    base = Aliases(block).base(result) if isinstance(result, fx.Node) else None
    given = node.args[inside.index(base)] if base in inside else node
    return given if isinstance(given, fx.Node) else None


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    target: Any = node.target
    arguments = target._schema.arguments
    yield from zip(arguments, node.args, strict=False)
    yield from ((argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs)


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found
