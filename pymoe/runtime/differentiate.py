"""Copies the tensors of clients for a call of an expert, and runs the backward pass of the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pymoe.runtime.batch_tensor_proto import has_gradient


def lend(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the inputs for a call of an expert, so that the expert cannot change the caller's inputs.

    All inputs are always copied. Whether an expert changes them cannot be found out in advance: it may do so only in
    some calls, or through ``.data`` or numpy, which do not change the version counter. In a backward pass, the copies
    are not leaves, so the expert may change them in place; autograd refuses that for leaves that require a gradient.
    """
    return [tensor.clone() for tensor in tensors]


def as_leaf(tensor: Tensor) -> Tensor:
    """Return a leaf of autograd with the values of ``tensor``; the leaf requires a gradient if its dtype can have one.

    The leaf shares the memory of ``tensor``, unless that is an inference tensor.
    """
    if tensor.is_inference():  # autograd cannot save inference tensors
        tensor = tensor.clone()
    leaf = tensor.detach()
    return leaf.requires_grad_() if has_gradient(leaf.dtype) else leaf


def run_backward_pass(
    outputs: Sequence[Tensor], grad_outputs: Sequence[Tensor], leaves: Sequence[Tensor], trains: bool
) -> tuple[Tensor, ...]:
    """Run a backward pass and return the gradients of the leaves, with zeros for leaves that have no gradient.

    With ``trains``, also add the gradients of parameters to their ``.grad``.

    The whole pass runs on this thread. By default, autograd would run nodes on a GPU on its single thread for that GPU.
    If that thread was waiting in the node of a client for this very pass, neither could continue.
    """
    roots, grads = [], []
    for output, grad in zip(outputs, grad_outputs, strict=True):
        if output.requires_grad:
            roots.append(output)
            grads.append(grad if grad.dtype == output.dtype else grad.to(output.dtype))
    found: Sequence[Tensor | None] = [None] * len(leaves)
    with torch.autograd.set_multithreading_enabled(False):
        if roots and trains:
            torch.autograd.backward(roots, grads)
            found = [leaf.grad for leaf in leaves]
        elif roots:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            computed = iter(torch.autograd.grad(roots, wanted, grads, allow_unused=True) if wanted else ())
            found = [next(computed) if leaf.requires_grad else None for leaf in leaves]
    if len(leaves) > 1:
        found = _apart(found)
    return tuple(
        torch.zeros_like(leaf, requires_grad=False) if gradient is None else gradient
        for leaf, gradient in zip(leaves, found, strict=True)
    )


def _apart(found: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients, with a clone in place of each one that shares memory with an earlier one.

    Autograd may use a gradient as ``.grad`` and add to it in place, which would change other gradients in the same
    memory.
    """
    seen: set[int] = set()
    apart: list[Tensor | None] = []
    for gradient in found:
        if gradient is not None and (place := gradient.untyped_storage().data_ptr()):
            if place in seen:
                gradient = gradient.clone()
            seen.add(place)
        apart.append(gradient)
    return apart


def clear_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def zero_grad(opt: Any) -> None:
    """Call ``opt.zero_grad()`` if it exists: an optimizer may do more there than clear gradients."""
    if callable(own := getattr(opt, "zero_grad", None)):
        own()


_autograd_is_warm = False


def warm_up_autograd() -> None:
    """Run ``torch.autograd.backward`` once with output gradients, unless an earlier call in this process has done so.

    The first such call in a process takes 0.3 s or more, for imports.
    """
    global _autograd_is_warm
    if not _autograd_is_warm:
        with torch.inference_mode(False), torch.enable_grad():
            root = torch.ones(1, requires_grad=True, device="cpu") * 2
            torch.autograd.backward(root, torch.ones(1, device="cpu"))
        _autograd_is_warm = True
