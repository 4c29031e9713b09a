"""Whether something looks at calls from outside that a kernel cannot serve: torch.func, or forward-mode derivatives."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pymoe._torch_private import are_functorch_transforms_active


def in_torch_func() -> bool:
    """Is a transform of :mod:`torch.func` (``grad``, ``vmap``, ``jvp``, …) at work? Never asked while compiling."""
    return not torch.compiler.is_compiling() and are_functorch_transforms_active()


def has_tangent(*tensors: Tensor) -> bool:
    """Does one of the tensors carry a tangent of forward-mode AD? Never asked while compiling."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
