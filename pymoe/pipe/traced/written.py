"""Graphs as plain data, for copies and pickles; what nodes know of their origin is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from pymoe.pipe.capture.graph import Region

__all__ = ["Written", "read", "write"]


class Written(NamedTuple):
    """A graph: its nodes in their order, and how many placeholders come first."""

    nodes: list[tuple[str, Any, Any, Any, str]]


class _Place(NamedTuple):
    """A node among the arguments of another."""

    number: int


class _Operator(NamedTuple):
    """An operator of torch, by its name."""

    namespace: str
    name: str
    overload: str


class _Region(NamedTuple):
    """A block with a state of its own."""

    name: str
    graph: Written
    grad: bool | None
    autocast: dict[str, Any] | None


def write(graph: fx.Graph) -> Written:
    """The graph as data."""
    places = {node: _Place(number) for number, node in enumerate(graph.nodes)}
    nodes = []
    for node in graph.nodes:
        args = fx.map_arg(node.args, places.__getitem__)  # type: ignore[arg-type]
        kwargs = fx.map_arg(node.kwargs, places.__getitem__)  # type: ignore[arg-type]
        nodes.append((node.op, _write_target(node.target), _plain(args), _plain(kwargs), node.name))
    return Written(nodes)


def read(written: Written) -> fx.Graph:
    """The graph of such data."""
    graph = fx.Graph()
    made: list[fx.Node] = []
    for op, target, args, kwargs, name in written.nodes:
        given, named = _with_nodes(args, made), _with_nodes(kwargs, made)
        made.append(graph.create_node(op, _read_target(target), tuple(given), named, name))
    return graph


def _write_target(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return _Operator(namespace, name, target._overloadname)
    if isinstance(target, Region):
        return _Region(target.__name__, write(target.graph.graph), target.grad, target.autocast)
    return target


def _read_target(target: Any) -> Any:
    if isinstance(target, _Operator):
        return getattr(getattr(getattr(torch.ops, target.namespace), target.name), target.overload)
    if isinstance(target, _Region):
        return Region(target.name, fx.GraphModule({}, read(target.graph)), target.grad, target.autocast)
    return target


def _plain(value: Any) -> Any:
    """Without the containers of fx."""
    if isinstance(value, _Place):
        return value
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    return value


def _with_nodes(value: Any, made: list[fx.Node]) -> Any:
    if isinstance(value, _Place):
        return made[value.number]
    if isinstance(value, tuple):
        return tuple(_with_nodes(item, made) for item in value)
    if isinstance(value, list):
        return [_with_nodes(item, made) for item in value]
    if isinstance(value, dict):
        return {key: _with_nodes(item, made) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*[_with_nodes(item, made) for item in (value.start, value.stop, value.step)])
    return value
