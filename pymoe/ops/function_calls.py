"""Calls of an operator's ``autograd.Function`` that cost what is needed: the kernel alone where nothing is recorded.

``Function.apply`` with a ``setup_context``, which the transforms of :mod:`torch.func` ask for, binds the signature of
``forward`` anew in every call: most of the time of a call with few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from pymoe._torch_private import are_functorch_transforms_active, unwrap_if_dead

_apply_of: dict[type[torch.autograd.Function], Callable[..., Any]] = {}
"""The ``apply`` to which the public one of a Function leads."""


def is_recorded(*values: Any) -> bool:
    """Return whether a derivative of what is computed from ``values`` may be asked for.

    That is so where one of the tensors requires grad and grad mode is on, inside the transforms of :mod:`torch.func`,
    inside a ``forward_ad.dual_level``, and in an exported graph, which may meet other tensors than its example.

    Args:
        values: the arguments of a call: tensors, and anything else.
    """
    if is_compiling():
        if torch.compiler.is_exporting():
            return True
    elif are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return is_grad_enabled() and _any_requires_grad(values)


def call(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return ``function.apply(*args)``, or ``function.forward(*args)`` where nothing records it.

    Args:
        function: a Function with ``setup_context``, whose ``forward`` takes these arguments and changes none of them.
            It returns fresh tensors or views of its arguments, which are ordinary views where nothing is recorded:
            autograd follows changes of them in place. It never returns an argument itself, of which ``apply`` makes a
            view and ``forward`` alone would not.
        args: all arguments of its ``forward``.
    """
    if is_compiling() or are_functorch_transforms_active():
        return function.apply(*args)
    if not (forward_ad._current_level >= 0 or (is_grad_enabled() and _any_requires_grad(args))):
        return function.forward(*args)
    apply = _apply_of.get(function)
    if apply is None:
        apply = _apply_of[function] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    # Tensors that left a transform are wrapped still.
    return apply(*[unwrap_if_dead(value) if isinstance(value, Tensor) else value for value in args])


def _any_requires_grad(values: tuple[Any, ...]) -> bool:
    for value in values:  # noqa: SIM110  # a generator for any() would cost more than the answer
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False
