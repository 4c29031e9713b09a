"""Derivatives beyond the first: which transforms surround a call, and gradients that autograd can differentiate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, compiler
from torch.autograd import forward_ad

from pymoe import _torch_canaries as canaries
from pymoe._torch_private import are_functorch_transforms_active, unwrap_if_dead


def is_exporting() -> bool:
    """Return whether ``torch.export`` runs this code.

    ``torch.compiler.is_exporting()`` is True in all code that torch 2.11 compiles.
    """
    return compiler._is_exporting_flag


def in_torch_func() -> bool:
    """Return whether a transform of :mod:`torch.func` (``grad``, ``vmap``, …) is active; False while compiling."""
    if torch.compiler.is_compiling():
        return False
    canaries.transforms()
    return are_functorch_transforms_active()  # type: ignore[no-any-return]


def has_tangent(*tensors: Tensor) -> bool:
    """Return whether one of the tensors carries a tangent of forward-mode AD; False while compiling."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def gradients_again(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Return gradients of ``inputs`` if ``grad`` is the gradient of ``function(*inputs)``; differentiable in both."""
    if not torch.compiler.is_compiling():  # what torch.func.vjp returned is called after its transform ended
        grad, *inputs = (unwrap_if_dead(value) for value in (grad, *inputs))  # type: ignore[assignment]
    if in_torch_func():
        return torch.func.vjp(function, *inputs)[1](grad)  # type: ignore[no-any-return]
    create_graph = torch.is_grad_enabled()
    if not torch.compiler.is_compiling():
        create_graph = create_graph and any(value.requires_grad for value in (grad, *inputs))
    with torch.enable_grad():
        # Aliases, because one of the inputs may have been computed from another.
        aliases = [value.view_as(value) if value.requires_grad else value.detach().requires_grad_() for value in inputs]
        return torch.autograd.grad(function(*aliases), aliases, grad, create_graph=create_graph, materialize_grads=True)
