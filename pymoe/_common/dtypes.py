"""Defines the supported dtypes of operands, the dtypes of sums, and the casts of ``torch.autocast``."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Computed once at import, because torch.compile cannot trace is_autocast_available before torch 2.13.
_DEVICES = frozenset(
    device for device in ("cpu", "cuda", "xpu", "hpu", "mps", "mtia", "maia") if torch.amp.is_autocast_available(device)
)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scores and sums of ``dtype`` are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_enabled(device_type: str) -> bool:
    """Return whether ``torch.autocast`` is on for this type of device; False for types without it, like ``"meta"``."""
    return device_type in _DEVICES and torch.is_autocast_enabled(device_type)


def cast_operands(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast operands as ``F.linear`` does inside ``torch.autocast``.

    While autocast is on for the device of the first operand, every floating tensor except float64 is cast to the
    autocast dtype, differentiably. Otherwise the operands are returned unchanged, as is anything that is not a tensor.
    """
    device = operands[0].device.type if isinstance(operands[0], Tensor) else "cpu"
    if not autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        operand.to(dtype)
        if isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype != torch.float64
        else operand
        for operand in operands
    )
