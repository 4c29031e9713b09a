"""Makes operators without a CUDA kernel raise an error that names the alternatives if they get CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from pymoe._native import load_operators
from pymoe._torch_private import dispatch_get_all_op_names, dispatch_has_kernel_for_dispatch_key

# Kernels that are registered through this object stay registered as long as it lives.
_LIBRARY = torch.library.Library("pymoe", "IMPL")

refused: list[str] = []
"""The operators that refuse CUDA tensors: all in a build without CUDA kernels, else those of quantised weights."""


def register() -> None:
    """For every operator without a CUDA kernel, register one that raises RuntimeError; list these operators in
    ``refused``.

    torch's own error would misleadingly suggest a selective build as the cause.
    """
    for name in dispatch_get_all_op_names():
        if name.startswith("pymoe::") and not dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            _LIBRARY.impl(name, _refusal(name), "CUDA")
            refused.append(name)


def _refusal(name: str) -> Callable[..., NoReturn]:
    where = "for this operator" if load_operators().cuda else "in this build"

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"{name}: there is no CUDA kernel {where}; use CPU tensors, or pymoe.reference / backend='reference'"
        )

    return refuse
