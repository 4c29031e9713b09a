"""Values as they travel: a description, and tensors that are sent as they lie in memory.

The description has everything but the tensors' contents: structure, shapes, strides, what requires gradients, and the
leaves that are no tensors. Most messages have the description of one before, so it travels only when it is new.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from pymoe.pipe.execution.graph import BoundaryTensor, GradAccumulator, StageValue, receive

__all__ = [
    "Layout",
    "describe_tensors",
    "describe_values",
    "empty",
    "flat",
    "layouts_of",
    "read_tensors",
    "read_values",
]


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Tensor(NamedTuple):
    layout: Layout
    needs_gradient: bool


def describe_values(values: Sequence[StageValue]) -> tuple[bytes, list[torch.Tensor]]:
    """The description of values, and their tensors.

    Raises:
        TypeError: something in them cannot be sent to another process.
        RuntimeError: a stage that has taken one has changed it in place.
    """
    tensors: list[torch.Tensor] = []
    described = []
    for value in values:
        leaves: list[Any] = []
        for leaf in value.leaves:
            if type(leaf) is BoundaryTensor:
                tensor, layout = _lay_out(receive(leaf, None))
                tensors.append(tensor)
                leaves.append(_Tensor(layout, leaf.accumulator is not None))
            else:
                leaves.append(leaf)
        described.append((leaves, value.structure))
    return _dump(([_layouts(leaves) for leaves, _ in described], described)), tensors


def describe_tensors(tensors: Sequence[torch.Tensor | None]) -> tuple[bytes, list[torch.Tensor]]:
    """The description of tensors, some of which may be missing, and those that are there."""
    laid_out = [None if tensor is None else _lay_out(tensor) for tensor in tensors]
    layouts = [None if found is None else found[1] for found in laid_out]
    return _dump(([layouts], layouts)), [found[0] for found in laid_out if found is not None]


def layouts_of(description: bytes) -> tuple[list[Layout], Any]:
    """Of the tensors that go with a description; and what :func:`read_values` or :func:`read_tensors` needs of it."""
    layouts, rest = pickle.loads(description)
    return [layout for some in layouts for layout in some if layout is not None], rest


def read_values(
    described: Any, tensors: Sequence[torch.Tensor], accumulator: GradAccumulator | None
) -> list[StageValue]:
    """The values; ``accumulator`` takes the gradients of those that need one, by their number among ``tensors``."""
    number = 0
    values = []
    for leaves, structure in described:
        read: list[Any] = []
        for leaf in leaves:
            if type(leaf) is _Tensor:
                read.append(BoundaryTensor(tensors[number], accumulator if leaf.needs_gradient else None, number))
                number += 1
            else:
                read.append(leaf)
        values.append(StageValue(read, structure))
    return values


def read_tensors(layouts: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The tensors, with None for those that were missing."""
    rest = iter(tensors)
    return [None if layout is None else next(rest) for layout in layouts]


def empty(layout: Layout, device: torch.device) -> torch.Tensor:
    """A tensor to receive into."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor that was laid out, as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _layouts(leaves: Sequence[Any]) -> list[Layout]:
    return [leaf.layout for leaf in leaves if type(leaf) is _Tensor]


def _lay_out(tensor: torch.Tensor) -> tuple[torch.Tensor, Layout]:
    """The tensor, without gaps in its memory."""
    is_plain = tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        what = f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}"
        raise TypeError(f"{what} cannot go from rank to rank: only plain dense tensors can")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not _is_without_gaps(tensor):
        tensor = tensor.contiguous()
    return tensor, Layout(tensor.dtype, tuple(tensor.shape), tensor.stride())


def _is_without_gaps(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class _Pickler(pickle.Pickler):
    """With a leaf's place in a structure by reference: torch warns of the class of those that it makes itself."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is type(_LEAF) and obj == _LEAF:
            return _leaf, ()
        return NotImplemented


_LEAF = _pytree.tree_flatten(0)[1]


def _leaf() -> Any:
    return _LEAF


def _dump(what: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(what)
    except Exception as error:
        raise TypeError(f"a value that goes from rank to rank cannot be sent to another process: {error}") from error
    return buffer.getvalue()
