"""What can be asked of a pipe: its stages, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pymoe.pipe.info import PipeInfo, info_of
from pymoe.pipe.other_names import also_called
from pymoe.pipe.staged import StagedModel

__all__ = ["Inspection"]


class Inspection(nn.Module):
    """A module that runs a staged model, and tells of it."""

    staged: StagedModel
    chunks: int
    checkpoint: str

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.staged.parts)

    @also_called(stage_idx="stage", stage_index="stage")
    def get_stage_module(self, stage: int) -> nn.Module:
        """The module of a stage: what it uses of the model, under the model's names.

        It can be compiled in place, ``get_stage_module(0).compile()``.

        Args:
            stage: its number, from 0 up.

        Raises:
            ValueError: there is no such stage.
        """
        if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage < self.num_stages:
            raise ValueError(
                f"get_stage_module: invalid stage index, expected 0 to {self.num_stages - 1}, got {stage!r}"
            )
        return self.staged.parts[stage]

    def __getattr__(self, name: str) -> Any:
        if name == "split_gm":
            raise AttributeError(
                "a Pipe has no split_gm: get_stage_module(0) is the module of a stage, info().graph has the stages as "
                "a graph, and print_readable() prints what each does"
            )
        return super().__getattr__(name)

    @property
    def has_loss_and_backward(self) -> bool:
        """Whether the model computes its loss, which ``step()`` minimises without a ``loss_fn``."""
        return self.staged.has_loss

    @property
    def replicated_params(self) -> list[dict[int, str]]:
        """For every parameter that several stages have its name in each of them, by the stage's number."""
        return self.staged.replicated()

    def info(self) -> PipeInfo:
        """The stages and the edges between them; ``print(pipe.info())`` draws them."""
        return info_of(self.staged)

    def print_readable(self) -> None:
        """Print what the stages do."""
        for stage in range(self.num_stages):
            print(self.staged.code(stage))

    def __len__(self) -> int:
        """The number of stages."""
        return len(self.staged.parts)

    def __getitem__(self, index: int) -> nn.Module:
        """The module of a stage; of a sequential model its layers. As of a sequence: -1 is the last."""
        return self.staged.parts[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """The modules of the stages."""
        return iter(self.staged.parts)

    @property
    def devices(self) -> tuple[torch.device | None, ...]:
        """Where the stages are; None: where the model was."""
        return self.staged.devices

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.parameters())
        where = "" if None in self.devices else f", devices={[str(device) for device in self.devices]}"
        return f"{type(self).__name__}({self.extra_repr()}{where}, parameters={parameters:,})"

    def extra_repr(self) -> str:
        """Chunks, checkpointing and stages."""
        return f"chunks={self.chunks}, checkpoint={self.checkpoint!r}, {self.staged.extra_repr()}"
