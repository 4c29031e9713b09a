"""A pipeline: stages, which are functions, and edges from their outputs to their inputs.

:class:`StagedModel` is a model that was cut into stages, as a ``Pipe`` runs it, in one process or across several.
:class:`Structure` notices when layers of the model have changed since its pipeline was made. Mini-batches are cut into
micro-batches here, and their outputs joined.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from pymoe._common.checks import usable_device
from pymoe._torch_private import pytree
from pymoe.pipe.context import with_auxiliary_losses

INPUT = -1


class Source(NamedTuple):
    """The origin of a value: an output of a stage or, if the stage is ``INPUT``, an input of the pipeline."""

    stage: int
    number: int


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of a model, as a function of values: tensors, nested structures of tensors, or any other objects."""

    function: Callable[..., Sequence[Any]]
    """Takes the values of ``inputs`` and returns ``outputs`` values."""
    inputs: tuple[Source, ...]
    outputs: int
    modules: tuple[nn.Module, ...] = ()
    """The modules whose parameters and buffers the function uses."""
    device: torch.device | None = None
    """The device to which the stage's inputs are moved; None: they stay where they are."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Stages in an order in which they can run: each takes inputs of the pipeline and outputs of earlier stages."""

    stages: tuple[Stage, ...]
    inputs: int
    """The number of values that the pipeline takes."""
    outputs: tuple[Source, ...]
    """The values that the pipeline returns."""

    @cached_property
    def uses(self) -> Mapping[Source, int]:
        """Return how often every value is used: once per time that a stage takes it, and once if it is an output."""
        uses = Counter(source for stage in self.stages for source in stage.inputs)
        uses.update(set(self.outputs))
        return uses

    @cached_property
    def made(self) -> tuple[tuple[Source, ...], ...]:
        """Return, for every stage, a :class:`Source` for each of its outputs."""
        return tuple(
            tuple(Source(number, output) for output in range(stage.outputs)) for number, stage in enumerate(self.stages)
        )


Function = Callable[..., Sequence[Any]]
Call = tuple[Sequence[Any], dict[str, Any]]


# Models that were cut into stages.


class StagedModel(ABC):
    """A pipeline, and the conversion between calls of the model and the pipeline's input and output values.

    A copy (``copy.deepcopy``, ``pickle``) runs its own copies of the modules.
    """

    module: nn.Module
    """The model, which determines the names of parameters and buffers."""
    parts: tuple[nn.Module, ...]
    """The modules of the stages, whose parameters and buffers are the model's own."""
    devices: tuple[torch.device | None, ...]
    """The devices of the stages; None for stages that stay where the model was."""

    loss_spec: Any = None
    """Where the loss is in the model's output, as given by the user; None if not given."""
    hooks_are_pipes = False
    """True if a call of the pipe must run the hooks of ``module``, because nothing else runs them."""

    @property
    @abstractmethod
    def pipeline(self) -> Pipeline:
        """Return the stages and edges of the model in its present mode, with its present layers.

        Raises:
            RuntimeError: layers of the model have changed, and its stages do not fit them.
        """

    @property
    def loss(self) -> int | None:
        """Return the index of the loss among the pipeline's outputs; None if no output is known to be a loss."""
        return None

    @abstractmethod
    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the values of the pipeline's inputs for a call of the model with one micro-batch.

        Raises:
            TypeError: the model does not take these arguments.
            ValueError: an argument has a shape or a value that does not fit.
        """

    @abstractmethod
    def unflatten_outputs(self, values: Sequence[Any]) -> Any:
        """Return the model's output, composed of the pipeline's output values."""

    def present_parts(self) -> tuple[nn.Module, ...]:
        """Return ``parts``, with the layers that the model has now.

        Raises:
            RuntimeError: layers of the model have changed, and its stages do not fit them.
        """
        return self.parts

    def stages_of(
        self, functions: Iterable[Function], inputs: Iterable[tuple[Source, ...]], outputs: Iterable[int]
    ) -> tuple[Stage, ...]:
        """Return a stage for every part. It runs the part's function, and weights the auxiliary losses in the part."""
        weighted = [with_auxiliary_losses(function, part) for function, part in zip(functions, self.parts, strict=True)]
        devices = self.devices or (None,) * len(self.parts)
        return tuple(
            Stage(function, sources, count, (part,), device)
            for function, sources, count, part, device in zip(
                weighted, inputs, outputs, self.parts, devices, strict=True
            )
        )

    def micro_batches(
        self, chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any], others: Sequence[Any] = ()
    ) -> MicroBatches:
        """Cut the arguments of a call of the model into micro-batches. The values of a micro-batch are the pipeline's
        inputs, followed by its parts of ``others``.
        """
        parts = split((*args, *kwargs.values(), *others), chunks)
        last = len(args) + len(kwargs)
        values = [[*self.flatten_inputs(*_call(part, args, kwargs)), *part[last:]] for part in parts.values]
        return MicroBatches(values, parts.rows)

    def arguments(self, chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
        """Return the arguments with which the model would be called for every micro-batch."""
        return [_call(part, args, kwargs) for part in split((*args, *kwargs.values()), chunks).values]

    def output(self, outputs: Sequence[Sequence[Any]], weights: Sequence[float]) -> Any:
        """Return the output of a mini-batch, from the outputs and weights of its micro-batches."""
        loss = self.loss
        columns = enumerate(zip(*outputs, strict=True))
        return self.unflatten_outputs(
            [mean(column, weights) if number == loss else join(column) for number, column in columns]
        )

    def minimised(self, values: Sequence[Any]) -> Any:
        """Return the value that a step without a loss function minimises: the model's own loss, or its output."""
        loss = self.loss
        return self.unflatten_outputs(values) if loss is None else values[loss]

    @property
    def has_loss(self) -> bool:
        """Return whether the model computes a loss that a training step minimises."""
        return False

    def code(self, stage: int) -> str:
        """Return a readable text that shows what a stage does."""
        return f"# stage {stage}\n{self.parts[stage]!r}"

    def extra_repr(self) -> str:
        """Return how the model is cut, for ``repr`` of the pipe."""
        return f"stages={len(self.parts)}"


def _call(part: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Return ``(args, kwargs)`` for a micro-batch, from its values ``part`` in the order of ``args`` and ``kwargs``."""
    first, last = len(args), len(args) + len(kwargs)
    return part[:first], dict(zip(kwargs, part[first:last], strict=True))


# The devices of stages.


def place(
    parts: Sequence[nn.Module], devices: Sequence[torch.device | str | int] | None
) -> tuple[torch.device | None, ...]:
    """Move every part to its device, and return the devices. With ``devices=None`` the parts stay where they are.

    Raises:
        ValueError: the number of devices differs from the number of parts, a device cannot be used, or parts on
            different devices share a parameter.
    """
    if devices is None:
        return (None,) * len(parts)
    found = [usable_device(device, f"Pipe: devices[{number}]") for number, device in enumerate(devices)]
    if len(found) != len(parts):
        raise ValueError(f"Pipe: devices: expected one device per stage ({len(parts)}), got {len(found)}")
    for names in shared_parameters(parts):
        if len({found[user] for user in names}) > 1:
            where = ", ".join(f"stage {user} on {found[user]}" for user in names)
            name = next(iter(names.values()))
            raise ValueError(f"Pipe: the parameter {name!r} is used by {where}: it can be on one device only")
    for part, device in zip(parts, found, strict=True):
        part.to(device)
    return tuple(found)


def refuse_moves(tensors: Iterable[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise RuntimeError if ``change`` would move one of the tensors to another device."""
    for device in {tensor.device for tensor in tensors}:
        there = change(torch.empty(0, device=device)).device
        if there != device:
            raise RuntimeError(
                f"Pipe: stages cannot be moved from {device} to {there}; "
                "move the model before the pipe is made, or give Pipe devices=[...], one per stage"
            )


def shared_parameters(parts: Sequence[nn.Module]) -> Iterator[dict[int, str]]:
    """For every parameter that several parts share, yield its name in each of them, by the index of the part."""
    users: dict[int, dict[int, str]] = {}
    for number, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            users.setdefault(id(parameter), {})[number] = name
    for names in users.values():
        if len(names) > 1:
            yield names


# Changes to a model after it was cut.


class Structure:
    """A record of the submodules, at all depths, of a model and of its stages.

    Args:
        model: the model that was cut into stages.
        parts: the modules of the stages.
        made: the modules in ``parts`` that a pipe has made, each with the model's module whose layers it contains.
    """

    def __init__(
        self, model: nn.Module, parts: Sequence[nn.Module], made: Iterable[tuple[nn.Module, nn.Module]] = ()
    ) -> None:
        found = {id(module): module for root in (model, *parts) for module in root.modules()}.values()
        self._model = model
        self._shown = model._modules  # shared with the pipe; nn.Sequential replaces it when a layer is deleted
        self._layers = dict(model._modules)
        self._parts = parts
        self._made = [(module, dict(module._modules), original) for module, original in made]
        self._leaves = [module for module in found if not module._modules]
        self._others = [(module, dict(module._modules)) for module in found if module._modules]

    def has_changed(self) -> bool:
        """Return whether a submodule was added, deleted or replaced since this record was made."""
        return any([module._modules for module in self._leaves]) or any(
            [not have_same_items(module._modules, then) for module, then in self._others]
        )

    def refuse_other_names(self) -> None:
        """Raise RuntimeError if the names of the model's layers have changed, because the stages no longer fit."""
        now = self._model._modules
        if now is not self._shown or [*now] != [*self._layers]:
            raise RuntimeError(
                "Pipe: expected the layers that the pipe was made of, or others in their places (model[1] = layer), "
                f"got {_difference(self._layers, now)}: the stages are not cut for them; make a new pipe of the model"
            )

    def refuse_edited_stages(self) -> None:
        """Raise RuntimeError if a layer was replaced in a stage but not in the model."""
        for module, then, original in self._made:
            layers = module._modules.items()
            is_models = all([layer is then.get(name) or layer is original._modules.get(name) for name, layer in layers])
            if not is_models or [*module._modules] != [*then]:
                stage = next(n for n, part in enumerate(self._parts) if any(module is m for m in part.modules()))
                found = _difference(then, module._modules)
                raise RuntimeError(
                    f"Pipe: expected the model's own layers in stage {stage}, got {found}: "
                    "neither the model nor its state_dict has them; replace layers in the model (model[1] = layer), "
                    "which the pipe then runs"
                )


def have_same_items(now: Mapping[Any, Any], then: Mapping[Any, Any]) -> bool:
    """Return whether two dictionaries have the same objects under the same names, in the same order."""
    # Uses keys(), because TorchScript's dictionaries are not iterable.
    return [*now.keys()] == [*then.keys()] and all(map(is_, now.values(), then.values()))


def _difference(then: Mapping[str, nn.Module | None], now: Mapping[str, nn.Module | None]) -> str:
    """Describe which modules are new and which are gone; if there are no such modules, the names before and after."""

    def without(some: Mapping[str, nn.Module | None], others: Mapping[str, nn.Module | None]) -> str:
        return ", ".join(
            f"{name!r} ({type(module).__name__})"
            for name, module in some.items()
            if not any(module is other for other in others.values())
        )

    found = [
        f"{what} {layers}" for what, layers in (("new", without(now, then)), ("gone", without(then, now))) if layers
    ]
    return "; ".join(found) or f"layers named {', '.join(now) or 'nothing'} in place of {', '.join(then)}"


# The dictionaries in which nn.Module keeps its tensors and hooks.

TENSORS = ("_parameters", "_buffers")

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

CALL_HOOKS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
"""The hooks that run in a call of the module or in its backward."""

ALL_HOOKS = (
    *CALL_HOOKS,
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


# Micro-batches.


class Whole:
    """Wraps a tensor, or a structure of tensors, that every micro-batch gets uncut, such as a mask for all rows."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class MicroBatches(NamedTuple):
    """The values of all micro-batches, and the number of rows of each."""

    values: list[list[Any]]
    """For each micro-batch, its part of every value."""
    rows: list[int]

    @property
    def weights(self) -> list[float]:
        """Return the weight of each micro-batch's mean in the mean over all rows."""
        total = sum(self.rows)
        return [rows / total if total else 1.0 for rows in self.rows]


def split(values: Sequence[Any], chunks: int) -> MicroBatches:
    """Cut the tensors in ``values`` along dimension 0 into ``chunks`` parts, or fewer: at most one per row.

    Sizes differ by one at most, the larger ones first, as in ``torch.tensor_split``. Tensors without dimensions, values
    that are not tensors, and :class:`Whole` values go to every micro-batch.

    Raises:
        ValueError: tensors have different numbers of rows.
    """
    flat: list[tuple[list[Any], Any]] = [
        ([value], None) if isinstance(value, torch.Tensor) else pytree.tree_flatten(value) for value in values
    ]
    found = dict.fromkeys([leaf.shape[0] for leaves, _ in flat for leaf in leaves if _has_rows(leaf)])
    if len(found) > 1:
        raise ValueError(
            "Pipe: the tensors of a mini-batch must have the same number of rows (dimension 0), got "
            f"{' and '.join(map(str, found))}; pymoe.pipe.Whole(tensor) is not cut"
        )
    rows = next(iter(found), 0)
    count = max(1, min(chunks, rows))
    every, larger = divmod(rows, count)
    sizes = [every + (number < larger) for number in range(count)]
    parts = [
        [_cut(leaf, sizes, count) for leaf in leaves]  # indexed by leaf, then by micro-batch
        for leaves, _ in flat
    ]
    cut = [
        [
            leaves[0][number]
            if structure is None
            else pytree.tree_unflatten([leaf[number] for leaf in leaves], structure)
            for leaves, (_, structure) in zip(parts, flat, strict=True)
        ]
        for number in range(count)
    ]
    return MicroBatches(cut, sizes)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _cut(leaf: Any, sizes: list[int], count: int) -> Sequence[Any]:
    if isinstance(leaf, Whole):
        return [leaf.value] * count
    return leaf.split_with_sizes(sizes) if count > 1 and _has_rows(leaf) else [leaf] * count


def join(values: Sequence[Any]) -> Any:
    """Join the outputs of micro-batches: concatenate their tensors along dimension 0.

    Raises:
        ValueError: outputs differ in structure, or contain values that cannot be joined: scalar tensors, and other
            values that differ.
        RuntimeError: tensors differ in the size of a dimension other than 0.
    """
    if len(values) == 1:
        return values[0]
    flat = [pytree.tree_flatten(value) for value in values]
    structure = flat[0][1]
    for number, (_, other) in enumerate(flat):
        if other != structure:
            raise ValueError(
                f"Pipe: outputs of micro-batches differ in structure: 0 has {structure}, {number} has {other}"
            )
    return pytree.tree_unflatten(
        [_joined(parts) for parts in zip(*[leaves for leaves, _ in flat], strict=True)], structure
    )


def mean(losses: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the loss of a mini-batch, a mean over its rows: the weighted sum of the losses of its micro-batches."""
    if len(losses) == 1:
        return losses[0]
    return torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum(0)


def _joined(parts: tuple[Any, ...]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            raise ValueError(
                "Pipe: scalar outputs of micro-batches cannot be combined: return a value per row, compute the loss in "
                "step(), name the output that is the loss (output_loss_value_spec), or use one micro-batch"
            )
        return torch.cat(parts)
    if any(type(part) is not type(first) or part != first for part in parts[1:]):
        raise ValueError(f"Pipe: outputs that are not tensors differ between micro-batches: {parts}")
    return first


# Descriptions of a pipe, as data and as a picture.


@dataclass(frozen=True)
class StageInfo:
    """Describes one stage."""

    modules: tuple[str, ...]
    """Qualified names of the outermost modules in the stage, and of parameters outside of these modules."""
    parameters: int
    """The number of elements of the stage's parameters."""
    takes: tuple[Source, ...]
    """The stage's inputs: outputs of other stages, or inputs of the pipeline (stage -1)."""
    gives: int
    """The number of values that the stage makes for other stages or as outputs of the model."""


@dataclass(frozen=True)
class PipeInfo:
    """Describes all stages. ``str(info)`` is a picture of the cut."""

    stages: tuple[StageInfo, ...]
    outputs: tuple[Source, ...]
    """Sources of the values of the model's output."""
    inputs: int
    has_loss_and_backward: bool

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.stages)

    @property
    def graph(self) -> fx.Graph:
        """Return a graph that calls one module per stage: ``submod_0``, ``submod_1``, ... Each returns a list."""
        graph = fx.Graph()
        inputs = [graph.placeholder(f"input_{number}") for number in range(self.inputs)]
        made: list[dict[int, fx.Node]] = []

        def value(source: Source) -> fx.Node:
            return inputs[source.number] if source.stage == INPUT else made[source.stage][source.number]

        for number, stage in enumerate(self.stages):
            call = graph.call_module(f"submod_{number}", tuple(value(source) for source in stage.takes))
            made.append({item: graph.call_function(operator.getitem, (call, item)) for item in range(stage.gives)})
        graph.output([value(source) for source in self.outputs])
        return graph

    def __str__(self) -> str:
        rows = [("", f"{self.inputs} input{'s' * (self.inputs != 1)}", "", "")]
        for number, stage in enumerate(self.stages):
            modules = ", ".join(_runs(stage.modules)) or "no parameters"
            takes = ", ".join(_words(source, number) for source in stage.takes) or "nothing"
            rows.append((f"stage {number}", modules, f"{stage.parameters:,} parameters", f"takes {takes}"))
        outputs = ", ".join(dict.fromkeys(_words(source, len(self.stages)) for source in self.outputs))
        what = "output: the loss" if self.has_loss_and_backward else "output"
        rows.append(("", what, "", f"takes {outputs or 'nothing'}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def outermost(part: nn.Module, model: nn.Module) -> tuple[str, ...]:
    """Return the names of the model's outermost modules in ``part``, and of parameters outside of these modules."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[str] = []

    def look(module: nn.Module, path: str) -> None:
        found.extend(f"{path}{name}" for name in module._parameters if module._parameters[name] is not None)
        for name, child in module._modules.items():
            if child is not None and names.get(id(child)) is not None:
                found.append(names[id(child)])
            elif child is not None:
                look(child, f"{path}{name}.")

    name = names.get(id(part))
    look(part, f"{name}." if name else "")
    return tuple(found)


def _runs(names: tuple[str, ...]) -> Iterator[str]:
    """Abbreviate ``a.0, a.1, a.2`` as ``a.0-2``."""

    def run_of(numbered: tuple[int, str]) -> tuple[str, int]:
        position, name = numbered
        owner, _, last = name.rpartition(".")
        return (owner, int(last) - position) if last.isdecimal() else (name, position)

    for _, run in groupby(enumerate(names), run_of):
        (_, first), *others = run
        yield f"{first}-{others[-1][1].rpartition('.')[2]}" if others else first


def _words(source: Source, taker: int) -> str:
    if source.stage == INPUT:
        return f"input {source.number}"
    skip = " (skip)" if source.stage < taker - 1 else ""
    return f"stage {source.stage}: {source.number}{skip}"


class ByStage(dict[int, str]):
    """Maps stage indices to items, and also accepts PiPPy's names as keys: ``"submod_0"`` is the key 0."""

    def __missing__(self, key: Any) -> str:
        number = key.removeprefix("submod_") if isinstance(key, str) else ""
        if number.isdecimal() and int(number) in self:
            return self[int(number)]
        raise KeyError(key)
