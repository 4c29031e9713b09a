"""Running an expert on clients' tensors and differentiating it: inputs that are lent, gradients that go back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pymoe.runtime.batch_tensor_proto import has_gradient


def lend(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies to call an expert with: whatever it does to its inputs, those of the caller stay as they are.

    An expert may work in place in some calls and not in others (a mode, a counter, the values), through ``.data`` or
    numpy, where no version tells: so all get copies, always. They are no leaves of autograd, which refuses changes of
    leaves in place.
    """
    return [tensor.clone() for tensor in tensors]


def as_leaf(tensor: Tensor) -> Tensor:
    """Return the same values outside of any graph, collecting a gradient if their dtype has any."""
    if tensor.is_inference():  # made by a client in inference mode: autograd cannot keep it
        tensor = tensor.clone()
    leaf = tensor.detach()
    return leaf.requires_grad_() if has_gradient(leaf.dtype) else leaf


def differentiate(
    outputs: Sequence[Tensor], grad_outputs: Sequence[Tensor], leaves: Sequence[Tensor], trains: bool
) -> tuple[Tensor, ...]:
    """Run a backward pass and return gradients for the leaves; with ``trains``, parameters get theirs in ``.grad``."""
    roots, grads = [], []
    for output, grad in zip(outputs, grad_outputs, strict=True):
        if output.requires_grad:
            roots.append(output)
            grads.append(grad if grad.dtype == output.dtype else grad.to(output.dtype))
    found: Sequence[Tensor | None] = [None] * len(leaves)
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
    """Return each in memory of its own: autograd may keep one as ``.grad``, and add to it in place."""
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
    """Call the optimizer's own method, which may do more than to clear gradients; one without it, or None, has none."""
    if callable(own := getattr(opt, "zero_grad", None)):
        own()


_autograd_is_warm = False


def warm_up_autograd() -> None:
    """Run a backward pass with given gradients: the first one of a process imports for 0.3 s."""
    global _autograd_is_warm
    if not _autograd_is_warm:
        with torch.inference_mode(False), torch.enable_grad():
            root = torch.ones(1, requires_grad=True, device="cpu") * 2
            torch.autograd.backward(root, torch.ones(1, device="cpu"))
        _autograd_is_warm = True
