"""The module of a traced model's stage: it holds graphs, and the model's own parameters and buffers under their names.
Also converts graphs to plain data, for copies and pickles.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from pymoe._torch_private import OpOverload
from pymoe.pipe.capture.capture import Region

_KINDS = ("_parameters", "_buffers")


class _Taken(NamedTuple):
    """A parameter or buffer that the stage holds in one place and the model in another."""

    where: nn.Module
    kind: str
    name: str
    owner: nn.Module


class _Made(NamedTuple):
    """A module that represents a module of the model."""

    module: nn.Module
    original: nn.Module


class StageModule(nn.Module):
    """A stage of a traced model. It takes and returns boundary values, by position.

    It has a graph for every capture of the model. Modules that only this stage needs, or that it needs as a whole, are
    the model's own. Other modules are represented by modules that hold the parts which this stage uses. ``state_dict``
    keys are the model's. ``compile()`` compiles it in place.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self._graphs: list[fx.GraphModule] = []
        self._compile: Callable[[nn.Module], None] | None = None
        self._modes: list[bool] = []
        self._shared: list[_Taken] = []  # every call takes the model's present object
        self.made: list[_Made] = []
        """This module and those inside it that do not belong to the model, each with the module that it represents."""

    def forward(self, *values: Any, variant: int | None = None) -> Sequence[Any]:
        """Return the values of the stage's outputs. ``variant``: the number of the graph; None: the latest graph for
        the present mode.
        """
        if variant is None:
            modes = [number for number, training in enumerate(self._modes) if training == self.training]
            variant = modes[-1] if modes else -1
        outputs: Sequence[Any] = self._graphs[variant](*values)
        return outputs

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile this stage's graphs, and the graphs of later captures, too. Takes the arguments of ``torch.compile``.

        Each graph is compiled by itself: torch.compile gives up after compiling the same function 8 times, and would
        count the ``forward`` of all stages as one function.
        """
        self._compile = lambda graph: graph.compile(*args, **kwargs)
        for graph in self._graphs:
            self._compile(graph)

    def add(self, graph: fx.Graph, training: bool) -> None:
        """Add the graph of one more capture."""
        self._graphs.append(self._graph_module(graph))
        if self._compile is not None:
            self._compile(self._graphs[-1])
        self._modes.append(training)

    def code(self, variant: int = -1) -> str:
        """Return the graph of one capture as Python code."""
        return str(self._graphs[variant].print_readable(print_output=False))

    def run(self, variant: int, *values: Any) -> Sequence[Any]:
        """Run a graph with the model's present parameters and buffers."""
        for where, kind, name, owner in self._shared:
            where.__dict__[kind][name] = owner.__dict__[kind][name]
        outputs: Sequence[Any] = self(*values, variant=variant)
        return outputs

    def take(
        self,
        model: nn.Module,
        paths: Sequence[Sequence[str]],
        users: Mapping[int, set[StageModule]],
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        """Take the objects that ``paths`` name in the model, and the constants. ``users``: the stages of parameters and
        buffers.
        """

        def hold(where: nn.Module, original: nn.Module, paths: Sequence[Sequence[str]]) -> None:
            below: dict[str, list[Sequence[str]]] = {}
            for name, *rest in paths:
                if name in original._modules:
                    below.setdefault(name, []).append(rest)
                    continue
                kind = "_parameters" if name in original._parameters else "_buffers"
                where.__dict__[kind][name] = original.__dict__[kind][name]
                if name in original._non_persistent_buffers_set:
                    where._non_persistent_buffers_set.add(name)
                self._shared.append(_Taken(where, kind, name, original))
            for name, child in original._modules.items():  # in the model's order
                if name not in below or child is None:
                    continue
                uses_all = all(self in users.get(id(tensor), {self}) for tensor in _tensors(child))
                if [] in below[name] or uses_all:  # needed as a whole, or by no other stage
                    where._modules[name] = child
                else:
                    where._modules[name] = holder = nn.Module()
                    self.made.append(_Made(holder, child))
                    holder.training = child.training
                    hold(holder, child, below[name])

        for kind in (*_KINDS, "_modules"):
            self.__dict__[kind].clear()
        self._shared = []
        self.made = [_Made(self, model)]
        for name, constant in constants.items():
            self.register_buffer(name, constant, persistent=False)
        hold(self, model, paths)

    def update_model(self) -> None:
        """Give the model the objects that have replaced its own in a move to another device."""
        for where, kind, name, owner in self._shared:
            owner.__dict__[kind][name] = where.__dict__[kind][name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_graphs": [serialize(graph.graph) for graph in self._graphs], "_compile": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._graphs = [self._graph_module(deserialize(graph)) for graph in state["_graphs"]]

    def _graph_module(self, graph: fx.Graph) -> fx.GraphModule:
        """Return a graph module with this module's parameters, buffers and submodules."""
        module = fx.GraphModule(nn.Module(), fx.Graph(), f"Stage{self._number}")
        for kind in (*_KINDS, "_modules"):
            module.__dict__[kind] = self.__dict__[kind]
        module.graph = graph
        return module


def populate(
    parts: Sequence[StageModule],
    model: nn.Module,
    names: Sequence[Iterable[str]],
    constants: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Give every stage its constants, and the parameters, buffers and whole modules that ``names`` lists for it, in
    place of what it held.
    """
    users: dict[int, set[StageModule]] = {}  # stages, keyed by the ids of parameters and buffers
    for part, of_stage in zip(parts, names, strict=True):
        for name in of_stage:
            owner, _, last = name.rpartition(".")
            around = model.get_submodule(owner)
            whole = around._modules.get(last)
            for tensor in [_own(around, last)] if whole is None else _tensors(whole):
                users.setdefault(id(tensor), set()).add(part)
    for part, of_stage, own in zip(parts, names, constants, strict=True):
        part.take(model, [name.split(".") for name in of_stage], users, own)


def has(model: nn.Module, name: str) -> bool:
    """Return whether a model has a parameter, buffer or module of this qualified name."""
    module: nn.Module | None = model
    *path, last = name.split(".")
    for step in path:
        module = None if module is None else module._modules.get(step)
    return module is not None and any(module.__dict__[kind].get(last) is not None for kind in (*_KINDS, "_modules"))


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _own(module: nn.Module, name: str) -> torch.Tensor | None:
    return module._parameters[name] if name in module._parameters else module._buffers[name]


class _NodeRef(int):
    """A node among the arguments of another node, by its number."""


class _OperatorName(str):
    """An operator of torch, by its name in ``torch.ops``."""


def serialize(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Return a graph as data that can be pickled and copied, without the metadata of nodes.

    For every node: kind, target, arguments, keywords and name.
    """
    ref = {node: _NodeRef(number) for number, node in enumerate(graph.nodes)}.__getitem__
    nodes = []
    for node in graph.nodes:
        target: Any = node.target
        if isinstance(target, OpOverload):
            target = _OperatorName(target)
        elif isinstance(target, Region):
            target = target.__name__, serialize(target.graph.graph), target.grad, target.autocast
        args, kwargs = (fx.map_arg(arguments, ref) for arguments in (node.args, node.kwargs))  # type: ignore[arg-type]
        nodes.append((node.op, target, args, kwargs, node.name))
    return nodes


def deserialize(nodes: list[tuple[Any, ...]]) -> fx.Graph:
    """Return the graph made from data that :func:`serialize` has returned."""
    graph = fx.Graph()
    made: list[fx.Node] = []

    def node_of(value: Any) -> Any:
        return made[value] if isinstance(value, _NodeRef) else value

    for op, target, args, kwargs, name in nodes:
        if isinstance(target, _OperatorName):
            target = operator.attrgetter(target)(torch.ops)
        elif isinstance(target, tuple):
            region, inner, grad, autocast = target
            target = Region(region, fx.GraphModule({}, deserialize(inner)), grad, autocast)
        args, kwargs = fx.node.map_aggregate(args, node_of), fx.node.map_aggregate(kwargs, node_of)
        made.append(graph.create_node(op, target, args, kwargs, name))
    return graph
