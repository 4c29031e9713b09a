"""What rows get that have too few answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pymoe.mixture.options import NAME
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.nested import nested_compare, nested_flatten, nested_pack
from pymoe.runtime.schema import under_autocast

Fallback = str | Callable[..., Any]


def check_fallback(fallback: Fallback, first: BatchTensorProto, output_protos: tuple[BatchTensorProto, ...]) -> None:
    """Raises ValueError for a fallback that is none, or cannot be one of experts with this first input and outputs."""
    if not callable(fallback) and fallback not in ("zeros", "input"):
        raise ValueError(f"{NAME}: fallback must be 'zeros', 'input' or a callable, got {fallback!r}")
    if fallback == "input" and output_protos != (first.replace(device=output_protos[0].device),):
        raise ValueError(f"{NAME}: fallback='input' needs one output like the first tensor, {first!r}")


def fall_back(
    fallback: Fallback,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    arguments: tuple[Any, Any],
    outputs_schema: Any,
    output_protos: Sequence[BatchTensorProto],
    few_T: Tensor,
) -> list[Tensor]:
    """``outputs`` with the fallback in the rows of ``few_T``, where ``outputs`` hold zeros.

    Args:
        fallback: the mixture's, not ``"zeros"``.
        outputs: flat, each (T, ...).
        inputs: flat, each (T, ...).
        arguments: the positional ones and those by name, whose tensors ``inputs`` are.
        outputs_schema: what the experts return.
        output_protos: the same, flat.
        few_T: mask of rows, on the CPU.
    """
    rows = few_T.nonzero().flatten().to(inputs[0].device)
    if fallback == "input":
        flat: Sequence[Any] = [inputs[0][rows]]
    else:
        assert callable(fallback)
        leaves = iter([x[rows] for x in inputs])
        args, kwargs = nested_pack(
            [next(leaves) if isinstance(leaf, Tensor) else leaf for leaf in nested_flatten(arguments)], arguments
        )
        result = fallback(*args, **kwargs)
        if not nested_compare(result, outputs_schema):
            raise ValueError(f"{NAME}: the fallback must return {outputs_schema!r}, got {result!r}")
        flat = nested_flatten(result)
    flat = [under_autocast(one, proto) for one, proto in zip(flat, output_protos, strict=True)]
    for proto, one in zip(output_protos, flat, strict=True):
        proto.replace(device=None).check(one, f"{NAME}: what the fallback returns")
        if len(one) != len(rows):
            raise ValueError(f"{NAME}: the fallback must return {len(rows)} rows, got {len(one)}")
    return [output.index_copy(0, rows, one) for output, one in zip(outputs, flat, strict=True)]
