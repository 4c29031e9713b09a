"""What ranks send to each other: a key, a description, and tensors as they lie in memory.

The description has everything but the tensors' contents: structure, shapes, strides, which of them require gradients,
and the leaves that are not tensors. Most messages have the description of an earlier one, so it is sent when it is new.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from pymoe._torch_private import pytree
from pymoe.pipe.execution.graph import BoundaryTensor, GradAccumulator, StageValue, receive


class Subject(IntEnum):
    """What a message is about."""

    VALUES = 0
    GRADIENTS = 1
    TIED_GRADIENTS = 2
    COPY = 3


WORDS = ("the values", "the gradients of the values", "the gradients of shared parameters", "the shared parameters")
"""What a stage has made for a micro-batch, or what concerns the parameters that it shares with others."""


class Key(NamedTuple):
    """Which message."""

    step: int
    subject: Subject
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        of = f" for micro-batch {self.micro_batch}" if self.subject in (Subject.VALUES, Subject.GRADIENTS) else ""
        return f"{WORDS[self.subject]} of stage {self.stage}{of}"


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    """Whether the receiver sends back a gradient."""


def describe_values(values: Sequence[StageValue]) -> tuple[bytes, list[torch.Tensor]]:
    """Return the description of values, and their tensors.

    Raises:
        TypeError: something in them cannot be sent to another process.
        RuntimeError: a stage that has taken one has changed it in place.
    """
    tensors: list[torch.Tensor] = []
    layouts: list[Layout] = []
    described = []
    for value in values:
        leaves = list(value.leaves)
        for place, leaf in enumerate(leaves):
            if type(leaf) is BoundaryTensor:
                tensor, leaves[place] = _lay_out(receive(leaf, None), leaf.accumulator is not None)
                tensors.append(tensor)
                layouts.append(leaves[place])
        described.append((leaves, value.structure))
    return _dump((layouts, described)), tensors


def describe_tensors(tensors: Sequence[torch.Tensor | None]) -> tuple[bytes, list[torch.Tensor]]:
    """Return the description of tensors, some of which may be missing, and those that are there."""
    there = [_lay_out(tensor) for tensor in tensors if tensor is not None]
    description = [layout for _, layout in there], [tensor is not None for tensor in tensors]
    return _dump(description), [tensor for tensor, _ in there]


def read_values(
    described: Any, tensors: Sequence[torch.Tensor], accumulator: GradAccumulator | None
) -> list[StageValue]:
    """Return the values; gradients of those that need one go to ``accumulator``, by their number in ``tensors``.

    A description is unpickled to the layouts of the tensors, and ``described``.
    """
    arrived = enumerate(tensors)
    values = []
    for leaves, structure in described:
        for place, leaf in enumerate(leaves):
            if type(leaf) is Layout:
                number, tensor = next(arrived)
                leaves[place] = BoundaryTensor(tensor, accumulator if leaf.requires_grad else None, number)
        values.append(StageValue(leaves, structure))
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


def _lay_out(tensor: torch.Tensor, requires_grad: bool = False) -> tuple[torch.Tensor, Layout]:
    """Return the tensor without gaps in its memory, and its layout."""
    is_plain = tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        what = f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}"
        raise TypeError(f"{what} cannot be sent between ranks: only dense strided tensors can")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():  # which has no gaps
        tensor = tensor.contiguous()
    return tensor, Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), requires_grad)


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
