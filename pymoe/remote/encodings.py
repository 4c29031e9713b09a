"""Tensors as bytes: as they are, in bfloat16, or in 8 bits with a scale for each block of 256 numbers of a row.

How far a number x of float32 or float64 may be from what arrives:

- ``raw``: not at all.
- ``bf16``: at most ``2^-8 * abs(x)``, for normal numbers up to 3.38e38; half the bytes of float32. Infinity and NaN
  stay.
- ``int8``: at most ``m / 254`` for the largest absolute value m of x's block, but for rounding in float32 (a relative
  2^-20 of m) and blocks with m < 1.5e-36, whose error is at most 6e-39; about a quarter of the bytes of float32. In a
  block with NaN, infinity or a number beyond float32 everything becomes NaN: nothing passes for a number that is none.
  A block never holds numbers of two rows: those that share a message may belong to different callers.

Where ``int8`` would not make a tensor shorter, as one with a number a row, it is sent raw. 16-bit floating-point
tensors stay as they are under ``bf16``; their values are rounded to their dtype on arrival under ``int8``. Integers,
booleans and complex numbers are always sent raw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pymoe.remote.errors import WireError

ENCODINGS = ("raw", "bf16", "int8")
BLOCK = 256
"""Numbers of a row that share one scale in ``int8``; a row has a last block of fewer."""
MOST_DIMENSIONS = 8
LONGEST_DIMENSION = 1 << 31
SMALLEST_SCALE, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
"""Names of dtypes on the wire."""
_OF_NUMPY = {
    **{torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16, torch.uint8: np.uint8},
    **{torch.int64: np.int64, torch.int32: np.int32, torch.int16: np.int16, torch.int8: np.int8},
}
"""What numpy knows, too. Short tensors are coded by numpy alone: an operator of torch lets go of the interpreter's
lock, and the other threads of a busy process take it."""
ALIGNMENT = 64
"""Of new memory, in bytes: as torch's own."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` on the wire; raises TypeError for one that cannot be sent."""
    if dtype not in NAMES:
        raise TypeError(f"pymoe.remote: a tensor of {dtype} cannot be sent; expected one of {list(NAMES)}")
    return NAMES[dtype]


def check_encoding(owner: str, encoding: Any) -> str:
    """Return ``encoding``; raises ValueError if there is none of that name."""
    if encoding not in ENCODINGS:
        raise ValueError(f"{owner}: encoding must be one of {', '.join(map(repr, ENCODINGS))}, got {encoding!r}")
    return str(encoding)


def encoding_for(dtype: torch.dtype, shape: Sequence[int], encoding: str) -> str:
    """Return how a tensor is sent where ``encoding`` is asked for: raw, where that takes no more bytes."""
    if encoding == "raw" or not dtype.is_floating_point:
        return "raw"
    return encoding if encoded_size(dtype, shape, encoding) < encoded_size(dtype, shape, "raw") else "raw"


def encoded_size(dtype: torch.dtype, shape: Sequence[int], encoding: str) -> int:
    """Return the bytes of a tensor."""
    count = math.prod(shape)
    if encoding == "raw":
        return count * dtype.itemsize
    return count * 2 if encoding == "bf16" else 4 * _blocks_of(shape) + count


def _blocks_of(shape: Sequence[int]) -> int:
    return math.prod(shape[:1]) * -(-math.prod(shape[1:]) // BLOCK)


def encode(tensor: Tensor, encoding: str) -> memoryview:
    """Return the bytes of a tensor: with ``raw`` those of its memory, without a copy, where it is contiguous."""
    if encoding == "raw" and _is_plain(tensor):
        numbers: Any = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return memoryview(numbers.reshape(-1).view(np.uint8))
    tensor = tensor.detach().to("cpu").contiguous()
    if encoding == "bf16":
        tensor = tensor.to(torch.bfloat16)
    elif encoding == "int8":
        tensor = _to_int8(_rows_of(tensor).float()) if tensor.numel() else tensor
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.resolve_conj().resolve_neg().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def decode(data: memoryview | Tensor, dtype: torch.dtype, shape: list[int], encoding: str) -> Tensor:
    """Return the tensor in memory of its own, aligned and writable.

    Bytes of a message are copied, for ``raw`` once. Bytes that are a tensor already become a part of the result.

    Raises:
        WireError: no such encoding of this dtype, a shape that no tensor has, or another number of bytes.
    """
    if encoding not in ENCODINGS or (encoding != "raw" and not dtype.is_floating_point):
        raise WireError(f"there is no encoding {encoding[:32]!r} of {dtype}")
    if len(shape) > MOST_DIMENSIONS or not all(0 <= length <= LONGEST_DIMENSION for length in shape):
        raise WireError(f"a tensor cannot have the shape {shape[: MOST_DIMENSIONS + 1]}")
    count = math.prod(shape)
    if not count:
        shape = [min(length, LONGEST_DIMENSION) for length in shape]
    expected = encoded_size(dtype, shape, encoding)
    if data.nbytes != expected:
        raise WireError(
            f"expected {expected} bytes for {dtype} of shape {tuple(shape)} as {encoding}, got {data.nbytes}"
        )
    if not count:
        if math.prod(max(length, 1) for length in shape) > LONGEST_DIMENSION:
            raise WireError(f"a tensor without elements cannot have the shape {tuple(shape)}")
        return torch.empty(shape, dtype=dtype)
    if encoding == "int8":
        scales = _own(data[: expected - count], torch.float32)
        codes = _own(data[expected - count :], torch.int8).view(shape)
        flat = _from_int8(_rows_of(codes), scales).to(dtype)
    elif encoding == "bf16":
        flat = _own(data, torch.bfloat16).to(dtype)
    elif dtype in _OF_NUMPY and not isinstance(data, Tensor):
        memory = aligned(expected)
        memory[:] = np.frombuffer(data, np.uint8)
        return torch.from_numpy(memory.view(_OF_NUMPY[dtype]).reshape(shape))
    elif dtype is torch.bool:
        flat = _own(data, torch.uint8) != 0  # whatever else a byte holds: a bool of any other value is undefined
    else:
        flat = _own(data, dtype)
    return flat.view(shape)


def aligned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return new memory of ``size`` bytes, aligned as that of torch's tensors is."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    begin = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[begin : begin + size]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor is at hand, and holds its numbers one after the other and as they are."""
    return tensor.dtype in _OF_NUMPY and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def _own(data: memoryview | Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes as numbers, in new memory where those of a message are unaligned, and not to be written to."""
    if isinstance(data, Tensor):
        return data.view(dtype)
    memory = torch.empty(data.nbytes, dtype=torch.uint8)
    memory.numpy()[:] = np.frombuffer(data, np.uint8)
    return memory.view(dtype)


def _rows_of(tensor: Tensor) -> Tensor:
    """Return the tensor, which has elements, with what lies behind its first dimension in one."""
    return tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1)


def _parts(rows: Tensor) -> list[Tensor]:
    """Return views of the rows as (rows, blocks, numbers of a block): the full blocks, and the shorter last ones."""
    full = rows.shape[1] // BLOCK * BLOCK
    parts = rows[:, :full].unflatten(1, (-1, BLOCK)), rows[:, None, full:]
    return [part for part in parts if part.numel()]


def _to_int8(rows: Tensor) -> Tensor:
    """Return, as bytes, the scales of all blocks and behind them the codes: whole numbers from -127 to 127."""
    scales, codes = [], []
    for part in _parts(rows):
        scale = (part.abs().amax(2) / 127).clamp(min=SMALLEST_SCALE)  # clamp() keeps NaN
        code = (part / scale[:, :, None]).nan_to_num(0.0, 0.0, 0.0).round_().clamp_(-127, 127)
        scales.append(scale)
        codes.append(code.flatten(1).to(torch.int8))
    return torch.cat([torch.cat(one, 1).view(-1).view(torch.uint8) for one in (scales, codes)])


def _from_int8(codes: Tensor, scales: Tensor) -> Tensor:
    scales = torch.where(scales.isfinite(), scales, torch.nan).view(len(codes), -1)
    numbers = codes.float()
    begin = 0
    for part in _parts(numbers):
        part *= scales[:, begin : begin + part.shape[1], None]
        begin += part.shape[1]
    return numbers.clamp_(-LARGEST, LARGEST)  # 127 * scale may round up to infinity; NaN stays
