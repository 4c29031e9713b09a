"""Describes a pipe, as data and as a picture."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx, nn

from pymoe._common.names import also_called
from pymoe.pipe.stages import INPUT, Source, StagedModel, shared_parameters

# Answers as data.


@dataclass(frozen=True)
class StageInfo:
    """Describes one stage."""

    modules: tuple[str, ...]
    """Qualified names of the outermost modules in the stage."""
    parameters: int
    """The number of elements of the stage's parameters."""
    takes: tuple[Source, ...]
    """The stage's inputs: outputs of other stages, or inputs of the pipeline (stage -1)."""
    gives: int
    """The number of values that the stage makes for other stages."""


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
        """Return the stages as calls of modules ``submod_0``, ``submod_1`` and so on, each of which returns a list."""
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


def _outermost(part: nn.Module, model: nn.Module) -> tuple[str, ...]:
    """Return the names of the model's outermost modules in ``part``, and of parameters outside of these."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[str] = []

    def look(module: nn.Module, path: str) -> None:
        found.extend(f"{path}{name}" for name in module._parameters if module._parameters[name] is not None)
        for name, child in module._modules.items():
            if child is not None and names.get(id(child)) is not None:
                found.append(names[id(child)])
            elif child is not None:
                look(child, f"{path}{name}.")

    look(part, "")
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
    """Maps numbers of stages to items, and also takes PiPPy's names: ``"submod_0"`` is the item of stage 0."""

    def __missing__(self, key: Any) -> str:
        number = key.removeprefix("submod_") if isinstance(key, str) else ""
        if number.isdecimal() and int(number) in self:
            return self[int(number)]
        raise KeyError(key)


ABSENT = {
    "split_gm": "get_stage_module(0) is the module of a stage, info().graph has the stages as a graph, and "
    "print_readable() prints what each does",
    "executor": "a pipe runs its stages itself, pipe(x) and pipe.step(x, target=y, loss_fn=f), and last_run tells when "
    "each of them ran",
}
"""Attributes of PiPPy's and ``torch.distributed.pipelining``'s pipes, and their replacements here."""


class Inspection(nn.Module):
    """A module that runs a staged model and describes it."""

    staged: StagedModel
    chunks: int
    checkpoint: str

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.staged.parts)

    @also_called(stage_idx="stage", stage_index="stage")
    def get_stage_module(self, stage: int) -> nn.Module:
        """Return the module of a stage: the part of the model that it uses, under the model's names.

        It can be compiled in place, ``get_stage_module(0).compile()``. The module of a captured stage takes the values
        of ``info().stages[0].takes`` by position and returns a list, also for one value. It is not an
        ``fx.GraphModule``, because it has a graph for every capture.

        Args:
            stage: its number, from 0 up.

        Raises:
            ValueError: the stage is out of range.
        """
        if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage < self.num_stages:
            raise ValueError(
                f"get_stage_module: invalid stage index, expected 0 to {self.num_stages - 1}, got {stage!r}"
            )
        return self.staged.present_parts()[stage]

    def __getattr__(self, name: str) -> Any:
        if name in ABSENT:
            raise AttributeError(f"a Pipe has no {name}: {ABSENT[name]}")
        return super().__getattr__(name)

    @property
    def has_loss_and_backward(self) -> bool:
        """Return whether the model computes its own loss, which ``step()`` minimises if it gets no ``loss_fn``."""
        return self.staged.has_loss

    @property
    def loss_spec(self) -> Any:
        """Return the place of the loss in the model's output: ``output_loss_value_spec`` of a captured model, else
        None.
        """
        return self.staged.loss_spec

    @property
    def replicated_params(self) -> list[dict[int, str]]:
        """Return, for every parameter that several stages share, its name in each stage, by the stage's number.

        PiPPy's names of stages are accepted, too: ``replicated_params[0]["submod_0"]``.
        """
        return list(map(ByStage, shared_parameters(self.staged.present_parts())))

    def info(self) -> PipeInfo:
        """Return the stages and the edges between them; ``print(pipe.info())`` draws them."""
        staged, pipeline = self.staged, self.staged.pipeline
        stages = []
        for part, stage in zip(staged.parts, pipeline.stages, strict=True):
            parameters = sum(parameter.numel() for parameter in part.parameters())
            stages.append(StageInfo(_outermost(part, staged.module), parameters, stage.inputs, stage.outputs))
        return PipeInfo(tuple(stages), pipeline.outputs, pipeline.inputs, staged.has_loss)

    def print_readable(self) -> None:
        """Print what the stages do."""
        for stage in range(self.num_stages):
            print(self.staged.code(stage))

    def __len__(self) -> int:
        """Return the number of stages."""
        return len(self.staged.parts)

    def __getitem__(self, index: int) -> nn.Module:
        """Return the module of a stage (the layers of a sequential model). As in any sequence, -1 is the last."""
        return self.staged.present_parts()[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the modules of the stages."""
        return iter(self.staged.present_parts())

    @property
    def devices(self) -> tuple[torch.device | None, ...]:
        """Return the devices of the stages; None: they stay where the model was."""
        return self.staged.devices

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.parameters())
        where = "" if None in self.devices else f", devices={[str(device) for device in self.devices]}"
        return f"{type(self).__name__}({self.extra_repr()}{where}, parameters={parameters:,})"

    def extra_repr(self) -> str:
        """Return chunks, checkpointing and stages."""
        return f"chunks={self.chunks}, checkpoint={self.checkpoint!r}, {self.staged.extra_repr()}"
