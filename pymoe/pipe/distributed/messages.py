"""What ranks send to each other: a key, a description, and tensors as they lie in memory.

The description has everything but the tensors' contents: structure, shapes, strides, which of them require gradients,
and the leaves that are not tensors. Most messages have the description of an earlier one, so it is sent when it is new.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from pymoe._torch_private import pytree
from pymoe.pipe.execution.graph import BoundaryTensor, GradAccumulator, StageValue, receive

__all__ = [
    "Key",
    "Layout",
    "Message",
    "Subject",
    "describe_tensors",
    "describe_values",
    "empty",
    "flat",
    "layouts_of",
    "read_tensors",
    "read_values",
]


class Subject(IntEnum):
    """What a message is about."""

    VALUES = 0
    """That a stage has made for a micro-batch."""
    GRADIENTS = 1
    """Of these values."""
    TIED_GRADIENTS = 2
    """Of parameters that a stage shares with others."""
    COPY = 3
    """Of such parameters."""


class Key(NamedTuple):
    """Which message."""

    step: int
    subject: Subject
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        what = {
            Subject.VALUES: "the values",
            Subject.GRADIENTS: "the gradients of the values",
            Subject.TIED_GRADIENTS: "the gradients of shared parameters",
            Subject.COPY: "the shared parameters",
        }[self.subject]
        is_whole = self.subject in (Subject.TIED_GRADIENTS, Subject.COPY)
        return f"{what} of stage {self.stage}" + ("" if is_whole else f" for micro-batch {self.micro_batch}")


@dataclass
class Message:
    """What one rank sends to another."""

    key: Key
    description: bytes
    tensors: list[torch.Tensor]
    notes: tuple[int, int, int] = (0, 0, 0)
    """Three numbers that go with it."""

    def read(self) -> Any:
        """Return what :func:`read_values` or :func:`read_tensors` needs of the description."""
        return layouts_of(self.description)[1]


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Tensor(NamedTuple):
    layout: Layout
    requires_grad: bool


def describe_values(values: Sequence[StageValue]) -> tuple[bytes, list[torch.Tensor]]:
    """Return the description of values, and their tensors.

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
    layouts = [leaf.layout for leaves, _ in described for leaf in leaves if type(leaf) is _Tensor]
    return _dump((layouts, described)), tensors


def describe_tensors(tensors: Sequence[torch.Tensor | None]) -> tuple[bytes, list[torch.Tensor]]:
    """Return the description of tensors, some of which may be missing, and those that are there."""
    laid_out = [None if tensor is None else _lay_out(tensor) for tensor in tensors]
    there = [found for found in laid_out if found is not None]
    description = [layout for _, layout in there], [found is not None for found in laid_out]
    return _dump(description), [tensor for tensor, _ in there]


def layouts_of(description: bytes) -> tuple[list[Layout], Any]:
    """Return the layouts of a message's tensors; and what :func:`read_values` or :func:`read_tensors` needs."""
    return pickle.loads(description)


def read_values(
    described: Any, tensors: Sequence[torch.Tensor], accumulator: GradAccumulator | None
) -> list[StageValue]:
    """Return the values; gradients of those that need one go to ``accumulator``, by their number in ``tensors``."""
    number = 0
    values = []
    for leaves, structure in described:
        read: list[Any] = []
        for leaf in leaves:
            if type(leaf) is _Tensor:
                read.append(BoundaryTensor(tensors[number], accumulator if leaf.requires_grad else None, number))
                number += 1
            else:
                read.append(leaf)
        values.append(StageValue(read, structure))
    return values


def read_tensors(are_there: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the tensors, with None for those that were missing."""
    rest = iter(tensors)
    return [next(rest) if is_there else None for is_there in are_there]


def empty(layout: Layout, device: torch.device) -> torch.Tensor:
    """Make a tensor to receive into."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor that was laid out, as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _lay_out(tensor: torch.Tensor) -> tuple[torch.Tensor, Layout]:
    """Return the tensor without gaps in its memory, and its layout."""
    is_plain = tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        what = f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}"
        raise TypeError(f"{what} cannot be sent between ranks: only dense strided tensors can")
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
    """Writes pytree's leaf specification as a reference: torch warns of the class of those that it makes itself."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is type(_LEAF) and obj == _LEAF:
            return _leaf, ()
        return NotImplemented


_LEAF = pytree.tree_flatten(0)[1]


def _leaf() -> Any:
    return _LEAF


def _dump(what: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(what)
    except Exception as error:
        raise TypeError(f"a value cannot be sent between ranks: it cannot be pickled ({error})") from error
    return buffer.getvalue()
