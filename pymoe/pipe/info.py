"""What a pipe is made of, as data and as a picture."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx, nn

from pymoe.pipe.staged import StagedModel
from pymoe.pipe.stages import INPUT, Source

__all__ = ["PipeInfo", "StageInfo", "info_of"]


@dataclass(frozen=True)
class StageInfo:
    """One stage."""

    modules: tuple[str, ...]
    """The outermost of the model's modules that are in it, by qualified name."""
    parameters: int
    """How many numbers its parameters are."""
    takes: tuple[Source, ...]
    """Its inputs: outputs of stages, or inputs of the pipeline (stage -1)."""
    gives: int
    """How many values it makes for others."""


@dataclass(frozen=True)
class PipeInfo:
    """All stages. ``str(info)`` is a picture of the cut."""

    stages: tuple[StageInfo, ...]
    outputs: tuple[Source, ...]
    """Where the values of the model's output come from."""
    inputs: int
    has_loss_and_backward: bool

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)

    @property
    def graph(self) -> fx.Graph:
        """The stages as calls of modules ``submod_0``, ``submod_1`` and so on, each of which returns a list."""
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
        rows = [("", f"{self.inputs} inputs" if self.inputs != 1 else "1 input", "", "")]
        for number, stage in enumerate(self.stages):
            modules = ", ".join(_runs(stage.modules)) or "no parameters"
            takes = ", ".join(_words(source, number) for source in stage.takes) or "nothing"
            rows.append((f"stage {number}", modules, f"{stage.parameters:,} parameters", f"takes {takes}"))
        outputs = ", ".join(dict.fromkeys(_words(source, len(self.stages)) for source in self.outputs))
        rows.append(
            ("", "output: the loss" if self.has_loss_and_backward else "output", "", f"takes {outputs or 'nothing'}")
        )
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = []
        for row in rows:
            cells = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
            lines.append("  ".join([*cells, row[3]]).rstrip())
        return "\n".join(lines)


def info_of(staged: StagedModel) -> PipeInfo:
    """What a staged model is made of."""
    pipeline = staged.pipeline
    stages = []
    for part, stage in zip(staged.parts, pipeline.stages, strict=True):
        parameters = sum(parameter.numel() for parameter in part.parameters())
        stages.append(StageInfo(_outermost(part, staged.module), parameters, stage.inputs, stage.outputs))
    return PipeInfo(tuple(stages), pipeline.outputs, pipeline.inputs, staged.has_loss)


def _outermost(part: nn.Module, model: nn.Module) -> tuple[str, ...]:
    """Names of modules that are the model's own, and of parameters beside them."""
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


def _runs(names: tuple[str, ...]) -> list[str]:
    """``a.0, a.1, a.2`` as ``a.0-2``."""
    runs: list[tuple[str, int, int] | str] = []
    for name in names:
        owner, _, last = name.rpartition(".")
        if not last.isdecimal():
            runs.append(name)
            continue
        before = runs[-1] if runs else ""
        if isinstance(before, tuple) and before[0] == owner and before[2] + 1 == int(last):
            runs[-1] = (owner, before[1], int(last))
        else:
            runs.append((owner, int(last), int(last)))
    return [run if isinstance(run, str) else _span(*run) for run in runs]


def _span(owner: str, first: int, last: int) -> str:
    numbers = f"{first}" if first == last else f"{first}-{last}"
    return f"{owner}.{numbers}" if owner else numbers


def _words(source: Source, taker: int) -> str:
    if source.stage == INPUT:
        return f"input {source.number}"
    skip = " (skip)" if source.stage < taker - 1 else ""
    return f"stage {source.stage}: {source.number}{skip}"
