"""Whether a call is under a transform that the kernels do not support: torch.func, or forward-mode AD."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pymoe._torch_private import are_functorch_transforms_active


def in_torch_func() -> bool:
    """Return whether a transform of :mod:`torch.func` (``grad``, ``vmap``, …) is active; False while compiling."""
    return not torch.compiler.is_compiling() and are_functorch_transforms_active()


def has_tangent(*tensors: Tensor) -> bool:
    """Return whether one of the tensors carries a tangent of forward-mode AD; False while compiling."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
