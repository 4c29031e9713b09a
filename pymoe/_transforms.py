"""Detects the transforms around a call: those of torch.func, forward-mode differentiation, and export."""

from __future__ import annotations

import torch
from torch import Tensor, compiler
from torch.autograd import forward_ad

from pymoe import _torch_canaries as canaries
from pymoe._common.forward_mode import in_forward_mode
from pymoe._torch_private import are_functorch_transforms_active


def is_exporting() -> bool:
    """Return whether ``torch.export`` runs this code.

    (``torch.compiler.is_exporting()`` would also return True in all code that torch 2.11 compiles.)
    """
    return compiler._is_exporting_flag


def torch_func_is_active() -> bool:
    """Return whether a transform of :mod:`torch.func` (``grad``, ``vmap``, …) is active, in compiled code as well."""
    canaries.transforms()
    return are_functorch_transforms_active()  # type: ignore[no-any-return]


def in_torch_func() -> bool:
    """Return whether a transform of :mod:`torch.func` is active; False while compiling or exporting."""
    return not torch.compiler.is_compiling() and torch_func_is_active()


def has_tangent(*tensors: Tensor) -> bool:
    """Return whether one of the tensors carries a tangent of forward-mode AD, or may carry one that cannot be seen.

    While compiling, and inside the transforms of :mod:`torch.func`, this is true whenever forward mode is on: Dynamo's
    tensors lack the tangents of the arguments, ``vmap`` hides tangents, and an inner transform hides those of an outer
    one.
    """
    if not in_forward_mode():
        return False
    if torch.compiler.is_compiling() or torch_func_is_active():
        return True
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
