"""A captured model as one graph, made from what ``torch.export`` makes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pymoe._torch_private import pytree
from pymoe.pipe.capture.arguments import Arguments, Like
from pymoe.pipe.capture.entry import MODEL, Entry
from pymoe.pipe.capture.guards import Guards
from pymoe.pipe.capture.input_checks import Condition, InputChecks, Leaf, conditions_asked, sizes_of
from pymoe.pipe.capture.interception import OPAQUE_CALL
from pymoe.pipe.capture.opaque import Computed, OpaqueCall, OpaqueModule

__all__ = ["CONSTANT", "Captured", "Region", "all_nodes", "captured_graph", "opaque_modules"]

CONSTANT = "_constant_"
"""The prefix of tensors that are not parameters or buffers of the model."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A model as one graph, in one of its modes (training, evaluation).

    The nodes of ``graph``, in this order of kinds:

    - a ``placeholder`` for every leaf of ``(args, kwargs)``, also for those that are not tensors: these are constants
      of the capture and have no users;
    - ``get_attr`` of parameters and buffers by their qualified names in the model (shared ones under one name), of
      ``_constant_N`` for other tensors that the model's code holds;
    - ``call_function``: operators, arithmetic on sizes, blocks with a state of their own (a ``Region``), and opaque
      calls (``OpaqueCall``); the last three return lists;
    - one ``output`` with the list of output leaves.

    The graph module looks parameters and buffers up in the model's own modules: what the model gets in their place,
    by ``load_state_dict(assign=True)`` or ``.to()``, the graph sees.

    A node's ``meta`` holds ``val`` (a fake tensor or number), ``stack_trace`` and ``nn_module_stack``.
    """

    graph: fx.GraphModule
    arguments: Arguments
    out_spec: pytree.TreeSpec
    training: bool
    modes: tuple[bool, ...]
    """``training`` of every module of the model, in the order of ``modules()``: the graph holds for these."""
    names: dict[str, str]
    """What the user calls the parameters and buffers of the graph."""
    input_checks: InputChecks
    guards: Guards
    """What the capture assumes about Python."""

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the leaves of a call. Arguments may be given by name or position; those that equal their defaults may
        be omitted.

        Raises:
            TypeError: the call's signature differs from the captured one.
        """
        return self.arguments.flatten(args, kwargs)

    def check(self, leaves: Sequence[Any]) -> None:
        """Check that a call fits. Dimensions that the model leaves free may have any size; dtypes any precision.

        Raises:
            ValueError: it does not; the message names argument and dimension.
        """
        self.input_checks.check(leaves)


class Region:
    """The target of a node that stands for a block that runs without gradients, or in autocast: the block's graph, run
    in that state. Returns a list.
    """

    def __init__(self, name: str, graph: fx.GraphModule, grad: bool | None, autocast: dict[str, Any] | None) -> None:
        self.__name__ = name
        self.graph = graph
        self.grad = grad
        """Whether gradients are recorded in the block; None: as outside."""
        self.autocast = autocast
        """Arguments of ``torch.autocast`` for the block; None: as outside."""

    def __call__(self, *values: Any) -> list[Any]:
        if self.autocast is not None:
            with torch.autocast(**self.autocast):
                return list(self.graph(*values))
        with torch.set_grad_enabled(torch.is_grad_enabled() if self.grad is None else self.grad):
            return list(self.graph(*values))

    def __repr__(self) -> str:
        return f"{self.__name__}({self.autocast or {'grad': self.grad}})"


def all_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield all nodes, also those within regions."""
    for node in graph.nodes:
        yield node
        if isinstance(node.target, Region):
            yield from all_nodes(node.target.graph.graph)


def opaque_modules(graph: fx.Graph) -> list[OpaqueModule]:
    """Return the modules that a graph calls, call by call."""
    return [node.target for node in all_nodes(graph) if isinstance(node.target, OpaqueModule)]


def captured_graph(program: Any, entry: Entry, model: nn.Module, arguments: Arguments, guards: Guards) -> Captured:
    """Return the captured model from the exported program of ``entry``, which calls ``model``."""
    builder = _Builder(program, entry, model, arguments)
    graph = builder.build()
    assert entry.output.spec is not None
    return Captured(
        graph=_on_model(graph, model, builder.constants),
        arguments=arguments,
        out_spec=entry.output.spec,
        training=model.training,
        modes=tuple(module.training for module in model.modules()),
        names={target: _in_users_words(target) for target in builder.state if target not in builder.constants},
        input_checks=builder.input_checks(),
        guards=guards,
    )


class _Builder:
    def __init__(self, program: Any, entry: Entry, model: nn.Module, arguments: Arguments) -> None:
        self._program = program
        self._source: fx.GraphModule = program.graph_module
        self._entry = entry
        self._model = model
        self._arguments = arguments
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._inputs: dict[int, fx.Node] = {}  # by leaf, placeholders of the exported graph
        self.constants: dict[str, Tensor] = {}
        self.state: dict[str, fx.Node] = {}
        # Shared parameters and buffers go by their first name.
        self._first_name: dict[int, str] = {}
        for named in (model.named_parameters(), model.named_buffers()):
            for name, value in named:
                self._first_name.setdefault(id(value), name)

    def build(self) -> fx.Graph:
        placeholders = self._source.graph.find_nodes(op="placeholder")
        inputs = list(zip(placeholders, self._program.graph_signature.input_specs, strict=True))
        tensors = iter([node for node, spec in inputs if spec.kind.name == "USER_INPUT"])
        for number, (name, leaf) in enumerate(zip(self._arguments.names, self._arguments.examples, strict=True)):
            placeholder = self._graph.placeholder(re.sub(r"\W+", "_", name).strip("_") or "argument")
            placeholder.meta["val"] = leaf
            if isinstance(leaf, Like):
                exported = self._inputs[number] = next(tensors)
                placeholder.meta["val"] = exported.meta["val"]
                self._copies[exported] = placeholder
        for node, spec in inputs:
            if spec.kind.name != "USER_INPUT" and node.users:
                self._copies[node] = self._state_node(node, spec)
        for node in self._source.graph.nodes:
            if node.op == "output":
                self._output(node)
            elif node.op == "call_function":
                self._copies[node] = self._call(node)
        return self._graph

    def input_checks(self) -> InputChecks:
        leaves = []
        for number, (name, example) in enumerate(zip(self._arguments.names, self._arguments.examples, strict=True)):
            if isinstance(example, Like):
                leaves.append(Leaf(name, None, sizes_of(self._inputs[number]), example.dtype))
            else:
                leaves.append(Leaf(name, example))
        conditions, fixed = self._conditions()
        lower: dict[Any, int] = {}
        upper: dict[Any, int] = {}
        for symbol, limits in self._program.range_constraints.items():
            if limits.lower > 2:  # where operators ask about 0 and 1, 2 is what is left
                lower[symbol] = int(limits.lower)
            if limits.upper.is_number and limits.upper < 2**40:
                upper[symbol] = int(limits.upper)
        return InputChecks(tuple(leaves), conditions, lower, upper, fixed)

    def _conditions(self) -> tuple[tuple[Condition, ...], dict[Any, str]]:
        """Return what the graph requires of free sizes, and the lines that fixed others."""
        environment = next((_shape_env(node) for node in self._inputs.values() if _shape_env(node)), None)
        if environment is None:
            return (), {}
        conditions: dict[Any, Condition] = {}
        fixed: dict[str, str] = {}
        for expression, place in conditions_asked(environment):
            now = environment.replace(expression)
            if getattr(now, "free_symbols", None):
                conditions.setdefault(now, Condition(now, place))
            elif place:
                for symbol in expression.free_symbols:
                    fixed.setdefault(str(symbol), place)
        return tuple(conditions.values()), self._lines_by_dimension(environment, fixed)

    def _lines_by_dimension(self, environment: Any, by_symbol: dict[str, str]) -> dict[Any, str]:
        found = {}
        for tensor, (number, node) in enumerate(self._inputs.items()):
            for dim in range(node.meta["val"].dim()):
                source = f"[{tensor}].size()[{dim}]"
                for symbol, sources in environment.var_to_sources.items():
                    if str(symbol) in by_symbol and any(_name(each).endswith(source) for each in sources):
                        found[number, dim] = by_symbol[str(symbol)]
        return found

    def _state_node(self, node: fx.Node, spec: Any) -> fx.Node:
        target = self._target(spec)
        if target not in self.state:
            self.state[target] = self._graph.get_attr(target)
            self.state[target].meta["val"] = node.meta.get("val")
        return self.state[target]

    def _target(self, spec: Any) -> str:
        name = spec.target.removeprefix(f"{MODEL}.")
        if spec.kind.name == "PARAMETER":
            return self._first_name[id(self._model.get_parameter(name))]
        if spec.kind.name == "BUFFER":
            return self._first_name[id(self._model.get_buffer(name))]
        value = self._program.constants[spec.target]
        held = self._entry.output.held.get(value.data_ptr()) if isinstance(value, Tensor) else None
        if held is not None and held.shape == value.shape and held.dtype == value.dtype:
            value = held
        if id(value) in self._first_name:
            return self._first_name[id(value)]
        for target, known in self.constants.items():
            if known is value:
                return target
        target = f"{CONSTANT}{len(self.constants)}"
        self.constants[target] = value
        return target

    def _call(self, node: fx.Node) -> fx.Node:
        found = _call_of(node, self._source, self._entry.output.calls)
        target, args, kwargs = (node.target, node.args, node.kwargs) if found is None else (*found, {})
        known = self._copies.__getitem__
        copy = self._graph.create_node(
            "call_function", target, fx.map_arg(args, known), fx.map_arg(kwargs, known), node.name
        )
        copy.meta = _users_meta(node)
        return copy

    def _output(self, node: fx.Node) -> None:
        values: Any = fx.map_arg(node.args[0], self._copies.__getitem__)
        computed = iter(values)
        self._graph.output([next(computed) if leaf is Computed else leaf for leaf in self._entry.output.leaves])


def _shape_env(node: fx.Node) -> Any:
    value = node.meta.get("val")
    mode = getattr(value, "fake_mode", None)
    return None if mode is None else mode.shape_env


def _name(source: Any) -> str:
    return source.name() if callable(source.name) else source.name


def _in_users_words(target: str) -> str:
    """Return the name of the weight for a parametrized weight."""
    return re.sub(r"parametrizations\.(\w+)\.original\d*", r"\1", target)


def _call_of(node: fx.Node, owner: fx.GraphModule, calls: Sequence[OpaqueCall]) -> tuple[Any, tuple[Any, ...]] | None:
    """Return what a node of an exported graph calls, and with which values, if it is a region or an opaque call."""
    hop = torch.ops.higher_order
    if node.target is OPAQUE_CALL:
        number, *values = node.args
        assert isinstance(number, int)
        return calls[number], tuple(values)
    if node.target is hop.wrap_with_set_grad_enabled:
        grad, block, *values = node.args
        return Region("grad" if grad else "no_grad", _graph(block, owner, calls), bool(grad), None), tuple(values)
    if node.target is hop.wrap_with_autocast:
        device, dtype, enabled, cache, block, *values = node.args
        autocast = {"device_type": device, "dtype": dtype, "enabled": enabled, "cache_enabled": cache}
        return Region("autocast", _graph(block, owner, calls), None, autocast), tuple(values)
    return None


def _graph(block: Any, owner: fx.GraphModule, calls: Sequence[OpaqueCall]) -> fx.GraphModule:
    """Return the graph of a block, with regions and opaque calls in it."""
    module = getattr(owner, block.target)
    assert isinstance(module, fx.GraphModule)
    for node in list(module.graph.nodes):
        if (found := _call_of(node, module, calls)) is not None:
            with module.graph.inserting_before(node):
                call = module.graph.call_function(*found)
            call.meta = node.meta
            node.replace_all_uses_with(call)
            module.graph.erase_node(node)
    for node in list(module.graph.nodes):
        node.meta = _users_meta(node)
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return module


def _users_meta(node: fx.Node) -> dict[str, Any]:
    """Return what an exported graph knows of a node, as the model names the modules around it."""
    meta = {key: value for key, value in node.meta.items() if key not in ("from_node", "custom")}
    if "nn_module_stack" in meta:
        meta["nn_module_stack"] = {
            key: (path[len(MODEL) + 1 :], kind)
            for key, (path, kind) in meta["nn_module_stack"].items()
            if path == MODEL or path.startswith(f"{MODEL}.")
        }
    return meta


def _on_model(graph: fx.Graph, model: nn.Module, constants: dict[str, Tensor]) -> fx.GraphModule:
    """Return the module of ``graph``, in which ``get_attr`` names a parameter or buffer of ``model``, or one of
    ``constants``.

    It holds no parameters itself: its modules share the dictionaries of the model's, so that it sees every parameter
    and buffer that the model gets. Opaque modules are in it themselves. Its ``state_dict`` has the keys of the model's,
    for all of the modules that the graph uses.
    """
    targets = [node.target for node in graph.nodes if node.op == "get_attr"]
    root = nn.Module()
    _share(root, model)
    for call in opaque_modules(graph):
        _add_module(root, model, call.path, call.module)
    for path in _owners(target for target in targets if isinstance(target, str) and target not in constants):
        _add_path(root, model, path)
    for target in targets:
        if isinstance(target, str) and target in constants:
            # Not a buffer: it would be added to the model's.
            root.__dict__[target] = constants[target]
    module = fx.GraphModule(nn.Module(), fx.Graph(), "Captured")
    module.__dict__.update({key: root.__dict__[key] for key in _STATE})
    module.__dict__["_modules"] = root._modules
    module.__dict__.update({target: root.__dict__[target] for target in constants if target in root.__dict__})
    module.graph = graph
    return module


_STATE = ("_parameters", "_buffers", "_non_persistent_buffers_set")


def _owners(targets: Iterable[str]) -> list[str]:
    """Return the modules whose attributes these are, by qualified name, each once."""
    return list(dict.fromkeys(target.rpartition(".")[0] for target in targets))


def _add_module(root: nn.Module, model: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    _add_path(root, model, owner)
    if name:
        root.get_submodule(owner)._modules[name] = module


def _add_path(root: nn.Module, model: nn.Module, path: str) -> None:
    here, original = root, model
    for name in path.split(".") if path else []:
        if here is original:  # an opaque module, which is here itself
            return
        original = original.get_submodule(name)
        if name not in here._modules:
            part = nn.Module()
            _share(part, original)
            here._modules[name] = part
        step = here._modules[name]
        assert step is not None
        here = step


def _share(part: nn.Module, original: nn.Module) -> None:
    for key in _STATE:
        part.__dict__[key] = original.__dict__[key]
    part.training = original.training
