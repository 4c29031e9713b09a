"""Weights the losses that layers inject (``pymoe.nn.inject_loss``) by each micro-batch's share of the mini-batch's
rows.

Injected losses are not part of the pipeline's loss, so its weights do not apply to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from pymoe.nn.losses import AuxiliaryLosses
from pymoe.nn.moe import MoE
from pymoe.nn.router import Router
from pymoe.pipe.context import micro_batch

Function = Callable[..., Sequence[Any]]


def is_weighted(layer: nn.Module) -> bool:
    """Return whether :func:`with_auxiliary_losses` changes the layer's ``scale`` while its stage runs."""
    return isinstance(layer, AuxiliaryLosses)


def keeps_counts(layer: nn.Module) -> bool:
    """Return whether a forward of the layer has effects besides its output: counts, statistics, an injected loss."""
    return isinstance(layer, (MoE, Router, AuxiliaryLosses))


def has_capacity(layer: nn.Module) -> bool:
    """Return whether the layer may drop tokens of a call past a number that depends on the call's tokens."""
    if not isinstance(layer, MoE) or layer.capacity_factor is None:
        return False
    # The choices of a token differ in pymoe's own router, so that an expert takes every token at most once.
    choices = layer.router.top_k if isinstance(layer.router, Router) else 1
    return layer.capacity_factor * choices < layer.num_experts


def with_auxiliary_losses(function: Function, module: nn.Module) -> Function:
    """Return a stage's ``function`` with the auxiliary losses in ``module`` weighted by the running micro-batch."""
    losses = [part for part in module.modules() if isinstance(part, AuxiliaryLosses)]
    return partial(_weighted, function, losses) if losses else function


def _weighted(function: Function, losses: list[AuxiliaryLosses], *values: Any) -> Sequence[Any]:
    about = micro_batch()
    if about is None or about.count == 1:
        return function(*values)
    before = [loss.scale for loss in losses]
    for loss, scale in zip(losses, before, strict=True):
        loss.scale = scale * about.weight
    try:
        return function(*values)
    finally:
        for loss, scale in zip(losses, before, strict=True):
            loss.scale = scale
