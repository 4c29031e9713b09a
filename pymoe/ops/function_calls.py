"""Calls of an operator's ``autograd.Function`` that cost what is needed: the kernel alone where nothing is recorded.

``Function.apply`` with a ``setup_context``, which the transforms of :mod:`torch.func` ask for, binds the signature of
``forward`` anew in every call: most of the time of a call with few tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pymoe._torch_private import are_functorch_transforms_active, unwrap_dead_wrappers


def is_recorded(*values: Any) -> bool:
    """Return whether a derivative of what is computed from ``values`` may be asked for.

    That is so where one of the tensors requires grad and grad mode is on, inside the transforms of :mod:`torch.func`,
    inside a ``forward_ad.dual_level``, and in an exported graph, which may meet other tensors than its example.

    Args:
        values: the arguments of a call: tensors, and anything else.
    """
    if torch.compiler.is_compiling():
        if torch.compiler.is_exporting():
            return True
    elif are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values)


def call(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return ``function.apply(*args)``, or ``function.forward(*args)`` where nothing records it.

    Args:
        function: a Function with ``setup_context``, whose ``forward`` takes these arguments and changes none of them.
            It returns fresh tensors or views of its arguments, which are ordinary views where nothing is recorded:
            autograd follows changes of them in place. It never returns an argument itself, of which ``apply`` makes a
            view and ``forward`` alone would not.
        args: all arguments of its ``forward``.
    """
    if torch.compiler.is_compiling() or are_functorch_transforms_active():
        return function.apply(*args)
    if not is_recorded(*args):
        return function.forward(*args)
    return super(torch.autograd.Function, function).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]
