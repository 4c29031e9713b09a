"""Computes gradients that autograd and the transforms of torch.func can differentiate again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pymoe._torch_private import unwrap_if_dead
from pymoe._transforms import in_torch_func


def gradients_again(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of ``inputs``, given the gradient ``grad`` of ``function(*inputs)``.

    The result is differentiable in ``inputs`` and ``grad``.
    """
    # Unwrap the tensors, since a function that torch.func.vjp has returned may run after the transform has ended.
    if not torch.compiler.is_compiling():
        grad, *inputs = (unwrap_if_dead(value) for value in (grad, *inputs))  # type: ignore[assignment]
    if in_torch_func():
        return torch.func.vjp(function, *inputs)[1](grad)  # type: ignore[no-any-return]
    create_graph = torch.is_grad_enabled()
    if not torch.compiler.is_compiling():
        create_graph = create_graph and any(value.requires_grad for value in (grad, *inputs))
    with torch.enable_grad():
        # Differentiate with respect to aliases, because one of the inputs may have been computed from another.
        aliases = [value.view_as(value) if value.requires_grad else value.detach().requires_grad_() for value in inputs]
        return torch.autograd.grad(function(*aliases), aliases, grad, create_graph=create_graph, materialize_grads=True)
