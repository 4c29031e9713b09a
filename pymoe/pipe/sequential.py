"""Models whose layers are stages: an ``nn.Sequential``, cut between its layers, with skips as edges; and modules given
as stages, with edges that the user names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pymoe._common.names import suggestion
from pymoe.pipe.deferred_batch_norm import convert_deferred_batch_norm
from pymoe.pipe.execution.held_state import StageLock
from pymoe.pipe.skip import InPlace, Key, skip_routes, tracking, verify_skippables
from pymoe.pipe.stages import INPUT, Pipeline, Source, StagedModel, Structure, place

OTHER_NAMES_IN_STEP = {"loss": "loss_fn", "criterion": "loss_fn", "targets": "target", "labels": "target"}
STEP_OPTIONS = ("target", "loss_fn", "schedule", "chunks", "reduction")
"""The options of :meth:`pymoe.Pipe.step`, which passes all other keyword arguments to the model."""


class LayersAsStages(StagedModel):
    """A model whose stages each consist of one or more of its layers.

    If a layer of the model is replaced later, the new layer runs.
    """

    module: nn.Sequential | nn.ModuleList

    def __init__(self, module: nn.Sequential | nn.ModuleList) -> None:
        self.module = module
        self._one_at_a_time = StageLock()  # taken by a thread that adapts the stages to replaced layers
        self._stand()

    @property
    def pipeline(self) -> Pipeline:
        if self._made is None or self._structure.has_changed():
            with self._one_at_a_time:
                if self._made is None or self._structure.has_changed():
                    self._structure.refuse_other_names()
                    self._structure.refuse_edited_stages()
                    self._stand()
        assert self._made is not None
        return self._made

    def present_parts(self) -> tuple[nn.Module, ...]:
        _ = self.pipeline
        return self.parts

    def _stand(self) -> None:
        """Make a new pipeline of the present layers, and a new record of their structure."""
        self._made: Pipeline | None = None
        made = self._fill()
        self._structure = Structure(self.module, self.parts, made)
        self._made = self._make_pipeline()

    @abstractmethod
    def _fill(self) -> Sequence[tuple[nn.Module, nn.Module]]:
        """Put the model's present layers into ``parts``.

        Return the parts that are not modules of the model, each with the model's module whose layers it contains.
        """

    @abstractmethod
    def _make_pipeline(self) -> Pipeline:
        """Return the stages and edges of the present layers."""


# Stages that the user gives.

Taken = int | Source
"""An argument of a stage: the number of another stage, for its whole result; or a :class:`.Source`, for one item of
that result or an input of the pipe.
"""


class OwnStages(LayersAsStages):
    """Modules as stages; :meth:`pymoe.Pipe.from_stages` documents the arguments and errors."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        takes: Sequence[Sequence[Taken]] | None = None,
        outputs: Taken | Sequence[Taken] | None = None,
        devices: Sequence[torch.device | str | int] | None = None,
    ) -> None:
        if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
            raise TypeError(f"Pipe.from_stages: stages must be a sequence of modules, got {stages!r:.200}")
        if takes is None:
            takes = [[number - 1 if number else Source(INPUT, 0)] for number in range(len(stages))]
        if len(takes) != len(stages):
            raise ValueError(f"Pipe.from_stages: takes: expected one entry per stage ({len(stages)}), got {len(takes)}")
        self._places = devices
        last: Taken = len(stages) - 1
        self._is_one = outputs is None or isinstance(outputs, (int, Source))
        found = [last if outputs is None else outputs] if self._is_one else list(outputs)  # type: ignore[arg-type]
        self._inputs = 1 + max(
            (t[1] for row in takes for t in row if isinstance(t, Source) and t[0] == INPUT), default=-1
        )
        self._takes = [tuple(row) for row in takes]
        self._outputs: list[Any] = found
        super().__init__(stages if isinstance(stages, nn.ModuleList) else nn.ModuleList(stages))

    def _fill(self) -> Sequence[tuple[nn.Module, nn.Module]]:
        self.parts = tuple(self.module._modules.values())  # type: ignore[arg-type]
        return ()

    def _make_pipeline(self) -> Pipeline:
        self.devices = place(self.parts, self._places)
        # For each stage: the items of its result that are used, each with its index among the stage's outputs.
        items: list[dict[int | None, int]] = [{} for _ in self.parts]

        def source(taken: Taken, taker: int) -> Source:
            stage, item = taken if isinstance(taken, Source) else (taken, None)
            if stage == INPUT and item is not None and 0 <= item < self._inputs:
                return Source(INPUT, item)
            if not 0 <= stage < taker:
                who = f"stage {taker}" if taker < len(self.parts) else "the pipe's output"
                wanted = "an earlier stage or an input that stages take"
                raise ValueError(f"Pipe.from_stages: takes: {who} cannot take {taken!r}: expected {wanted}")
            return Source(stage, items[stage].setdefault(item, len(items[stage])))

        inputs = [tuple(source(taken, number) for taken in row) for number, row in enumerate(self._takes)]
        results = tuple(source(taken, len(self.parts)) for taken in self._outputs)
        functions = [
            partial(_run_and_pick, part, list(of_part)) for part, of_part in zip(self.parts, items, strict=True)
        ]
        return Pipeline(self.stages_of(functions, inputs, map(len, items)), self._inputs, results)

    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        if kwargs or len(args) != self._inputs:
            given = f"{len(args)}" + (f" and {', '.join(kwargs)} by name" if kwargs else "")
            raise TypeError(f"Pipe: expected {self._inputs} positional inputs, got {given}")
        return list(args)

    def unflatten_outputs(self, values: Sequence[Any]) -> Any:
        return values[0] if self._is_one else tuple(values)


def _run_and_pick(part: nn.Module, items: Sequence[int | None], *values: Any) -> Sequence[Any]:
    """Run a stage; return the given items of its result. The item None is the whole result."""
    result = part(*values)
    return [result if item is None else result[item] for item in items]


# Sequential models.


class SequentialModel(LayersAsStages):
    """An ``nn.Sequential``, cut between its layers. It takes one value and returns one.

    Hooks of a stage's module are called with micro-batches, and hooks of the model itself with whole mini-batches.

    Raises:
        TypeError: the model is not an ``nn.Sequential``; skips do not match; ``balance`` is not a list of integers.
        ValueError: ``balance`` or ``devices`` do not match the model.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None,
        devices: Sequence[torch.device | str | int] | None,
        deferred_batch_norm: bool = False,
    ) -> None:
        self.parts = tuple(cut(module, balance))
        self._places = devices
        self._deferred_batch_norm = deferred_batch_norm
        super().__init__(module)

    module: nn.Sequential
    hooks_are_pipes = True  # stages call the layers, and nothing calls the model itself

    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        if kwargs:
            unknown = ", ".join(name for name in kwargs if name != "input")
            if unknown:
                hint = suggestion(unknown, STEP_OPTIONS, OTHER_NAMES_IN_STEP)
                raise TypeError(f"Pipe: unexpected argument {unknown}: an nn.Sequential has one, 'input'{hint}")
            args = [*args, kwargs["input"]]
        if len(args) != 1:
            raise TypeError(f"Pipe: expected 1 input, got {len(args)}")
        return list(args)

    def unflatten_outputs(self, values: Sequence[Any]) -> Any:
        return values[0]

    def extra_repr(self) -> str:
        return f"balance={[len(part._modules) for part in self.parts]}"

    @property
    def pipeline(self) -> Pipeline:
        refuse_own_call(self.module)
        return super().pipeline

    def _fill(self) -> Sequence[tuple[nn.Module, nn.Module]]:
        verify_skippables(self.module)
        rest = iter(self.module._modules.items())
        for part in self.parts:
            part._modules.update([next(rest) for _ in part._modules])
        return [(part, self.module) for part in self.parts]

    def _make_pipeline(self) -> Pipeline:
        if self._deferred_batch_norm:
            convert_deferred_batch_norm(self.module)
        self.devices = place(self.parts, self._places)
        parts = self.parts
        routes = skip_routes(parts)
        sends: list[list[Key]] = [[] for _ in parts]  # skips that leave the stage; they are its outputs 1, 2, ...
        takes: list[dict[Key, Source]] = [{} for _ in parts]  # skips that come from other stages, and their sources
        for route in routes:
            elsewhere = sorted({pop for pop in route.pops if pop != route.stash})
            if elsewhere:
                sends[route.stash].append(route.key)
                for pop in elsewhere:
                    takes[pop][route.key] = Source(route.stash, len(sends[route.stash]))
        functions = []
        for number, part in enumerate(parts):
            pops = Counter({route.key: route.pops.count(number) for route in routes})
            has_skips = sends[number] or any(pops.values())
            skips = (list(takes[number]), sends[number], pops)
            functions.append(partial(_run_with_skips, part, *skips) if has_skips else partial(_run, part))
        before = [Source(INPUT, 0), *[Source(number, 0) for number in range(len(parts))]]
        inputs = [(source, *taken.values()) for source, taken in zip(before, takes, strict=False)]
        return Pipeline(self.stages_of(functions, inputs, [1 + len(keys) for keys in sends]), 1, (before[-1],))


ANY_MODEL = ": pymoe.pipeline(model, example_args) makes a pipe of any model that can be captured"
COMPILED = (
    ": give Pipe the model itself, and compile what stages call, pipe[0].compile() for each stage "
    "(model.compile() compiles a call of the whole model, which no stage makes)"
)


def cut(module: nn.Sequential, balance: Sequence[int] | None) -> list[nn.Sequential]:
    """Cut a model into groups of layers with the sizes in ``balance``; None: one layer each. Layers keep their names.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or has its own ``forward`` or ``__call__``; ``balance`` is not
            a list of integers.
        ValueError: the model has no layers, the sizes do not add up to their number, or a size is less than 1.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"Pipe: the model must be an nn.Sequential, got {type(module).__name__}"
            + (COMPILED if hasattr(module, "_orig_mod") else ANY_MODEL)
        )
    refuse_own_call(module)
    layers = list(module._modules.items())
    sizes = [1] * len(layers) if balance is None else list(balance)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"Pipe: balance must be a list of integers, the layers of each stage, got {balance!r}")
    if not layers:
        raise ValueError("Pipe: the model has no layers")
    if any(size < 1 for size in sizes):
        raise ValueError(f"Pipe: every stage must have a layer, got balance={sizes}")
    if sum(sizes) != len(layers):
        raise ValueError(f"Pipe: balance={sizes} is for {sum(sizes)} layers, the model has {len(layers)}")
    parts = []
    rest = iter(layers)
    for size in sizes:
        part = nn.Sequential()
        part._modules.update([next(rest) for _ in range(size)])
        part.training = module.training
        parts.append(part)
    return parts


def refuse_own_call(module: nn.Sequential) -> None:
    """Raise TypeError if the model has its own ``forward`` or ``__call__``, because stages only call its layers."""
    kind = type(module)
    is_own = kind.forward is not nn.Sequential.forward or kind.__call__ is not nn.Module.__call__
    if is_own or "forward" in module.__dict__:
        where = "" if is_own else ", put into the object,"
        raise TypeError(f"Pipe: {kind.__name__} has a forward of its own{where} which would not run")


def _run(part: nn.Module, value: Any) -> Sequence[Any]:
    return [part(value)]


def _run_with_skips(
    part: nn.Module, takes: list[Key], sends: list[Key], pops: Counter[Key], value: Any, *taken: Any
) -> Sequence[Any]:
    """Run layers that stash and pop, given skips from other stages. Return the output, then skips for other stages."""
    skips = _StageSkips(zip(takes, taken, strict=True), sends, pops)
    with tracking(skips):
        value = part(value)
    return [value, *[skips.sent[key] for key in sends]]


class _StageSkips(InPlace):
    """Keeps the skips that a stage's layers stash, and those received from other stages, until they are popped."""

    def __init__(self, taken: Iterable[tuple[Key, Any]], sends: list[Key], pops: Counter[Key]) -> None:
        super().__init__(pops.__getitem__)
        self.sent: dict[Key, Any] = {}
        self._sends = sends
        for key, value in taken:
            super().save(key, value)

    def save(self, key: Key, value: Any) -> None:
        if key in self._sends:
            self.sent[key] = value
        super().save(key, value)
