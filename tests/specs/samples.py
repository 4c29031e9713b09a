"""Makes unusual tensors: special values, ties, and equal values in different memory layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def special_values(dtype: torch.dtype) -> Tensor:
    """Return NaN, infinities, zeros, the smallest subnormal and normal numbers, the largest ones, and one; of both
    signs.
    """
    info = torch.finfo(dtype)
    smallest = float(info.smallest_normal) * info.eps  # the smallest subnormal
    values = [float("nan"), float("inf"), 0.0, smallest, info.smallest_normal, info.max, 1.0]
    return torch.tensor([sign * value for value in values for sign in (1.0, -1.0)], dtype=dtype)


def tied(*shape: int, dtype: torch.dtype, generator: torch.Generator, levels: int = 3) -> Tensor:
    """Return values from a few levels around zero, including both zeros, so that nearly all are tied."""
    level = torch.randint(0, levels, shape, generator=generator)
    values = (level - levels // 2).to(dtype)
    negative = torch.randint(0, 2, shape, generator=generator).bool()
    return torch.where((values == 0) & negative, torch.tensor(-0.0, dtype=dtype), values)


def sprinkled(value: Tensor, generator: torch.Generator, share: float = 0.3, finite: bool = False) -> Tensor:
    """Return a copy of ``value`` in which about ``share`` of the elements are special values."""
    special = special_values(value.dtype)
    if finite:
        special = special[special.isfinite()]
    chosen = special[torch.randint(0, len(special), value.shape, generator=generator)]
    return torch.where(torch.rand(value.shape, generator=generator) < share, chosen, value)


def layouts(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, view) pairs of the same values in other memory layouts.

    ``offset`` starts inside its storage, at an address that is aligned to one element only; ``stepped`` skips every
    other element, and ``padded`` has a gap after every row (both hold NaN or the largest integer in the unused
    elements); ``transposed`` has its last two dimensions swapped in memory; ``reversed_strides`` all of them.
    """
    alien = float("nan") if value.is_floating_point() else torch.iinfo(value.dtype).max
    like: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    base = torch.full((value.numel() + 2,), alien, **like)
    offset = base[1 : 1 + value.numel()].view(value.shape)
    offset.copy_(value)
    yield "offset", offset
    if value.dim() == 0:
        return
    stepped = torch.full((*value.shape[:-1], 2 * value.shape[-1]), alien, **like)[..., ::2]
    stepped.copy_(value)
    yield "stepped", stepped
    padded = torch.full((*value.shape[:-1], value.shape[-1] + 3), alien, **like)[..., 1:-2]
    padded.copy_(value)
    yield "padded", padded
    if value.dim() >= 2:
        yield "transposed", value.transpose(-1, -2).contiguous().transpose(-1, -2)
        order = tuple(reversed(range(value.dim())))
        yield "reversed_strides", value.permute(order).contiguous().permute(order)


def expanded(value: Tensor, size: int, dim: int = 0) -> Tensor:
    """Return ``value`` repeated ``size`` times along ``dim`` by stride 0, without additional memory."""
    return value.select(dim, 0).unsqueeze(dim).expand(*value.shape[:dim], size, *value.shape[dim + 1 :])
