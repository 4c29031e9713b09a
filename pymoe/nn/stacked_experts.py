"""Describes experts in stacked parameters of other packages' modules, for code that spreads experts over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from pymoe.nn.apply_experts import Activation
from pymoe.nn.low_rank import LowRank


class StackedExperts(NamedTuple):
    """Describes the experts of a module of another package.

    The module takes rows (T, H), the chosen experts (T, K) and the weights (T, K) of the choices. It casts the rows to
    the dtype of the parameters, and returns the result of :func:`pymoe.nn.apply_experts` in the original dtype of the
    rows.
    """

    names: tuple[str, str, str | None, str | None]
    """The names of the parameters that :func:`pymoe.nn.apply_experts` calls ``w_in``, ``w_out``, ``b_in`` and
    ``b_out``; None for missing biases. Both weights may be a :class:`pymoe.nn.QuantizedLinear`."""
    transposed: bool
    """True if the weights are (E, in, out) instead of (E, out, in)."""
    activation: Callable[[Any], Activation]
    """Takes the module, and returns the activation of its next call. It raises if the module could not run."""
    adapters: Callable[[Any], tuple[Sequence[LowRank], Sequence[LowRank]]]
    """Takes the module, and returns the adapters of all experts for its next call, for both weights."""


Handler = Callable[[nn.Module], StackedExperts | None]
"""Takes a module. Returns the description of its experts, or None if it is not a module with such experts. Raises
:class:`ValueError` or :class:`TypeError` for experts that cannot be described."""

handlers: list[Handler] = []
"""Handlers of modules of other packages; the integrations add theirs."""


def device_of(experts: nn.Module) -> torch.device:
    """Return the device of the parameters, or of the buffers if the experts have only buffers (quantised weights)."""
    return next(chain(experts.parameters(), experts.buffers())).device


class OnLoad(NamedTuple):
    """Describes how a model will be spread over ranks while an integration loads it."""

    begins: Callable[[nn.Module], bool]
    """Takes a model on the meta device; returns True if its own weights will be read, False if only an adapter's."""
    spread: Callable[[nn.Module], object]
    """Spreads the model's experts over the ranks, in place. Quantised weights may already be cut to this rank's
    experts."""
    own: Callable[[int], slice]
    """Takes the number of experts of a layer; returns the slice of them that this rank has."""


on_load: ContextVar[OnLoad | None] = ContextVar("on_load", default=None)
"""The :class:`OnLoad` of the current context; None if models are loaded whole."""
