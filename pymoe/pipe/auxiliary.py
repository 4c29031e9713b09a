"""Weights losses that layers inject (``pymoe.nn.inject_loss``) by the micro-batch's share of the rows.

They do not pass through the loss of the pipeline, and so are not scaled with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pymoe.nn.losses import AuxiliaryLosses
from pymoe.nn.moe import MoE
from pymoe.nn.router import Router
from pymoe.pipe.context import micro_batch

__all__ = ["is_weighted", "keeps_counts", "with_auxiliary_losses"]

Function = Callable[..., Sequence[Any]]


def is_weighted(layer: nn.Module) -> bool:
    """Return whether :func:`with_auxiliary_losses` writes to the layer while it runs."""
    return isinstance(layer, AuxiliaryLosses)


def keeps_counts(layer: nn.Module) -> bool:
    """Return whether a forward of the layer leaves more than its output: counts, statistics, an injected loss."""
    return isinstance(layer, (MoE, Router, AuxiliaryLosses))


def with_auxiliary_losses(function: Function, module: nn.Module) -> Function:
    """Have auxiliary losses in ``module`` weighted by the running micro-batch while a stage's ``function`` runs."""
    losses = [part for part in module.modules() if isinstance(part, AuxiliaryLosses)]
    return _Weighted(function, losses) if losses else function


class _Weighted:
    def __init__(self, function: Function, losses: list[AuxiliaryLosses]) -> None:
        self._function = function
        self._losses = losses

    def __call__(self, *values: Any) -> Sequence[Any]:
        about = micro_batch()
        if about is None or about.count == 1:
            return self._function(*values)
        before = [loss.scale for loss in self._losses]
        for loss, scale in zip(self._losses, before, strict=True):
            loss.scale = scale * about.weight
        try:
            return self._function(*values)
        finally:
            for loss, scale in zip(self._losses, before, strict=True):
                loss.scale = scale
