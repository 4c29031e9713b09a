"""Prototypes of batched tensors: the tensors that they make and accept, and their behaviour as values."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from pymoe.runtime import BatchTensorProto

SOME = [
    BatchTensorProto(4),
    BatchTensorProto(4, 5),
    BatchTensorProto(),
    BatchTensorProto(0),
    BatchTensorProto(4, dtype=torch.float64),
    BatchTensorProto(4, dtype=torch.int64),
    BatchTensorProto(4, dtype=torch.bool),
    BatchTensorProto(4, dtype=torch.complex64),
    BatchTensorProto(4, device="cpu"),
    BatchTensorProto(4, requires_grad=True),
    BatchTensorProto(4, pin_memory=True),
    BatchTensorProto(4, layout=torch.sparse_coo),
    BatchTensorProto(4, device="cuda:1"),
]


def test_defaults() -> None:
    proto = BatchTensorProto(3, 4)
    assert proto.size == (3, 4)
    assert isinstance(proto.size, torch.Size)
    assert (proto.dtype, proto.device, proto.layout) == (torch.float32, None, torch.strided)
    assert not proto.requires_grad
    assert not proto.pin_memory
    assert BatchTensorProto(*torch.ones(2, 3, 4).shape[1:]) == proto


def test_the_default_dtype_is_the_one_when_it_was_made() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        proto = BatchTensorProto(2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert proto.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("size", [(), (3,), (2, 0, 5)])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_made_tensors_are_zeros_that_match(dtype: torch.dtype, size: tuple[int, ...], rows: int) -> None:
    proto = BatchTensorProto(*size, dtype=dtype)
    made = proto.make_empty(rows)
    assert made.shape == (rows, *size)
    assert made.dtype == dtype
    assert not made.any()
    assert proto.matches(made)
    assert BatchTensorProto.from_tensor(made) == proto.replace(device="cpu")


def test_made_tensors_never_hold_garbage() -> None:
    for _ in range(20):
        torch.full((1000,), float("nan"))  # memory that the next tensor of this size is likely to get
        assert not BatchTensorProto(10).make_empty(100).any()


def test_made_tensors_are_leaves_where_asked_to() -> None:
    made = BatchTensorProto(3, requires_grad=True).make_empty(2)
    assert made.requires_grad
    assert made.is_leaf
    assert not BatchTensorProto(3, requires_grad=True).make_empty(2, requires_grad=False).requires_grad
    assert BatchTensorProto(3).make_empty(2, device="meta").is_meta


def test_from_tensor() -> None:
    proto = BatchTensorProto.from_tensor(torch.ones(5, 3, dtype=torch.float16, requires_grad=True))
    assert proto == BatchTensorProto(3, dtype=torch.float16, device="cpu", requires_grad=True)
    with pytest.raises(ValueError, match=r"first dimension counts rows, got a tensor of shape \(\)"):
        BatchTensorProto.from_tensor(torch.tensor(1.0))
    with pytest.raises(TypeError, match="expected a tensor, got list"):
        BatchTensorProto.from_tensor([1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        ([1.0], TypeError, r"x: expected a tensor, torch.float32 of shape \(rows, 4\), got list"),
        (None, TypeError, "got NoneType"),
        (
            torch.ones(2, 4, dtype=torch.int64),
            TypeError,
            r"torch.float32 .* got torch.int64 of shape \(2, 4\)",
        ),
        (torch.ones(2, 5), ValueError, r"x: expected .* of shape \(rows, 4\), got torch.float32 of shape \(2, 5\)"),
        (torch.ones(2, 4, 1), ValueError, r"got torch.float32 of shape \(2, 4, 1\)"),
        (torch.ones(4), ValueError, r"got torch.float32 of shape \(4,\)"),
        (torch.ones(()), ValueError, r"got torch.float32 of shape \(\)"),
        (torch.ones(2, 4).to_sparse(), TypeError, "expected layout torch.strided, got torch.sparse_coo"),
    ],
)
def test_what_does_not_match_is_said(tensor: Any, error: type[Exception], message: str) -> None:
    proto = BatchTensorProto(4)
    assert not proto.matches(tensor)
    with pytest.raises(error, match=message):
        proto.check(tensor, "x")


def test_rows_strides_and_gradients_do_not_matter_for_a_match() -> None:
    proto = BatchTensorProto(4)
    for tensor in (
        torch.ones(0, 4),
        torch.ones(9, 4),
        torch.ones(4, 9).T,
        torch.ones(1, 4).expand(5, 4),
        torch.ones(2, 4, requires_grad=True),
    ):
        assert proto.matches(tensor)
        proto.check(tensor)
    assert BatchTensorProto().matches(torch.ones(3))
    assert not BatchTensorProto().matches(torch.ones(3, 1))


def test_a_device_matters_only_if_one_is_named() -> None:
    elsewhere = torch.ones(2, 4, device="meta")
    assert BatchTensorProto(4).matches(elsewhere)
    assert BatchTensorProto(4, device="meta").matches(elsewhere)
    with pytest.raises(ValueError, match="expected a tensor on cpu, got one on meta"):
        BatchTensorProto(4, device="cpu").check(elsewhere)


def test_they_are_values() -> None:
    for i, first in enumerate(SOME):
        for j, second in enumerate(SOME):
            assert (first == second) == (i == j)
        for same in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first), first.replace(), copy.copy(first)):
            assert same == first
            assert hash(same) == hash(first)
            assert repr(same) == repr(first)
    assert len({*SOME, *SOME}) == len(SOME)
    with pytest.raises(AttributeError):
        SOME[0].size = torch.Size([1])  # type: ignore[misc]


def test_a_repr_makes_it_again() -> None:
    assert repr(BatchTensorProto(4, 5, dtype=torch.int64)) == "BatchTensorProto(4, 5, dtype=torch.int64)"
    for proto in SOME:
        assert eval(repr(proto)) == proto


@pytest.mark.parametrize(
    ("size", "options", "error", "message"),
    [
        ((-1,), {}, ValueError, r"must not be negative, got \(-1,\)"),
        ((1.5,), {}, TypeError, "must be an int, got 1.5"),
        (((3, 4), 5), {}, TypeError, r"must be an int, got \(3, 4\)"),
        ((True,), {}, TypeError, "must be an int, got True"),
        ((3,), {"dtype": "float32"}, TypeError, "expected dtype to be a torch.dtype, got 'float32'"),
        ((3,), {"layout": "strided"}, TypeError, "expected layout to be a torch.layout"),
        ((3,), {"dtype": torch.int64, "requires_grad": True}, ValueError, "torch.int64 has no gradients"),
    ],
)
def test_misuse_is_refused(size: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BatchTensorProto(*size, **options)


def test_what_is_differentiable() -> None:
    kinds = {torch.float16: True, torch.bfloat16: True, torch.complex128: True, torch.int32: False, torch.bool: False}
    assert {dtype: BatchTensorProto(1, dtype=dtype).differentiable for dtype in kinds} == kinds
