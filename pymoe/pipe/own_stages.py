"""Stages that the user has made: modules, and what each takes from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pymoe.pipe.devices import place
from pymoe.pipe.staged import LayersAsStages
from pymoe.pipe.stages import INPUT, Pipeline, Source

Taken = int | Source
"""What a stage takes: all that a stage returns, by its number, or one item of it."""


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
        items: list[dict[int | None, int]] = [{} for _ in self.parts]  # of every stage: what others take from it

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
        functions = [partial(_run, part, list(of_part)) for part, of_part in zip(self.parts, items, strict=True)]
        return Pipeline(self.stages_of(functions, inputs, map(len, items)), self._inputs, results)

    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        if kwargs or len(args) != self._inputs:
            given = f"{len(args)}" + (f" and {', '.join(kwargs)} by name" if kwargs else "")
            raise TypeError(f"Pipe: expected {self._inputs} positional inputs, got {given}")
        return list(args)

    def unflatten_outputs(self, values: Sequence[Any]) -> Any:
        return values[0] if self._is_one else tuple(values)


def _run(part: nn.Module, items: Sequence[int | None], *values: Any) -> Sequence[Any]:
    """The function of a stage: returns what others take from the module's result, None for all of it."""
    result = part(*values)
    return [result if item is None else result[item] for item in items]
