"""The stages of a captured model. The model is captured and split again for every mode.

The module of a stage contains graphs, and the model's own parameters and buffers under the names that they have in the
model.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from pymoe._torch_private import OpOverload, pytree
from pymoe.pipe.capture import Captured, capture
from pymoe.pipe.capture.arguments import Arguments, InputChecks, Like
from pymoe.pipe.capture.capture import CONSTANT, Region, all_nodes
from pymoe.pipe.capture.errors import stack_level
from pymoe.pipe.capture.guards import Guards
from pymoe.pipe.capture.opaque import Computed
from pymoe.pipe.execution.held_state import StageLock
from pymoe.pipe.loss import find_loss
from pymoe.pipe.stages import TENSORS, MicroBatches, Pipeline, Stage, StagedModel, Structure, Whole, place
from pymoe.pipe.traced.partition import (
    Partition,
    SharedState,
    Spec,
    StageGraph,
    by_first_name,
    compute_nodes,
    modules_as_arguments,
    partition,
    split_regions,
)
from pymoe.pipe.traced.split_points import SplitPoint, is_marker, mark, marked


class TracedModel(StagedModel):
    """A captured model, split at its markers.

    A capture is valid for the present modes of all modules (training or evaluation), their hooks, and the Python values
    that the model's code has read. When one of these changes, the next call uses an earlier capture that is valid, or
    captures the model again and splits it at the same boundaries; every capture is kept. ``args`` and ``kwargs`` are an
    example micro-batch; ``trace`` makes the captures.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trace: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Captured],
        multi_use: Spec,
        loss_spec: Any,
        devices: Sequence[torch.device | str | int] | None,
    ) -> None:
        self.module = module
        self.parts: tuple[StageModule, ...] = ()
        self.devices: tuple[torch.device | None, ...] = tuple(map(torch.device, devices or ()))
        self.loss_spec = loss_spec
        self._trace = trace
        self._multi_use = by_first_name(multi_use, module)
        self._variants: list[_Variant] = []
        self._changes = 0  # how often the model was captured again, not counting changes of modes
        self._uses: list[dict[str, None]] = []  # for each stage: the names of the state that any of its graphs uses
        self._constants: list[dict[str, torch.Tensor]] = []
        self._lacks_some = False
        self._is_chosen = False  # true from micro_batches() until the next read of `pipeline`
        self._one_at_a_time = StageLock()  # held by threads that make or choose captures
        first = trace(module, args, kwargs)
        self._now = self._add(first)
        if devices is None:
            self.devices = (None,) * len(self.parts)

    @property
    def pipeline(self) -> Pipeline:
        """Return the pipeline of the capture that is valid now; capture the model again if none is valid.

        The first read after :meth:`micro_batches` returns the pipeline for which the micro-batches were made.
        """
        is_chosen, self._is_chosen = self._is_chosen, False
        return self._now.pipeline if is_chosen else self._choose().pipeline

    @property
    def loss(self) -> int | None:
        return self._now.loss

    @property
    def has_loss(self) -> bool:
        return self.loss_spec is not None

    def micro_batches(
        self, chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any], others: Sequence[Any] = ()
    ) -> MicroBatches:
        """Choose the capture that is valid for a call, and split the call into micro-batches for that capture."""
        leaves = self._now.arguments.flatten(tuple(args), dict(kwargs))
        self._choose([leaf.value if isinstance(leaf, Whole) else leaf for leaf in leaves])
        made = super().micro_batches(chunks, args, kwargs, others)
        self._is_chosen = True
        return made

    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        leaves = self._now.arguments.flatten(tuple(args), dict(kwargs))
        self._now.input_checks.check(leaves)
        return leaves

    def unflatten_outputs(self, values: Sequence[Any]) -> Any:
        variant = self._now
        computed = iter(values)
        leaves = [next(computed) if leaf is Computed else leaf for leaf in variant.leaves]
        return pytree.tree_unflatten(leaves, variant.out_spec)

    def code(self, stage: int) -> str:
        return self.parts[stage].code(self._choose().number)

    def _choose(self, leaves: Sequence[Any] | None = None) -> _Variant:
        """Return the capture that is valid now, for ``leaves`` if given; make a new one if none is valid."""
        if self._structure.has_changed() or self._now.guards.broken(leaves) is not None:
            with self._one_at_a_time:
                self._structure.refuse_edited_stages()
                self._choose_another(leaves)
                self.present_parts()
        if self._now.structure is not self._structure:
            with self._one_at_a_time:  # build stages that run the modules that the model has now
                now = self._now
                pipeline = replace(now.pipeline, stages=self._stages(now.number, now.pipeline.stages))
                made = replace(now, pipeline=pipeline, structure=self._structure)
                self._now = self._variants[now.number] = made
        return self._now

    def present_parts(self) -> tuple[nn.Module, ...]:
        if self._structure.has_changed():
            self._structure.refuse_edited_stages()
            self._populate()
        return self.parts

    def _stages(self, number: int, cut: Sequence[Stage | StageGraph]) -> tuple[Stage, ...]:
        """Return the stages of capture ``number``, which run ``parts``, with inputs and outputs as in ``cut``."""
        functions = [partial(part.run, number) for part in self.parts]
        return self.stages_of(functions, [stage.inputs for stage in cut], [stage.outputs for stage in cut])

    def _choose_another(self, leaves: Sequence[Any] | None) -> None:
        change = self._now.guards.broken(leaves)
        if change is None:  # another thread has already chosen a valid capture
            return
        others = (variant for variant in self._variants if variant.guards.broken(leaves) is None)
        found = next(others, None)
        if found is None:
            self._warn_of(change)
            like = self._in_present_precision() if leaves is None else leaves
            args, kwargs = self._variants[0].arguments.example(like)
            found = self._add(self._trace(self.module, args, kwargs))
        elif self._lacks_some:
            self._populate()
        self._now = found

    def _in_present_precision(self) -> list[Any]:
        """Return the leaves of the current capture's example.

        If the model's only floating-point dtype has changed, tensors of the old dtype get the new one.
        """
        leaves, change = self._now.arguments.examples, self._now.guards.precision_change()
        if change is None:
            return leaves
        before, now = change
        return [x._replace(dtype=now) if isinstance(x, Like) and x.dtype == before else x for x in leaves]

    def _warn_of(self, change: str) -> None:
        """Count a new capture, unless it was caused by a change of modes; warn at the 8th, 16th, 32nd and so on."""
        if change != "the mode of a module":
            self._changes = count = self._changes + 1
            if count >= 8 and count & (count - 1) == 0:
                warnings.warn(
                    f"the model is captured again, for the {count}th time, because {change} has changed: every Python "
                    "value needs a capture of its own, which takes time and memory. Keep a value that changes often in "
                    "a buffer, or list its module in `opaque=`",
                    stacklevel=stack_level(),
                )

    def _add(self, captured: Captured) -> _Variant:
        """Split a new capture into stages, add it to the captures that are kept, and return it."""
        graph, number = captured.graph.graph, len(self._variants)
        modules_as_arguments(graph)
        parameters = frozenset(name for name, _ in self.module.named_parameters())
        state = SharedState(parameters, self._multi_use, apart=len(set(self.devices)) > 1)
        made = partition(graph, state, self.devices)
        self._check_number(len(made.stages))
        if not self.parts:
            self.parts = tuple(StageModule(stage) for stage in range(len(made.stages)))
            self._uses = [{} for _ in self.parts]
            self._constants = [{} for _ in self.parts]
        for stage, uses, constants in zip(made.stages, self._uses, self._constants, strict=True):
            for node in stage.graph.find_nodes(op="get_attr"):
                if str(node.target).startswith(CONSTANT):
                    name = f"{node.target}_{number}"
                    constants[name] = getattr(captured.graph, str(node.target))
                    node.target = name
            uses.update(dict.fromkeys(name for name in stage.state if not name.startswith(CONSTANT)))
        self._populate()
        for part, stage in zip(self.parts, made.stages, strict=True):
            part.add(stage.graph, captured.training)
            part.training = captured.training
        pipeline = Pipeline(self._stages(number, made.stages), len(captured.arguments.names), made.outputs)
        loss, guards = self._find_loss(captured, made), captured.guards(self.module)
        of_call = captured.arguments, captured.input_checks, guards, captured.out_spec, made.leaves
        variant = _Variant(number, *of_call, pipeline, loss, self._structure)
        self._variants.append(variant)
        return variant

    def _populate(self) -> None:
        """Give every stage the parts of the model that the stage uses in any capture, if the model still has them."""
        uses = [[name for name in of_stage if has(self.module, name)] for of_stage in self._uses]
        self._lacks_some = list(map(len, uses)) != list(map(len, self._uses))
        populate(self.parts, self.module, uses, self._constants)
        if devices := [device for device in self.devices if device is not None]:
            place(self.parts, devices)
            for part in self.parts:
                part.update_model()
        made = [pair for part in self.parts for pair in part.made]
        self._structure = Structure(self.module, self.parts, made)

    def _check_number(self, stages: int) -> None:
        if self.parts and stages != len(self.parts):
            raise ValueError(
                f"the model has {len(self.parts)} stages in one of its modes (training, evaluation), or with other "
                f"values of its attributes, and {stages} in another: its boundaries must be the same in all"
            )
        if self.devices and stages != len(self.devices):
            raise ValueError(f"Pipe: devices: expected one device per stage ({stages}), got {len(self.devices)}")

    def _find_loss(self, captured: Captured, made: Partition) -> int | None:
        if self.loss_spec is None:
            return None
        try:
            leaf = find_loss(self.loss_spec, captured.out_spec)
        except ValueError:
            if self._variants:
                return None  # not an error, as many models return a loss only in training
            raise
        if made.leaves[leaf] is not Computed:
            raise ValueError(f"output_loss_value_spec: expected a tensor as the loss, got {made.leaves[leaf]!r}")
        return sum(other is Computed for other in made.leaves[:leaf])


@dataclass(frozen=True, eq=False)
class _Variant:
    """One capture, split into stages."""

    number: int
    arguments: Arguments
    input_checks: InputChecks
    guards: Guards
    out_spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    pipeline: Pipeline
    loss: int | None
    structure: Structure
    """The structure for which ``pipeline`` was made."""


# Captures, cut at the same places in every mode.

SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]
Key = tuple[str, str, int]


@dataclass
class Trace:
    """Captures a model, with markers at its stage boundaries."""

    split_spec: Mapping[str, SplitPoint] | None
    split_policy: SplitPolicy | None
    dynamic_shapes: Any
    opaque: Sequence[type[nn.Module] | str]
    _chosen: list[list[Key]] | None = None
    """For each boundary of the policy, the keys of the nodes that follow it."""
    _wanted: int | None = None
    """The number of stages that the policy should make, if known."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """Capture the model in its present mode, with markers at the stage boundaries.

        Raises:
            CaptureError: the model cannot be captured.
            TypeError: the policy does not return a graph module.
            ValueError: a module that the specification names does not exist, or is not called.
        """
        spec = self.split_spec or {}
        module = marked(module, spec) if spec else module
        captured = capture(module, args, kwargs, dynamic_shapes=self.dynamic_shapes, opaque=self.opaque)
        split_regions(captured.graph.graph)
        if spec:  # Refuse modules that are never called: a split point there would make no boundary.
            stacks = [node.meta.get("nn_module_stack", {}) for node in all_nodes(captured.graph.graph)]
            called = {path for stack in stacks for path, _ in stack.values()}
            for name in spec:
                if name and name not in called:
                    raise ValueError(f"split_spec: the model's forward does not call {name!r}")
        if self._chosen is not None:
            nodes = compute_nodes(captured.graph.graph)
            node_of = dict(zip(_keys(nodes), nodes, strict=True))
            for keys in self._chosen:
                if node := next((node_of[key] for key in keys if key in node_of), None):
                    mark(captured.graph.graph, node)
        elif self.split_policy is not None:
            self._wanted = getattr(self.split_policy, "stages", None)
            changed = self.split_policy(captured.graph)
            if not isinstance(changed, fx.GraphModule):
                raise TypeError(
                    f"split_policy: expected a torch.fx.GraphModule as its result, got {type(changed).__name__}"
                )
            object.__setattr__(captured, "graph", changed)
            self._chosen = _boundaries(changed.graph)
            self.split_policy = None  # captures in other modes are split at the same places
        return captured

    def why_one_stage(self) -> str | None:
        """Return the reason why a model has only one stage although several were requested.

        Return None if there is no ``split_spec``, and no ``split_policy`` for several stages.
        """
        ends = "at the beginning or the end of what the model computes, where they make no stages"
        if self.split_spec:
            return f"all split points of split_spec ({', '.join(self.split_spec)}) are {ends}"
        if self._chosen is None or self._wanted == 1:
            return None
        if self._chosen:
            return f"all boundaries that split_policy has inserted are {ends}"
        return (
            "split_policy has inserted no boundary: pymoe.pipe.mark_boundary(node) inserts one before a node, and the "
            "policy returns the graph module in which it did so"
        )


def _keys(nodes: Sequence[fx.Node]) -> list[Key]:
    """Return keys by which the nodes can be found in other captures.

    A key consists of the node's module, its operator, and the number of earlier nodes with the same module and
    operator.
    """
    seen: Counter[tuple[str, str]] = Counter()
    keys = []
    for node in nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        pair = (stack[-1][0] if stack else "", str(node.target))
        keys.append((*pair, seen[pair]))
        seen[pair] += 1
    return keys


def _boundaries(graph: fx.Graph) -> list[list[Key]]:
    nodes = compute_nodes(graph)
    key_of = dict(zip(nodes, _keys(nodes), strict=True))
    found: list[list[Key]] = []
    for node in graph.nodes:
        if is_marker(node):
            found.append([])
        elif node in key_of:
            for after in found:
                after.append(key_of[node])
    return found


# The modules of stages.

# _Taken and _Made are classes because the search for the state of a stage (:mod:`pymoe.pipe.execution.held_values`)
# skips objects of pymoe's classes, but not plain tuples: through tuples, it would reach the whole model.


class _Taken(NamedTuple):
    """A parameter or buffer of the model's module ``owner`` that a stage also has in its own module ``where``."""

    where: nn.Module
    kind: str
    name: str
    owner: nn.Module


class _Made(NamedTuple):
    """A module made for a stage, and the module of the model that it represents there."""

    module: nn.Module
    original: nn.Module


class StageModule(nn.Module):
    """A stage of a traced model. It takes and returns boundary values, by position.

    It has one graph for every capture of the model. Modules that only this stage needs, or that it needs as a whole,
    are the model's own. Other modules of the model are represented by new modules with only the parts that this stage
    uses. The keys of ``state_dict`` are those of the model. ``compile()`` compiles the stage in place.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self._graphs: list[fx.GraphModule] = []
        self._compile: Callable[[nn.Module], None] | None = None
        self._modes: list[bool] = []
        self._shared: list[_Taken] = []  # run() fetches these from the model each time
        self.made: list[_Made] = []
        """This module and those inside it that do not belong to the model, each with the module that it represents."""

    def forward(self, *values: Any, variant: int | None = None) -> Sequence[Any]:
        """Return the stage's outputs, computed by graph number ``variant``.

        ``variant`` None: the latest graph that was captured in the present mode (training or evaluation); if there is
        none in this mode, the latest of all.
        """
        if variant is None:
            modes = [number for number, training in enumerate(self._modes) if training == self.training]
            variant = modes[-1] if modes else -1
        outputs: Sequence[Any] = self._graphs[variant](*values)
        return outputs

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile this stage's graphs, and those of later captures when they are made.

        Takes the arguments of ``torch.compile``.

        Each graph is compiled by itself: torch.compile gives up after compiling the same function 8 times, and would
        count the ``forward`` of all stages as one function.
        """
        self._compile = lambda graph: graph.compile(*args, **kwargs)
        for graph in self._graphs:
            self._compile(graph)

    def add(self, graph: fx.Graph, training: bool) -> None:
        self._graphs.append(self._graph_module(graph))
        if self._compile is not None:
            self._compile(self._graphs[-1])
        self._modes.append(training)

    def code(self, variant: int = -1) -> str:
        return str(self._graphs[variant].print_readable(print_output=False))

    def run(self, variant: int, *values: Any) -> Sequence[Any]:
        """Run graph number ``variant`` with the parameters and buffers that the model has now."""
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
        """Replace this stage's state with ``constants`` and the parts of ``model`` that ``paths`` names.

        ``users``: the stages that use each tensor, by the tensor's id.
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
            for name, child in original._modules.items():  # keeps the order of the model's modules
                if name not in below or child is None:
                    continue
                uses_all = all(self in users.get(id(tensor), {self}) for tensor in _tensors(child))
                if [] in below[name] or uses_all:  # the child is needed as a whole, or by no other stage
                    where._modules[name] = child
                else:
                    where._modules[name] = holder = nn.Module()
                    self.made.append(_Made(holder, child))
                    holder.training = child.training
                    hold(holder, child, below[name])

        for kind in (*TENSORS, "_modules"):
            self.__dict__[kind].clear()
        self._shared = []
        self.made = [_Made(self, model)]
        for name, constant in constants.items():
            self.register_buffer(name, constant, persistent=False)
        hold(self, model, paths)

    def update_model(self) -> None:
        """Give the model the parameters and buffers of modules made for this stage, after a move to another device."""
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
        for kind in (*TENSORS, "_modules"):
            module.__dict__[kind] = self.__dict__[kind]
        module.graph = graph
        return module


def populate(
    parts: Sequence[StageModule],
    model: nn.Module,
    names: Sequence[Iterable[str]],
    constants: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Replace the state of every stage with its constants and the parts of the model that ``names`` lists for it."""
    users: dict[int, set[StageModule]] = {}  # the stages that use each tensor, by the tensor's id
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
    return module is not None and any(module.__dict__[kind].get(last) is not None for kind in (*TENSORS, "_modules"))


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _own(module: nn.Module, name: str) -> torch.Tensor | None:
    return module._parameters[name] if name in module._parameters else module._buffers[name]


class _NodeRef(int):
    """A node's number in the graph; represents this node among the arguments of other nodes."""


class _OperatorName(str):
    """Stands for an operator of torch: its name in ``torch.ops``."""


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
