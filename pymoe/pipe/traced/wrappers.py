"""Modules around models, to be traced: boundaries between layers, and losses inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pymoe.pipe.other_names import also_called
from pymoe.pipe.traced.split_points import pipe_split

__all__ = ["LossWrapper", "PipeSequential", "TrivialLossWrapper"]


class PipeSequential(nn.Sequential):
    """An ``nn.Sequential`` with a boundary of stages between any two of its layers, wherever in a model it is."""

    @classmethod
    @also_called(sequential_instance="sequential")
    def from_sequential(cls, sequential: nn.Sequential) -> PipeSequential:
        """The same layers, under the same names, and in the same mode.

        Args:
            sequential: whose layers they are; it stays as it is.
        """
        made = cls()
        made._modules.update(sequential._modules)
        made.training = sequential.training
        return made

    def forward(self, input: Any) -> Any:
        """Return the output of the last layer.

        Args:
            input: what the first layer takes.
        """
        for number, layer in enumerate(self):
            if number:
                pipe_split()
            input = layer(input)
        return input


class LossWrapper(nn.Module):
    """A model and its loss, as one module that returns the loss. Subclasses say how, in ``forward``.

    Args:
        module: the model.
        loss_fn: the loss.
    """

    loss_spec: Any = None
    """Where in the output the loss is, as ``output_loss_value_spec`` of :func:`pymoe.pipeline` has it, which takes this
    if it is given nothing else."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss.

        Args:
            args: whatever the model takes, and what it shall return.
            kwargs: the same by name.

        Raises:
            NotImplementedError: the subclass does not say.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no forward: a subclass of LossWrapper computes the loss there, as "
            "TrivialLossWrapper does, by self.loss_fn(self.module(x), targets)"
        )


class TrivialLossWrapper(LossWrapper):
    """``loss_fn(module(x), targets)``."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> torch.Tensor:
        """Return the loss.

        Args:
            x: what the model takes.
            targets: what ``loss_fn`` takes beside the model's output.
        """
        loss: torch.Tensor = self.loss_fn(self.module(x), targets)
        return loss
