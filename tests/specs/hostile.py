"""Wrong raw calls, which a caller who bypasses Python's checks may pass to an operator of ``torch.ops.pymoe``.

A kernel may refuse such a call with an exception or return something; it must never touch memory outside its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specs import RawCall

INTEGERS = (torch.int32, torch.int64)


def hostile_indices(index: Tensor, limit: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs: ``index`` with values out of range, in one place or everywhere, and out of order."""
    info = torch.iinfo(index.dtype)
    for value in (-2, -1, limit, limit + 1, info.min, info.max, info.min + 1, info.max - 1):
        yield f"all_{value}", torch.full_like(index, value)
        for place, name in ((0, "first"), (-1, "last"), (index.numel() // 2, "middle")):
            copy = index.clone()
            copy.view(-1)[place] = value
            yield f"{name}_{value}", copy
    yield "reversed", index.flatten().flip(0).view(index.shape)
    yield "all_equal", torch.full_like(index, int(index.view(-1)[-1]))
    yield (
        "alternating",
        torch.where(torch.arange(index.numel()).view(index.shape) % 2 == 0, info.min, info.max).to(index),
    )


def hostile_shapes(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs of another shape, layout or dtype than the operator expects."""
    yield "empty", value.new_empty((0,) * value.dim())
    yield "scalar", value.new_zeros(())
    yield "flat", value.flatten()
    yield "deeper", value.unsqueeze(0)
    for dim in range(value.dim()):
        if value.shape[dim] > 1:
            yield f"shorter_{dim}", value.narrow(dim, 0, value.shape[dim] - 1).contiguous()
            yield (
                f"stepped_{dim}",
                value.repeat_interleave(2, dim)
                .index_select(dim, torch.arange(2 * value.shape[dim]))
                .as_strided(value.shape, [2 * s if i == dim else s for i, s in enumerate(value.stride())]),
            )
        yield f"longer_{dim}", torch.cat([value, value.narrow(dim, 0, min(1, value.shape[dim]))], dim)
    yield "bool", value.bool()
    yield "int16", value.to(torch.int16)
    yield "float64", value.double()
    yield "complex", value.to(torch.complex64)
    yield "meta", value.to("meta")


def hostile_calls(call: RawCall) -> Iterator[RawCall]:
    """Yield ``call`` with one argument at a time replaced."""
    limit = max((value.shape[0] for value in call.args if isinstance(value, Tensor) and value.dim()), default=1)
    for position, value in enumerate(call.args):
        replacements: list[tuple[str, Any]] = []
        if isinstance(value, Tensor):
            if value.dtype in INTEGERS and value.numel():
                replacements += hostile_indices(value, limit)
            replacements += hostile_shapes(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            replacements += [(str(bad), bad) for bad in (-(2**63), -1, 0, 2**31, 2**63 - 1)]
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            replacements.append(("no_tensors", []))
            replacements += [(name, [*value[1:], bad]) for name, bad in hostile_shapes(value[0])]
        for name, bad in replacements:
            yield replace(
                call,
                name=f"{call.name}-argument_{position}-{name}",
                args=(*call.args[:position], bad, *call.args[position + 1 :]),
            )
