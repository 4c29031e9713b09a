"""Parameters and buffers that several stages use, and which nodes of a graph change them in place."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from pymoe._torch_private import OpOverload
from pymoe.pipe.capture.graph import Region


class MultiUseParameterConfig(enum.Enum):
    """How several stages share one parameter.

    In one process a replicated parameter is one object, in the stages that use it; across processes it is a copy in
    each, and their gradients are summed.
    """

    TRANSMIT = 1
    """The first stage that uses it holds it, and sends its value to the others, which send gradients back."""
    REPLICATE = 2
    """Every stage that uses it holds it."""


MultiUseParamSpec = MultiUseParameterConfig | Mapping[str, MultiUseParameterConfig]
"""For all parameters, or for some by qualified name."""
Spec = MultiUseParamSpec | None


@dataclass(frozen=True)
class State:
    """What is known about the parameters and buffers of a graph."""

    parameters: frozenset[str]
    """Names of those that are parameters."""
    spec: Spec
    """For all parameters, or by name."""
    apart: bool = False
    """Whether stages are on different devices: parameters absent from ``spec`` are transmitted, else replicated."""

    def transmitted(self, graph: fx.Graph, stage_of: Mapping[fx.Node, int], aliases: Aliases) -> dict[fx.Node, int]:
        """Return the parameters and buffers whose values are transmitted between stages, and the stage that holds each.

        Raises:
            ValueError: a buffer is changed in a later stage than it is read in.
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
    """Return the specification by the names that captured graphs use: of a shared parameter the first.

    Raises:
        TypeError: it is neither a configuration nor a mapping to such.
        ValueError: the model has no parameter of a name.
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
    """Return whether one stage changes the buffer and later ones read it: they then get its value of that time."""
    writers = sorted({stage_of[writer] for writer in aliases.writers(node)})
    if not writers or writers == users:
        return False  # stages that all change it take turns
    if writers == users[:1]:
        return True
    raise ValueError(
        f"the buffer {node.target!r} is used by stages {users} and changed by {writers}: the next micro-batch would "
        "read it before this one has changed it. Move the stage boundaries so that one stage has all of its uses"
    )


class Aliases:
    """Which tensors the nodes of a graph change in place, and which are views of others, by the operators' schemas.

    The base of a view is the node whose tensor's memory it shares.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._bases: dict[fx.Node, fx.Node] = {}
        self._writers: dict[fx.Node, list[fx.Node]] = {}  # by base
        for node in graph.nodes:
            if (viewed := _viewed(node)) is not None:
                self._bases[node] = self.base(viewed)
            for written in _written(node):
                self._writers.setdefault(self.base(written), []).append(node)

    def base(self, node: fx.Node) -> fx.Node:
        """Return the node whose memory this one's tensor shares; itself for a tensor of its own."""
        return self._bases.get(node, node)

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that change its tensor, in their order."""
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
    """Return the argument whose memory the result of this node shares."""
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
    """Return the argument of a region that is its output ``number``, if one is; else the region."""
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
