"""Messages between ranks: a key, a description, and tensors as they lie in memory.

The description has everything except the tensors' contents: structure, shapes, strides, which tensors require
gradients, and leaves that are not tensors. Most messages have the same description as an earlier one, so a description
is only sent when it is new.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from pymoe._torch_private import pytree
from pymoe.pipe.execution.graph import BoundaryTensor, GradAccumulator, StageValue, memory_of, receive


class Subject(IntEnum):
    """Names the content of a message."""

    VALUES = 0
    GRADIENTS = 1
    TIED_GRADIENTS = 2
    COPY = 3


WORDS = ("the values", "the gradients of the values", "the gradients of shared parameters", "the shared parameters")
"""The subjects of messages, in words: values of a micro-batch, or parameters that a stage shares with others."""


class Key(NamedTuple):
    """The key that identifies a message."""

    step: int
    subject: Subject
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        of = f" for micro-batch {self.micro_batch}" if self.subject in (Subject.VALUES, Subject.GRADIENTS) else ""
        return f"{WORDS[self.subject]} of stage {self.stage}{of}"


class TensorLayout(NamedTuple):
    """Describes how a tensor lies in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class TensorPlace(NamedTuple):
    """Says where in the message a tensor is."""

    number: int
    """The index of the message's tensor that contains it."""
    view: tuple[TensorLayout, int] | None
    """Layout and offset within that tensor, if it holds the bytes of several; None: the whole tensor."""
    requires_grad: bool
    """True if the receiver sends a gradient back."""
    is_fixed: bool
    """True if the tensor must not be changed in place (:class:`.BoundaryTensor`)."""
    taken_until: int
    """The last stage on a rank other than the receiver's that takes the same memory; -1: none."""


def describe_values(
    values: Sequence[StageValue], taken_until: Callable[[torch.Tensor], int] = lambda tensor: -1
) -> tuple[bytes, list[torch.Tensor]]:
    """Return the description of values, and their tensors.

    ``taken_until``: the last stage on a rank other than the receiver's that takes the memory of a tensor.

    Raises:
        TypeError: something in them cannot be sent to another process.
        RuntimeError: a stage that has taken one of the tensors has changed it in place.
    """
    boundaries = [leaf for value in values for leaf in value.leaves if type(leaf) is BoundaryTensor]
    sent, views = _lay_out_all([receive(boundary, None) for boundary in boundaries])
    places = iter(
        TensorPlace(number, view, boundary.accumulator is not None, boundary.is_fixed, taken_until(boundary.tensor))
        for boundary, (number, view) in zip(boundaries, views, strict=True)
    )
    described = [
        ([next(places) if type(leaf) is BoundaryTensor else leaf for leaf in value.leaves], value.structure)
        for value in values
    ]
    return _dump(([layout for _, layout in sent], described)), [tensor for tensor, _ in sent]


def describe_tensors(tensors: Sequence[torch.Tensor | None]) -> tuple[bytes, list[torch.Tensor]]:
    """Return the description of tensors, some of which may be missing, and the tensors that are present."""
    there = [_lay_out(_checked(tensor)) for tensor in tensors if tensor is not None]
    description = [layout for _, layout in there], [tensor is not None for tensor in tensors]
    return _dump(description), [tensor for tensor, _ in there]


def read_values(
    described: Any, tensors: Sequence[torch.Tensor], accumulator: GradAccumulator | None
) -> list[StageValue]:
    """Return the values of a message. Gradients of their tensors go to ``accumulator``, numbered in the order of the
    tensors.

    ``described``: the second part of the unpickled description; the first part has the layouts of ``tensors``.
    """
    values = []
    count = 0
    for leaves, structure in described:
        for place, leaf in enumerate(leaves):
            if type(leaf) is TensorPlace:
                tensor = tensors[leaf.number]
                if leaf.view is not None:
                    layout, offset = leaf.view
                    whole = tensor[: tensor.numel() // layout.dtype.itemsize * layout.dtype.itemsize]
                    tensor = whole.view(layout.dtype).as_strided(layout.shape, layout.stride, offset).detach()
                receiver = accumulator if leaf.requires_grad else None
                leaves[place] = boundary = BoundaryTensor(tensor, receiver, count, leaf.is_fixed)
                boundary.taken_until = leaf.taken_until
                count += 1
        values.append(StageValue(leaves, structure))
    if accumulator is not None:
        accumulator.grads = [None] * count
    return values


def read_tensors(are_there: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the tensors, with None for those that were missing."""
    rest = iter(tensors)
    return [next(rest) if is_there else None for is_there in are_there]


def empty(layout: TensorLayout, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor with this layout, to receive into."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a laid-out tensor as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _lay_out_all(
    tensors: Sequence[torch.Tensor],
) -> tuple[list[tuple[torch.Tensor, TensorLayout]], list[tuple[int, tuple[TensorLayout, int] | None]]]:
    """Return the tensors to send. Also return, for every given tensor, the index of the sent tensor that contains it,
    and its part of the sent tensor (None: the whole).

    Tensors that overlap in memory are sent as the bytes that contain them, so that they overlap at the receiver as
    well: an in-place change of one changes the others, or is refused, as in one process.
    """
    sent: list[tuple[torch.Tensor, TensorLayout]] = []
    found: list[tuple[int, tuple[TensorLayout, int] | None]] = [(0, None)] * len(tensors)
    for group in _overlapping([_checked(tensor) for tensor in tensors]):
        number = len(sent)
        if len(group) == 1:
            sent.append(_lay_out(tensors[group[0]]))
            found[group[0]] = number, None
            continue
        spans = [_span(tensors[one]) for one in group]
        first, last = min(spans)[0] // ALIGNED * ALIGNED, max(end for _, end in spans)
        storage = tensors[group[0]].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, first, (last - first,), (1,))
        sent.append((whole, TensorLayout(torch.uint8, (last - first,), (1,))))
        for one in group:
            tensor = tensors[one]
            if tensor.is_conj() or tensor.is_neg():
                raise TypeError("conjugates and negatives that share memory with other values cannot be sent: copy one")
            layout = TensorLayout(tensor.dtype, tuple(tensor.shape), tensor.stride())
            found[one] = number, (layout, int(tensor.storage_offset()) - first // tensor.itemsize)
    return sent, found


ALIGNED = 16
"""Alignment in bytes, a multiple of the element sizes of all dtypes."""


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the indices of the tensors, in groups whose ranges of memory overlap."""
    groups: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault(memory_of(tensor) if tensor.numel() else -1 - number, []).append(number)
    found: list[list[int]] = []
    for group in groups.values():
        if len(group) > 1:
            end = -1
            for number in sorted(group, key=lambda number: _span(tensors[number])):
                if _span(tensors[number])[0] >= end:
                    found.append([])
                found[-1].append(number)
                end = max(end, _span(tensors[number])[1])
        else:
            found.append(group)
    return sorted(found)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a strided tensor in its storage, and the byte after its last."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + int(elements) * tensor.itemsize


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor. Raise TypeError if it cannot be sent."""
    is_plain = tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        what = f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}"
        raise TypeError(f"{what} cannot be sent between ranks: only dense strided tensors can")
    return tensor


def _lay_out(tensor: torch.Tensor) -> tuple[torch.Tensor, TensorLayout]:
    """Return the tensor's contents without gaps in memory, and its layout."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():  # the strides of a tensor without gaps
        tensor = tensor.contiguous()
    return tensor, TensorLayout(tensor.dtype, tuple(tensor.shape), tensor.stride())


class _Pickler(pickle.Pickler):
    """Pickles pytree's leaf specification by reference. Otherwise unpickling would call its class, and torch warns
    about such calls.
    """

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
