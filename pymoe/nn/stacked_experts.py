"""Experts that modules of other packages hold in stacked parameters, for code that spreads them over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import nn

from pymoe.nn.apply_experts import Activation


class StackedExperts(NamedTuple):
    """Describes feed-forward networks in the parameters of a module.

    The module is called with rows (T, H), a choice (T, K) of experts and the weights (T, K) of the choices, and returns
    the result of :func:`pymoe.nn.apply_experts` in the dtype of the rows, which are cast to the dtype of the parameters
    before.
    """

    names: tuple[str, str, str | None, str | None]
    """The names of the parameters that :func:`pymoe.nn.apply_experts` calls ``w_in``, ``w_out``, ``b_in`` and
    ``b_out``; None for biases that there are not."""
    transposed: bool
    """True if the weights are (E, in, out) instead of (E, out, in)."""
    activation: Callable[[Any], Activation]
    """Takes the module, and returns the activation of its next call. It raises if the module would not run."""


Handler = Callable[[nn.Module], StackedExperts | None]
"""Takes a module. Returns the description of its experts; None if it knows no experts in it. It raises
:class:`ValueError` or :class:`TypeError` for experts that cannot be described."""

handlers: list[Handler] = []
"""Handlers of modules of other packages; the integrations add theirs."""

spread_before_loading: ContextVar[Callable[[nn.Module], bool] | None] = ContextVar(
    "spread_before_loading", default=None
)
"""Spreads a model on the meta device over ranks, and returns whether it was not spread before; None if models are
loaded whole. The integrations call it before they read a model's weights."""
