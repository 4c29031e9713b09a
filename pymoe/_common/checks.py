"""Checks of arguments: one contract for the reference and the native operators.

Every message names the operator, the argument, the rule and the value found. The mistake determines the exception:
:class:`TypeError` for a wrong type or dtype, :class:`ValueError` for a wrong value (rank, size, device, range),
:class:`IndexError` for an index out of range.

These checks take microseconds even if nothing is wrong. Therefore the callers of fast operators first test the usual
case in one expression, with functions such as ``is_matrix`` of :mod:`pymoe._common.contracts`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe._common.types import FLOATING, Gate, Routing


def tensor(operator: str, argument: str, value: object) -> None:
    """Raise unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{operator}: {argument} must be a tensor, got {type(value).__name__}")


def floating(operator: str, argument: str, value: Tensor) -> None:
    """Raise unless ``value`` is a tensor of one of the four floating dtypes."""
    tensor(operator, argument, value)
    if value.dtype not in FLOATING:
        raise TypeError(
            f"{operator}: {argument} must have dtype float32, float64, bfloat16 or float16, got {value.dtype}"
        )


def dtype(operator: str, argument: str, value: Tensor, *expected: torch.dtype) -> None:
    """Raise unless ``value`` is a tensor of one of the dtypes ``expected``."""
    tensor(operator, argument, value)
    if value.dtype not in expected:
        names = " or ".join(str(one).removeprefix("torch.") for one in expected)
        raise TypeError(f"{operator}: {argument} must have dtype {names}, got {value.dtype}")


def rank(operator: str, argument: str, value: Tensor, layout: str) -> None:
    """Raise unless ``value`` has as many dimensions as ``layout`` names, e.g. ``"(T, H)"``."""
    expected = layout.count(",") + (0 if layout.endswith(",)") else 1)
    if value.dim() != expected:
        raise ValueError(f"{operator}: {argument} must have shape {layout}, got {tuple(value.shape)}")


def size(operator: str, argument: str, value: Tensor, dim: int, expected: int, meaning: str) -> None:
    """Raise unless dimension ``dim`` of ``value`` has size ``expected``; the message gives ``meaning``, the origin of
    that size.
    """
    if value.shape[dim] != expected:
        raise ValueError(
            f"{operator}: {argument} must have size {expected} ({meaning}) in dimension {dim}, got {tuple(value.shape)}"
        )


def same_device(operator: str, argument: str, value: Tensor, other_argument: str, other: Tensor) -> None:
    """Raise unless ``value`` and ``other`` are on the same device."""
    if value.device != other.device:
        raise ValueError(
            f"{operator}: {argument} must be on the device of {other_argument} ({other.device}), got {value.device}"
        )


def integer(operator: str, argument: str, value: object, low: int, high: int | None, meaning: str) -> None:
    """Raise unless ``value`` is an int and low <= value <= high; the message gives the range as ``meaning``. None for
    ``high`` means no upper limit.
    """
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{operator}: {argument} must be an int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{operator}: {argument} must be {meaning}, got {value}")


def flag(operator: str, argument: str, value: object) -> None:
    """Raise unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{operator}: {argument} must be a bool, got {type(value).__name__}")


def choice(operator: str, argument: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of the strings ``allowed``."""
    if not isinstance(value, str):
        raise TypeError(f"{operator}: {argument} must be a string, got {type(value).__name__}")
    if value not in allowed:
        raise ValueError(f"{operator}: {argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def usable_device(device: torch.device | str | int, what: str) -> torch.device:
    """Return the device. If this process cannot use it, raise ValueError with a message that begins with ``what``."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        there = f"{torch.__version__}, and sees {torch.cuda.device_count()} CUDA devices"
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{what} must be a device of this machine, got {str(device)!r}: torch is {there} ({reason})"
        ) from error
    return found


def routing(operator: str, value: Routing, rows_argument: str, rows: Tensor) -> None:
    """Raise unless ``value`` is a Routing of tensors with the right dtypes, ranks and device.

    ``rows`` is a tensor on the device that they must have; messages call it ``rows_argument``.
    """
    if not (isinstance(value, tuple) and len(value) == 3) or isinstance(value, Gate):
        raise TypeError(f"{operator}: routing must be a Routing, got {type(value).__name__}")
    slot, token, offsets = value
    for argument, part, layout in (
        ("routing.slot", slot, "(T, K)"),
        ("routing.token", token, "(S,)"),
        ("routing.offsets", offsets, "(E + 1,)"),
    ):
        dtype(operator, argument, part, torch.int32)
        rank(operator, argument, part, layout)
        same_device(operator, argument, part, rows_argument, rows)
    if offsets.shape[0] < 2:
        seen = tuple(offsets.shape)
        raise ValueError(f"{operator}: routing.offsets must have shape (E + 1,) with E >= 1, got {seen}")


def in_range(operator: str, argument: str, indices: Tensor, low: int, end: int, name: str) -> None:
    """Raise IndexError unless low <= index < end for all ``indices``, which are (T, K).

    The native CPU kernels perform this check themselves. ``name`` is the name of ``end`` in the message.
    """
    bad = (indices < low) | (indices >= end)
    if bool(bad.any()):
        token, choice = (int(i) for i in bad.nonzero()[0])
        raise IndexError(
            f"{operator}: {argument} must lie in [{low}, {name}) ({name} = {end}), got {int(indices[token, choice])} "
            f"at [{token}, {choice}]"
        )


def slots_in_range(operator: str, routing: Routing) -> None:
    """Raise unless every slot of ``routing`` is -1 or the index of a row."""
    in_range(operator, "routing.slot", routing[0], -1, routing[1].shape[0], "S")
