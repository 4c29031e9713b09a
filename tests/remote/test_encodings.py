"""Tensors as bytes: tests the documented errors of each encoding, for any numbers."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import rounds
from torch import Tensor

from pymoe.remote import encodings
from pymoe.remote.encodings import BLOCK, DTYPES, ENCODINGS, decode, encode, encoded_size, encoding_for
from pymoe.remote.errors import WireError

SOME = settings(max_examples=rounds(150, 3000), deadline=None, derandomize=True, database=None)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def sent(tensor: Tensor, encoding: str) -> Tensor:
    how = encoding_for(tensor.dtype, tensor.shape, encoding)
    data = encode(tensor, how)
    assert data.nbytes == encoded_size(tensor.dtype, tensor.shape, how)
    return decode(data, tensor.dtype, list(tensor.shape), how)


def same_bits(first: Tensor, second: Tensor) -> bool:
    views = [one.contiguous().view(-1).view(torch.uint8) if one.numel() else one for one in (first, second)]
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(*views)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 7), (4,), (2, 0, 3), (0, 4), (1, 1)])
def test_raw_changes_no_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * 50).to(dtype)
    assert same_bits(sent(x, "raw"), x)
    if len(shape) > 1:
        assert same_bits(sent(x.transpose(0, 1), "raw"), x.transpose(0, 1).contiguous())


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", [one for one in DTYPES.values() if not one.is_floating_point], ids=str)
def test_what_is_no_floating_point_number_is_sent_raw(dtype: torch.dtype, encoding: str) -> None:
    x = (torch.randn(40) * 50).to(dtype)
    assert same_bits(sent(x, encoding), x)


@SOME
@given(st.lists(FLOATS, min_size=1, max_size=600))
def test_bf16_keeps_numbers_to_a_256th(values: list[float]) -> None:
    x = torch.tensor(values)
    y = sent(x, "bf16")
    normal = x.isfinite() & (x.abs() <= 3.38e38) & (x.abs() >= torch.finfo(torch.float32).tiny)
    assert bool(((x - y).abs() <= 2**-8 * x.abs())[normal].all())
    assert torch.equal(x.isnan(), y.isnan())
    assert torch.equal(y[x.isinf()], x[x.isinf()])


@SOME
@given(st.lists(FLOATS, min_size=1, max_size=600), st.sampled_from([torch.float32, torch.float64]), st.integers(1, 5))
def test_int8_keeps_numbers_to_a_254th_of_their_block_s_largest(
    values: list[float], dtype: torch.dtype, rows: int
) -> None:
    count = -(-len(values) // rows)
    x = torch.tensor(values * rows, dtype=dtype)[: rows * count].view(rows, count)
    y = sent(x, "int8")
    for row, begin in itertools.product(range(rows), range(0, count, BLOCK)):
        block, came = (one[row, begin : begin + BLOCK].double() for one in (x, y))
        if same_bits(block, came):
            continue
        if not block.isfinite().all():
            assert bool(came.isnan().all()), "nothing of such a block passes for a number"
            continue
        most = block.abs().max().item()
        bound = most / 254 * (1 + 254 * 2**-20) + (6e-39 if most < 1.5e-36 else 0)
        assert (block - came).abs().max().item() <= bound


def test_int8_does_not_make_infinity_of_the_largest_number() -> None:
    largest = torch.finfo(torch.float32).max
    for number in (largest, -largest, 3.4028e38):
        assert bool(sent(torch.tensor([[number] * 9]), "int8").isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_16_bits_are_rounded_to_their_dtype_on_arrival(dtype: torch.dtype) -> None:
    x = torch.randn(4, 300).to(dtype)
    assert same_bits(sent(x, "bf16"), x)
    y = sent(x, "int8")
    assert y.dtype == dtype
    exact = sent(x.float(), "int8")
    assert same_bits(y, exact.to(dtype))


def test_int8_takes_about_a_quarter_of_the_bytes() -> None:
    shape = (16, 1 << 12)
    assert encoded_size(torch.float32, shape, "int8") == (1 << 16) + 4 * (1 << 16) // BLOCK
    assert encoded_size(torch.float32, shape, "bf16") == 2 << 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_encoding_makes_a_tensor_longer(encoding: str, dtype: torch.dtype) -> None:
    for width in (0, 1, 2, 3, 5, BLOCK - 1, BLOCK, BLOCK + 1):
        x = torch.randn(7, width).to(dtype)
        how = encoding_for(dtype, x.shape, encoding)
        assert encode(x, how).nbytes <= x.nbytes


def test_what_a_row_becomes_depends_on_no_other_row() -> None:
    """Blocks of 256 numbers combined rows of several callers: one caller's NaN turned others' numbers into NaN, and its
    large numbers turned their small numbers into 0.
    """
    x = torch.randn(6, 3, 100)
    alone = [sent(row[None], "int8") for row in x]
    for bad in (math.nan, math.inf, 1e30):
        x[1, 0, 0] = x[4, 2, 99] = bad
        together = sent(x, "int8")
        for number in (0, 2, 3, 5):
            assert same_bits(together[number : number + 1], alone[number])


def test_narrow_rows_take_no_more_memory_than_wide_ones() -> None:
    """A message must not grow when it is decoded: each row of two numbers, padded to a block, would have taken a
    kilobyte.
    """
    rows = 1 << 20
    tensors = torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU])
    with tensors as found:
        sent(torch.ones(rows, 2), "int8")
    largest = max(event.self_cpu_memory_usage for event in found.events())
    assert largest <= 8 * rows * 4


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_arrives_is_aligned_memory_of_its_own(encoding: str) -> None:
    data = bytes(1) + bytes(encode(torch.randn(1, 300), encoding))
    x = decode(memoryview(data)[1:], torch.float32, [1, 300], encoding)
    assert x.data_ptr() % 64 == 0 or encoding != "raw"
    x.add_(1)
    assert bytes(memoryview(data)[1:2]) == data[1:2]


def test_a_bool_is_true_or_false_whatever_its_byte() -> None:
    x = decode(memoryview(bytes([0, 1, 2, 255])), torch.bool, [4], "raw")
    assert x.view(torch.uint8).tolist() == [0, 1, 1, 1]


def test_a_scale_that_is_no_number_makes_no_number() -> None:
    for scale in (math.inf, math.nan, -math.inf):
        x = decode(memoryview(struct.pack("<f3b", scale, 0, 1, -128)), torch.float32, [1, 3], "int8")
        assert bool(x.isnan().all())


@pytest.mark.parametrize(
    ("length", "dtype", "shape", "encoding", "message"),
    [
        (12, torch.float32, [4], "raw", "expected 16 bytes for torch.float32 of shape .4,. as raw, got 12"),
        (17, torch.float32, [4], "raw", "got 17"),
        (16, torch.float32, [-4], "raw", "cannot have the shape"),
        (16, torch.float32, [1] * 9, "raw", "cannot have the shape"),
        (16, torch.float32, [1 << 62, 1 << 62], "raw", "cannot have the shape"),
        (0, torch.float32, [1 << 31, 1 << 31, 0], "raw", "cannot have the shape"),
        (16, torch.int64, [2], "bf16", "there is no encoding 'bf16' of torch.int64"),
        (16, torch.float32, [4], "zip", "there is no encoding 'zip'"),
        (4, torch.float32, [1, 4], "int8", "expected 8 bytes"),
    ],
)
def test_bytes_that_are_no_such_tensor_are_refused(
    length: int, dtype: torch.dtype, shape: list[int], encoding: str, message: str
) -> None:
    with pytest.raises(WireError, match=message):
        decode(memoryview(bytes(length)), dtype, shape, encoding)


def test_a_dtype_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match=r"torch.uint16 cannot be sent"):
        encodings.dtype_name(torch.uint16)
