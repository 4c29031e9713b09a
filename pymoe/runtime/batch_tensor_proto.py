"""Prototypes of the tensors in requests: what a tensor must be like, apart from its number of rows and its values."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

DUMMY_BATCH_SIZE = 3
"""Number of rows of the batch in a trial run of an expert. It is neither 0 nor 1, because these hide mistakes: an
expert that doubles the number of rows would return 0 for 0, and one row broadcasts against everything."""


@dataclass(frozen=True, init=False, repr=False)
class BatchTensorProto:
    """The type of a tensor whose first dimension counts rows: its dtype and all dimensions except the first.

    Args:
        size: the dimensions after the first, or one sequence of them; none for a tensor with one element per row.
        dtype: dtype of the elements; None: torch's default dtype when the prototype is made.
        device: the device on which :meth:`make_empty` makes tensors, and on which a tensor must be to match; None:
            torch's default device for :meth:`make_empty`, any device for a match.
        layout: the memory layout of the tensor.
        requires_grad: whether tensors of :meth:`make_empty` are leaves that collect a gradient. A tensor matches
            whether or not it requires a gradient.
        pin_memory: whether :meth:`make_empty` allocates page-locked memory. A tensor matches with or without it.

    Raises:
        ValueError: a negative size, or ``requires_grad`` for a dtype that has no gradients.
        TypeError: a size that is not an integer, or an argument that is not a dtype, device or layout.
        RuntimeError: ``device`` is a string that does not name a device.

    Two prototypes are equal if all their arguments are equal; they are hashable, can be pickled, and never change.

    Example:
        >>> proto = pymoe.BatchTensorProto(8, dtype=torch.float32)  # any number of rows with 8 numbers each
        >>> proto.matches(torch.zeros(3, 8)), proto.matches(torch.zeros(3, 9))
        (True, False)
    """

    size: torch.Size
    dtype: torch.dtype
    device: torch.device | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool

    def __init__(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        for name, value, kind in (("dtype", dtype, torch.dtype), ("layout", layout, torch.layout)):
            if not isinstance(value, kind):
                raise TypeError(f"BatchTensorProto: expected {name} to be a torch.{name}, got {value!r}")
        # A torch.Size is a tuple.
        lengths: Sequence[Any] = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
        for length in lengths:
            if isinstance(length, bool) or not hasattr(length, "__index__"):
                raise TypeError(f"BatchTensorProto: a size must be an int, got {length!r} in {size}")
            if operator.index(length) < 0:
                raise ValueError(f"BatchTensorProto: a size must not be negative, got {size}")
        if requires_grad and not has_gradient(dtype):
            raise ValueError(f"BatchTensorProto: {dtype} has no gradients, so requires_grad must be False")
        set_field = object.__setattr__  # the fields are frozen
        set_field(self, "size", torch.Size(map(operator.index, lengths)))
        set_field(self, "dtype", dtype)
        set_field(self, "device", None if device is None else torch.device(device))
        set_field(self, "layout", layout)
        set_field(self, "requires_grad", bool(requires_grad))
        set_field(self, "pin_memory", bool(pin_memory))

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> BatchTensorProto:
        """Return the prototype of tensors like ``tensor``, of shape (rows, ...).

        Raises:
            TypeError: ``tensor`` is not a tensor.
            ValueError: ``tensor`` has no dimensions, and so no rows.
        """
        if not isinstance(tensor, Tensor):
            raise TypeError(f"BatchTensorProto.from_tensor: expected a tensor, got {type(tensor).__name__}")
        if tensor.dim() == 0:
            raise ValueError("BatchTensorProto.from_tensor: the first dimension counts rows, got a tensor of shape ()")
        return cls(
            *tensor.shape[1:],
            dtype=tensor.dtype,
            device=tensor.device,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            pin_memory=tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_pinned(),
        )

    @property
    def shape(self) -> torch.Size:
        """Return the shape of one row, the same as ``size``."""
        return self.size

    @property
    def differentiable(self) -> bool:
        """True if tensors of this dtype can have gradients, that is, if it is a floating-point or complex dtype."""
        return has_gradient(self.dtype)

    def replace(self, **changes: Any) -> BatchTensorProto:
        """Return a copy with other values for some arguments of the constructor; ``size`` must be a sequence."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | changes
        return BatchTensorProto(*values.pop("size"), **values)

    def make_empty(self, batch_size: int, **changes: Any) -> Tensor:
        """Return a tensor of ``batch_size`` rows of zeros; ``changes`` are as for :meth:`replace`.

        The tensor is not uninitialised, because experts are called with it: an arbitrary integer may be out of range
        for an embedding, and arbitrary floats may be NaN.
        """
        proto = self.replace(**changes) if changes else self
        return torch.zeros(
            (batch_size, *proto.size),
            dtype=proto.dtype,
            device=proto.device,
            layout=proto.layout,
            requires_grad=proto.requires_grad,
            pin_memory=proto.pin_memory,
        )

    def matches(self, tensor: Any) -> bool:
        """Return whether :meth:`check` accepts ``tensor``."""
        return self._mismatch(tensor, "") is None

    def check(self, tensor: Any, what: str = "tensor") -> None:
        """Raise unless ``tensor`` matches this prototype; ``what`` names it in the message.

        Raises:
            TypeError: ``tensor`` is not a tensor, or its dtype or layout differs.
            ValueError: its dimensions after the first differ, it has no dimensions, or its device differs from
                ``device``.
        """
        error = self._mismatch(tensor, what)
        if error is not None:
            raise error

    def _mismatch(self, tensor: Any, what: str) -> Exception | None:
        if not isinstance(tensor, Tensor):
            return TypeError(f"{what}: expected a tensor, {self._expectation()}, got {type(tensor).__name__}")
        seen = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        if tensor.dtype != self.dtype:
            return TypeError(f"{what}: expected {self._expectation()}, got {seen}")
        if tensor.dim() == 0 or tensor.shape[1:] != self.size:
            return ValueError(f"{what}: expected {self._expectation()}, got {seen}")
        if tensor.layout != self.layout:
            return TypeError(f"{what}: expected layout {self.layout}, got {tensor.layout}")
        if self.device is not None and not _is_on(tensor, self.device):
            return ValueError(f"{what}: expected a tensor on {self.device}, got one on {tensor.device}")
        return None

    def _expectation(self) -> str:
        return f"{self.dtype} of shape ({', '.join(('rows', *map(str, self.size)))}{'' if self.size else ','})"

    def __repr__(self) -> str:
        shown = [str(length) for length in self.size] + [f"dtype={self.dtype}"]
        if self.device is not None:
            shown.append(f"device={str(self.device)!r}")
        if self.layout != torch.strided:
            shown.append(f"layout={self.layout}")
        shown += [f"{name}=True" for name in ("requires_grad", "pin_memory") if getattr(self, name)]
        return f"BatchTensorProto({', '.join(shown)})"


def has_gradient(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype can have gradients."""
    return dtype.is_floating_point or dtype.is_complex


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)  # None: any GPU
