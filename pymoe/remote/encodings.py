"""Tensors as bytes: unchanged, in bfloat16, or in 8 bits with a scale for each block of 256 elements of a row.

The error of a float32 or float64 number x on arrival:

- ``raw``: none.
- ``bf16``: at most ``2^-8 * abs(x)``, for normal numbers up to 3.38e38; half the bytes of float32. Infinity and NaN
  are preserved.
- ``int8``: at most ``m / 254``, where m is the largest absolute value in x's block, plus the rounding error of float32
  (at most ``2^-20 * m``); in blocks with m < 1.5e-36 at most 6e-39. About a quarter of the bytes of float32. In a block
  that contains NaN, infinity or a number too large for float32, every element becomes NaN, so that no invalid result
  looks valid. A block never contains elements of two rows, because rows of a message may belong to different callers.

A tensor that ``int8`` would not make shorter, such as one with a single element per row, is sent raw. Under ``bf16``,
16-bit floating-point tensors are unchanged; under ``int8`` their values are rounded to their dtype on arrival.
Integers, booleans and complex numbers are always sent raw.
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
"""Number of elements of a row that share a scale in ``int8``; the last block of a row may have fewer."""
MAX_DIMENSIONS = 8
MAX_DIMENSION = 1 << 31
"""Largest size of a dimension."""
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
"""Dtypes by their names on the wire."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NUMPY_DTYPES = {
    **{torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16, torch.uint8: np.uint8},
    **{torch.int64: np.int64, torch.int32: np.int32, torch.int16: np.int16, torch.int8: np.int8},
}
"""Dtypes that numpy has, too. Their raw bytes are copied by numpy and not by torch, whose operators release the GIL: in
a busy process, it takes long to get the GIL back."""
ALIGNMENT = 64
"""Alignment of new memory in bytes, the same as torch's."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` on the wire; raise TypeError if it has none and cannot be sent."""
    if dtype not in NAMES:
        raise TypeError(f"pymoe.remote: a tensor of {dtype} cannot be sent; expected one of {list(NAMES)}")
    return NAMES[dtype]


def check_encoding(owner: str, encoding: Any) -> str:
    """Return ``encoding``; raise ValueError if there is no encoding of that name."""
    if encoding not in ENCODINGS:
        raise ValueError(f"{owner}: encoding must be one of {', '.join(map(repr, ENCODINGS))}, got {encoding!r}")
    return str(encoding)


def encoding_for(dtype: torch.dtype, shape: Sequence[int], encoding: str) -> str:
    """Return ``encoding``, or ``"raw"`` if the encoding would not make this tensor shorter."""
    if encoding == "raw" or not dtype.is_floating_point:
        return "raw"
    return encoding if encoded_size(dtype, shape, encoding) < encoded_size(dtype, shape, "raw") else "raw"


def encoded_size(dtype: torch.dtype, shape: Sequence[int], encoding: str) -> int:
    """Return the number of bytes of a tensor of this dtype and shape after encoding."""
    count = math.prod(shape)
    if encoding == "raw":
        return count * dtype.itemsize
    if encoding == "bf16":
        return count * 2
    blocks = math.prod(shape[:1]) * -(-math.prod(shape[1:]) // BLOCK)
    return 4 * blocks + count


def encode(tensor: Tensor, encoding: str) -> memoryview:
    """Encode a tensor and return the bytes; for ``raw`` and a contiguous CPU tensor, a view of the tensor's memory."""
    plain = tensor.dtype in _NUMPY_DTYPES and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
    if plain and encoding == "raw":
        numbers: Any = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return memoryview(numbers.reshape(-1).view(np.uint8))
    tensor = tensor.detach().to("cpu").contiguous()
    if encoding == "bf16":
        tensor = tensor.to(torch.bfloat16)
    elif encoding == "int8":
        tensor = _to_int8(_as_rows(tensor).float()) if tensor.numel() else tensor
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.resolve_conj().resolve_neg().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def decode(data: memoryview | Tensor, dtype: torch.dtype, shape: list[int], encoding: str) -> Tensor:
    """Return the decoded tensor, in aligned and writable memory.

    Bytes in a memoryview are copied (just once for ``raw``). If ``data`` is a uint8 tensor, the result may share its
    memory.

    Raises:
        WireError: the encoding does not exist for this dtype, the shape is invalid, or the number of bytes is wrong.
    """
    if encoding not in ENCODINGS or (encoding != "raw" and not dtype.is_floating_point):
        raise WireError(f"there is no encoding {encoding[:32]!r} of {dtype}")
    if len(shape) > MAX_DIMENSIONS or (shape and not (min(shape) >= 0 and max(shape) <= MAX_DIMENSION)):
        raise WireError(f"a tensor cannot have the shape {shape[: MAX_DIMENSIONS + 1]}")
    count = math.prod(shape)
    expected = count * dtype.itemsize if encoding == "raw" else encoded_size(dtype, shape, encoding)
    if data.nbytes != expected:
        raise WireError(
            f"expected {expected} bytes for {dtype} of shape {tuple(shape)} as {encoding}, got {data.nbytes}"
        )
    if not count:
        if math.prod(max(length, 1) for length in shape) > MAX_DIMENSION:
            raise WireError(f"a tensor without elements cannot have the shape {tuple(shape)}")
        return torch.empty(shape, dtype=dtype)
    if encoding == "raw" and dtype in _NUMPY_DTYPES and not isinstance(data, Tensor):
        memory = np.empty(expected + ALIGNMENT, np.uint8)
        begin = -memory.__array_interface__["data"][0] % ALIGNMENT
        memory = memory[begin : begin + expected]
        memory[:] = np.frombuffer(data, np.uint8)
        return torch.from_numpy(memory.view(_NUMPY_DTYPES[dtype]).reshape(shape))
    if encoding == "int8":
        scales = _own(data[: expected - count], torch.float32)
        codes = _own(data[expected - count :], torch.int8).view(shape)
        flat = _from_int8(_as_rows(codes), scales).to(dtype)
    elif encoding == "bf16":
        flat = _own(data, torch.bfloat16).to(dtype)
    elif dtype is torch.bool:
        flat = _own(data, torch.uint8) != 0  # a bool whose byte is neither 0 nor 1 has undefined behaviour
    else:
        flat = _own(data, dtype)
    return flat.view(shape)


def _own(data: memoryview | Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes ``data`` as a vector of ``dtype``. A memoryview is copied into aligned, writable memory."""
    if isinstance(data, Tensor):
        return data.view(dtype)
    memory = torch.empty(data.nbytes, dtype=torch.uint8)
    memory.numpy()[:] = np.frombuffer(data, np.uint8)
    return memory.view(dtype)


def _as_rows(tensor: Tensor) -> Tensor:
    """Return ``tensor``, which must not be empty, as a matrix, with all dimensions after the first flattened."""
    return tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1)


def _parts(rows: Tensor) -> list[Tensor]:
    """Divide the rows into blocks; return a view of all full blocks and a view of the shorter last block of each row.

    The shape of a view is (rows, blocks, block size). A view without elements is left out.
    """
    full = rows.shape[1] // BLOCK * BLOCK
    parts = rows[:, :full].unflatten(1, (-1, BLOCK)), rows[:, None, full:]
    return [part for part in parts if part.numel()]


def _to_int8(rows: Tensor) -> Tensor:
    """Return the encoded rows as a uint8 vector: the float32 scales of all blocks, then the codes, as int8."""
    scales, codes = [], []
    for part in _parts(rows):
        scale = (part.abs().amax(2) / 127).clamp(min=SMALLEST_SCALE)  # clamp() preserves NaN
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
    return numbers.clamp_(-LARGEST, LARGEST)  # 127 * scale may overflow to infinity; clamp_() preserves NaN
