"""OpSpec: all that tests and benchmarks need to know of an operator, in one place.

A file in :mod:`pymoe.testing.specs` describes one operator (and its raw backward operators). From it the test suite
derives: native equals reference, gradcheck and gradgradcheck, opcheck, ``torch.compile(fullgraph=True)``, determinism
over thread counts, error inputs, property fuzzing; and ``python -m pymoe.bench`` its benchmark lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

ALL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sample:
    """One call: ``operator(*args, **kwargs)``."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True)
class Target:
    """A figure that a benchmark line is held to: at least ``ratio`` times as fast as what it is compared with."""

    over: Literal["reference", "baseline", "floor", "seconds"]
    """``floor`` is ``copy_`` of as many bytes, or ``torch.mm`` of as many operations: ``ratio`` is the share of it.

    ``seconds``: ``ratio`` is the most seconds that a call may take on the device, where it can be seen without its
    launch: in a CUDA graph.
    """
    ratio: float


@dataclass(frozen=True)
class BenchCase:
    """One line of the benchmark.

    ``make`` builds the inputs. ``bytes`` are the fewest bytes that a call must move through memory (every input read
    once, every output written once); ``flops`` its floating-point operations, where those are the floor.
    """

    name: str
    dtype: torch.dtype
    make: Callable[[torch.Generator], Sample]
    bytes: int
    flops: int = 0
    backward: bool = False
    """Time forward and backward together instead of forward alone."""
    source: str = ""
    """Who publishes this shape."""
    baseline: Callable[..., Any] | None = None
    """What a user would write with torch alone, when the reference spends time on exactness that it does without."""
    target: Target | None = None
    """What the line is to reach on a CPU; shown beside what it reached, never a test."""
    cuda_target: Target | None = None
    """What it is to reach on an H200."""


@dataclass(frozen=True)
class OpSpec:
    """The specification of one operator for tests and benchmarks."""

    name: str
    native: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[torch.dtype, torch.Generator], Iterator[Sample]]
    """At least 40 samples for a dtype: odd shapes, ties, special values, strides, empty dimensions."""
    exact: tuple[bool, ...]
    """For each output: must native and reference agree bit for bit? One flag speaks for any number of outputs."""
    tolerances: dict[torch.dtype, tuple[float, float]]
    """(rtol, atol) a dtype, for outputs that are not exact and for gradients."""
    error_inputs: Callable[[], Iterator[ErrorInput]]
    """At least 12 calls that break the contract."""
    gradient_samples: Callable[[torch.Generator], Iterator[Sample]] | None = None
    """Small float64 calls for gradcheck and gradgradcheck; tensors that require grad are the ones checked."""
    raw_calls: Callable[[torch.Generator], Iterator[RawCall]] | None = None
    bench_cases: Callable[[], Iterator[BenchCase]] | None = None
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    compilable: bool = True


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """The tensors of an operator's result, whatever its form; an int counts as a tensor of one element."""
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, int):
        return (torch.tensor(result),)
    if result is None:
        return ()
    return tuple(tensor for part in result for tensor in outputs_of(part))
