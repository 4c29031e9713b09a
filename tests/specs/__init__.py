"""The specifications of the operators: one file for each of pymoe/ops, with a list ``SPECS`` of :class:`OpSpec`.

From them the tests derive: native equals reference, gradcheck and gradgradcheck, opcheck,
``torch.compile(fullgraph=True)``, determinism over thread counts, error inputs, calls past Python's checks. What an
operator promises, and the inputs that it is timed with, come from :mod:`pymoe.bench.operators`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pymoe._common.types import FLOATING
from pymoe.bench.calls import BenchCase, Operator, Sample, generator, mapped, tensors_in
from pymoe.bench.operators import OPERATORS

WITHOUT_CUDA = frozenset(
    {
        "apply_chosen_quantized_experts",
        "apply_quantized_experts",
        "quantize_weight",
        "quantized_linear",
        "quantized_linear_input_grad",
    }
)
"""The operators that have no CUDA kernel, and refuse CUDA tensors in every build."""


@dataclass(frozen=True)
class ErrorInput:
    """A call that must raise ``error`` with a message that contains ``match``."""

    sample: Sample
    error: type[Exception]
    match: str


@dataclass(frozen=True)
class RawCall:
    """A call of a raw operator in ``torch.ops.pymoe``, for opcheck and for calls past Python's checks."""

    name: str
    operator: str
    args: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class OpSpec(Operator):
    """An operator with the inputs of its tests."""

    samples: Callable[[torch.dtype, torch.Generator], Iterator[Sample]]
    """At least 40 samples for a dtype: odd shapes, ties, special values, strides, empty dimensions."""
    error_inputs: Callable[[], Iterator[ErrorInput]]
    """At least 12 calls that break the contract."""
    gradient_samples: Callable[[torch.Generator], Iterator[Sample]] | None = None
    """Small float64 calls for gradcheck and gradgradcheck; tensors that require grad are the ones checked."""
    raw_calls: Callable[[torch.Generator], Iterator[RawCall]] | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATING


def specify(name: str, **parts: Any) -> OpSpec:
    """Return the specification of the operator ``name`` of :mod:`pymoe.bench.operators`."""
    return OpSpec(**vars(OPERATORS[name]), **parts)


def all_specs() -> list[OpSpec]:
    """Return every specification, in the order of the files' names."""
    modules = sorted({operator.native.__module__.rsplit(".", 1)[1] for operator in OPERATORS.values()})
    return [spec for module in modules for spec in importlib.import_module(f"specs.{module}").SPECS]


def all_raw_calls() -> list[RawCall]:
    """Return the raw calls of every specification, and of operators composed of other operators."""
    composed = importlib.import_module("specs.composed").raw_calls
    parts = (*(spec.raw_calls for spec in all_specs() if spec.raw_calls is not None), composed)
    return [call for raw_calls in parts for call in raw_calls(generator())]


def samples_of(spec: OpSpec, dtype: torch.dtype) -> Iterator[Sample]:
    """Return the samples of ``spec``, always the same ones."""
    return spec.samples(dtype, generator())


def in_dtype(sample: Sample, dtype: torch.dtype) -> Sample:
    """Return ``sample`` with its floating tensors in ``dtype``; tensors that required grad still do."""
    return mapped(
        sample,
        lambda value: (
            value.detach().to(dtype).requires_grad_(value.requires_grad) if value.is_floating_point() else value
        ),
    )


def with_grad(sample: Sample) -> Sample | None:
    """Return ``sample`` with every floating argument a leaf that requires grad.

    Returns None if there is no such argument, one is not finite, or the sample has an ``out``.
    """
    floating = [value for value in tensors_in((sample.args, sample.kwargs)) if value.is_floating_point()]
    if not floating or "out" in sample.kwargs or not all(bool(value.double().isfinite().all()) for value in floating):
        return None
    return mapped(sample, lambda value: value.detach().requires_grad_() if value.is_floating_point() else value)


def large_cases(spec: OpSpec, count: int = 2, most_bytes: int = 64 << 20) -> list[BenchCase]:
    """Return benchmark cases big enough to run in parallel: the largest up to ``most_bytes``, or the smallest one."""
    cases = sorted(spec.bench_cases, key=lambda case: case.bytes)
    return [case for case in cases if case.bytes <= most_bytes][-count:] or cases[:1]
