"""From what ``torch.export`` makes to the graph of a :class:`Captured`."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, fx, nn

from pymoe.pipe.capture.arguments import Arguments, Like
from pymoe.pipe.capture.captured import Captured
from pymoe.pipe.capture.entry import MODEL, Computed, Entry
from pymoe.pipe.capture.fits import Condition, Fits, Leaf, sizes_of
from pymoe.pipe.capture.guards import Guards
from pymoe.pipe.capture.own_state import on_model
from pymoe.pipe.capture.region import call_of, users_meta
from pymoe.pipe.capture.watch import asked_at

__all__ = ["rebuilt"]


def rebuilt(program: Any, entry: Entry, model: nn.Module, arguments: Arguments, guards: Guards) -> Captured:
    """The captured model from the exported program of ``entry``, which calls ``model``."""
    builder = _Builder(program, entry, model, arguments)
    graph = builder.build()
    assert entry.output.spec is not None
    return Captured(
        graph=on_model(graph, model, builder.constants),
        arguments=arguments,
        out_spec=entry.output.spec,
        training=model.training,
        modes=tuple(module.training for module in model.modules()),
        names={target: _in_users_words(target) for target in builder.state if target not in builder.constants},
        fits=builder.fits(),
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
        signature = self._program.graph_signature
        placeholders = [node for node in self._source.graph.nodes if node.op == "placeholder"]
        state: list[tuple[fx.Node, Any]] = []
        tensors = []
        for node, spec in zip(placeholders, signature.input_specs, strict=True):
            if spec.kind.name == "USER_INPUT":
                tensors.append(node)
            else:
                state.append((node, spec))
        waiting = iter(tensors)
        for number, (name, leaf) in enumerate(zip(self._arguments.names, self._arguments.examples, strict=True)):
            placeholder = self._graph.placeholder(re.sub(r"\W+", "_", name).strip("_") or "argument")
            placeholder.meta["val"] = leaf
            if isinstance(leaf, Like):
                exported = self._inputs[number] = next(waiting)
                placeholder.meta["val"] = exported.meta["val"]
                self._copies[exported] = placeholder
        for node, spec in state:
            if node.users:
                self._copies[node] = self._state_node(node, spec)
        for node in self._source.graph.nodes:
            if node.op == "output":
                self._output(node)
            elif node.op == "call_function":
                self._copies[node] = self._call(node)
        return self._graph

    def fits(self) -> Fits:
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
        return Fits(tuple(leaves), conditions, lower, upper, fixed)

    def _conditions(self) -> tuple[tuple[Condition, ...], dict[Any, str]]:
        """What the graph takes for granted about free sizes; and the lines that fixed others."""
        environment = next((_shape_env(node) for node in self._inputs.values() if _shape_env(node)), None)
        if environment is None:
            return (), {}
        conditions: dict[Any, Condition] = {}
        fixed: dict[str, str] = {}
        for expression, place in asked_at(environment):
            now = environment.replace(expression)
            if getattr(now, "free_symbols", None):
                conditions.setdefault(now, Condition(now, place))
            elif place:
                for symbol in expression.free_symbols:
                    fixed.setdefault(str(symbol), place)
        return tuple(conditions.values()), self._lines_by_dimension(environment, fixed)

    def _lines_by_dimension(self, environment: Any, by_symbol: dict[str, str]) -> dict[Any, str]:
        numbers = list(self._inputs)
        found = {}
        for tensor, number in enumerate(numbers):
            for dim in range(self._inputs[number].meta["val"].dim()):
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
        target = f"_constant_{len(self.constants)}"
        self.constants[target] = value
        return target

    def _call(self, node: fx.Node) -> fx.Node:
        found = call_of(node, self._source, self._entry.output.calls)
        target, args, kwargs = (node.target, node.args, node.kwargs) if found is None else (*found, {})
        copy = self._graph.create_node(
            "call_function",
            target,
            fx.map_arg(args, self._copies.__getitem__),
            fx.map_arg(kwargs, self._copies.__getitem__),
            node.name,
        )
        copy.meta = users_meta(node)
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
    """A parametrized weight goes by the name of the weight."""
    return re.sub(r"parametrizations\.(\w+)\.original\d*", r"\1", target)
