"""gather_batch and split_batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pymoe._common.types import FLOATING
from pymoe.bench.calls import Sample
from specs import ErrorInput, RawCall, specify
from specs.samples import expanded, layouts, special_values

DTYPES = (*FLOATING, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64)
ROWS = ((1,), (0,), (3, 0, 5), (0, 0), (1, 1, 1, 1, 1), (7, 2, 0, 0, 11), (64, 1, 200), (2,) * 70, (33, 40, 0))
TRAILING: tuple[tuple[int, ...], ...] = ((), (16,), (3, 5), (0,))


def values(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return random values of any dtype."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        return torch.complex(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 127, shape, generator=generator).to(dtype)


def gather_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for rows in ROWS:
        for trailing in TRAILING:
            name = f"{len(rows)}_of_{max(rows)}_{sum(rows)}_by_{'x'.join(map(str, trailing))}"
            yield Sample(name, ([values(n, *trailing, dtype=dtype, generator=generator) for n in rows],))
    first, second = (values(n, 6, dtype=dtype, generator=generator) for n in (5, 9))
    yield Sample("tuple", ((first, second),))
    yield Sample("one_tensor_twice", ([first, second, first],))
    yield Sample("expanded", ([expanded(first, 4), expanded(second, 6, dim=1)],))
    yield Sample("narrowed", ([second[2:7], second[::2], second[:, :]],))
    if not dtype.is_complex and dtype != torch.bool:
        for (name, a), (_, b) in zip(layouts(first), layouts(second), strict=True):
            yield Sample(name, ([a, second, b],))
    if dtype.is_floating_point:
        yield Sample("special", ([special_values(dtype), special_values(dtype).flip(0)],))
    yield Sample("large", ([values(n, 1000, dtype=dtype, generator=generator) for n in (1, 900, 0, 333, 41)],))


def split_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for rows in ROWS:
        for trailing in TRAILING:
            name = f"{len(rows)}_of_{max(rows)}_{sum(rows)}_by_{'x'.join(map(str, trailing))}"
            yield Sample(name, (values(sum(rows), *trailing, dtype=dtype, generator=generator), rows))
    batch = values(8, 6, dtype=dtype, generator=generator)
    yield Sample("list", (batch, [3, 5]))
    yield Sample("none_of_nothing", (batch[:0], ()))
    yield Sample("expanded", (expanded(batch, 7), (3, 4)))
    yield Sample("stepped", (batch[::2], (1, 3)))
    yield Sample("columns", (batch[:, 1:3], (8,)))


def gather_errors() -> Iterator[ErrorInput]:
    a = torch.zeros(2, 3)
    for name, tensors, error, match in (
        ("none", [], ValueError, "tensors must hold at least one tensor, got none"),
        ("no_tuple", (), ValueError, "tensors must hold at least one tensor, got none"),
        ("bare_tensor", a, TypeError, "tensors must be a list or tuple of tensors, got Tensor"),
        ("number", 3, TypeError, "tensors must be a list or tuple of tensors, got int"),
        ("iterator", iter([a]), TypeError, "tensors must be a list or tuple of tensors, got list_iterator"),
        ("list_inside", [a, [1.0]], TypeError, "tensors[1] must be a tensor, got list"),
        ("none_inside", [None, a], TypeError, "tensors[0] must be a tensor, got NoneType"),
        ("scalar_first", [a.sum(), a], ValueError, "tensors[0] must have at least one dimension"),
        ("scalar_later", [a, a, a.sum()], ValueError, "tensors[2] must have at least one dimension"),
        ("dtype", [a, a, a.double()], TypeError, "tensors[2] must have the dtype of tensors[0] (torch.float32)"),
        ("trailing", [a, a.new_zeros(2, 4)], ValueError, "tensors[1] must agree with tensors[0] ((2, 3)) past"),
        ("rank", [a, a[None]], ValueError, "tensors[1] must agree with tensors[0] ((2, 3)) past dimension 0"),
        ("device", [a, a.to("meta")], ValueError, "tensors[1] must be on the device of tensors[0] (cpu), got meta"),
    ):
        yield ErrorInput(Sample(name, (tensors,)), error, match)


def split_errors() -> Iterator[ErrorInput]:
    a = torch.zeros(5, 3)
    for name, args, error, match in (
        ("batch_list", ([1.0], (1,)), TypeError, "batch must be a tensor, got list"),
        ("batch_scalar", (a.sum(), (1,)), ValueError, "batch must have at least one dimension"),
        ("sizes_int", (a, 5), TypeError, "sizes must be a list or tuple of ints, got int"),
        ("sizes_text", (a, "23"), TypeError, "sizes must be a list or tuple of ints, got str"),
        ("sizes_tensor", (a, torch.tensor([2, 3])), TypeError, "sizes must be a list or tuple of ints, got Tensor"),
        ("size_float", (a, (2, 3.0)), TypeError, "sizes[1] must be an int, got float"),
        ("size_bool", (a, (True, 4)), TypeError, "sizes[0] must be an int, got bool"),
        ("size_negative", (a, (6, -1)), ValueError, "sizes[1] must be at least 0, got -1"),
        ("too_few", (a, (2, 2)), ValueError, "sizes must sum to 5 (dimension 0 of batch), got 4"),
        ("too_many", (a, (2, 4)), ValueError, "sizes must sum to 5 (dimension 0 of batch), got 6"),
        ("no_sizes", (a, ()), ValueError, "sizes must sum to 5 (dimension 0 of batch), got 0"),
        ("of_nothing", (a[:0], (1,)), ValueError, "sizes must sum to 0 (dimension 0 of batch), got 1"),
    ):
        yield ErrorInput(Sample(name, args), error, match)


def gather_gradients(generator: torch.Generator) -> Iterator[Sample]:
    def leaf(*shape: int) -> Tensor:
        return values(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    yield Sample("two", ([leaf(3, 2), leaf(1, 2)],))
    yield Sample("one", ([leaf(3)],))
    yield Sample("empty_between", ([leaf(2, 2), leaf(0, 2), leaf(1, 2)],))
    yield Sample("constant_between", ([leaf(2, 2), leaf(3, 2).detach(), leaf(1, 2)],))


def split_gradients(generator: torch.Generator) -> Iterator[Sample]:
    for name, sizes in (("two", (3, 1)), ("one", (4,)), ("empty_between", (1, 0, 3))):
        batch = values(4, 2, dtype=torch.float64, generator=generator)
        yield Sample(name, (batch.requires_grad_(), sizes))


def raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    for dtype in (torch.float32, torch.int64, torch.bool):
        parts = [values(n, 4, dtype=dtype, generator=generator) for n in (3, 0, 2)]
        yield RawCall(str(dtype), "gather_batch", (parts,))
    yield RawCall("grad", "gather_batch", ([torch.ones(2, 3, requires_grad=True), torch.ones(1, 3)],))


SPECS = [
    specify(
        "gather_batch",
        samples=gather_samples,
        error_inputs=gather_errors,
        gradient_samples=gather_gradients,
        raw_calls=raw_calls,
        dtypes=DTYPES,
    ),
    specify(
        "split_batch",
        samples=split_samples,
        error_inputs=split_errors,
        gradient_samples=split_gradients,
        dtypes=DTYPES,
    ),
]
