"""Samples as calls: copies of their arguments in another dtype, as leaves that require grad, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pymoe.testing.spec import BenchCase, OpSpec, Sample, outputs_of

SEED = 20211


def generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator with the seed of the test suite."""
    return torch.Generator(device).manual_seed(SEED)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor in it, however deep in tuples, lists and dictionaries, replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, function) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(part, function) for part in value)
    if isinstance(value, dict):
        return {key: map_tensors(part, function) for key, part in value.items()}
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in ``value``, in the order in which they stand."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


def mapped(sample: Sample, function: Callable[[Tensor], Any]) -> Sample:
    """``sample`` with every tensor of its arguments replaced."""
    return replace(sample, args=map_tensors(sample.args, function), kwargs=map_tensors(sample.kwargs, function))


def same_layout_copy(value: Tensor, device: torch.device | None = None) -> Tensor:
    """A copy with the strides and the offset alignment of ``value``; elements between its own are copied too.

    On ``device``, where one is given.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True) if size)
    device = value.device if device is None else device
    if value.numel() == 0:
        return value.detach().clone().to(device)
    shift = value.storage_offset() % 16
    storage = torch.empty(span + shift, dtype=value.dtype, device=device)
    storage[shift:].copy_(value.detach().as_strided((span,), (1,)))
    return storage.as_strided(value.shape, value.stride(), shift)


def call(function: Callable[..., Any], sample: Sample) -> Any:
    """``function(*args, **kwargs)``, with a copy of ``out`` of its own where the sample has one."""
    kwargs = dict(sample.kwargs)
    if isinstance(kwargs.get("out"), Tensor):
        kwargs["out"] = same_layout_copy(kwargs["out"])
    return function(*sample.args, **kwargs)


def widened(sample: Sample) -> Sample:
    """``sample`` with its bfloat16 and float16 tensors in float32, the same values."""
    return mapped(
        sample,
        lambda value: (
            value.detach().float().requires_grad_(value.requires_grad)
            if value.dtype in (torch.bfloat16, torch.float16)
            else value
        ),
    )


def in_dtype(sample: Sample, dtype: torch.dtype) -> Sample:
    """``sample`` with its floating tensors in ``dtype``; what required grad still does."""
    return mapped(
        sample,
        lambda value: (
            value.detach().to(dtype).requires_grad_(value.requires_grad) if value.is_floating_point() else value
        ),
    )


def with_grad(sample: Sample) -> Sample | None:
    """``sample`` with every floating argument a leaf that requires grad; None if there is none, or one not finite."""
    floating = [value for value in tensors_in((sample.args, sample.kwargs)) if value.is_floating_point()]
    if not floating or "out" in sample.kwargs or not all(bool(value.isfinite().all()) for value in floating):
        return None
    return mapped(sample, lambda value: value.detach().requires_grad_() if value.is_floating_point() else value)


def leaves(sample: Sample) -> list[Tensor]:
    """The tensors of a sample that require grad."""
    return [value for value in tensors_in((sample.args, sample.kwargs)) if value.requires_grad]


def gradients(function: Callable[..., Any], sample: Sample) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Outputs of a call, and the gradients of its leaves: see :func:`gradients_of`."""
    outputs = outputs_of(call(function, sample))
    return outputs, gradients_of(outputs, leaves(sample))


def gradients_of(outputs: Iterable[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of ``inputs`` for random gradients, always the same ones, of the outputs that are differentiable.

    An input that the outputs do not depend on has a gradient of zeros.
    """
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable:
        return [torch.zeros_like(value) for value in inputs]
    random = generator()
    # Rounded to bfloat16's 8 bits and to what float16 holds as well: the same numbers in every dtype. Uniform: what
    # randn gives depends on the processor.
    seeds = [
        (torch.rand(output.shape, generator=random, dtype=torch.float64) * 4 - 2).bfloat16().to(output)
        for output in differentiable
    ]
    found = torch.autograd.grad(differentiable, inputs, seeds, allow_unused=True)
    return [
        torch.zeros_like(value) if gradient is None else gradient for value, gradient in zip(inputs, found, strict=True)
    ]


def samples_of(spec: OpSpec, dtype: torch.dtype) -> Iterator[Sample]:
    """The samples of ``spec``, always the same ones."""
    return spec.samples(dtype, generator())


def large_cases(spec: OpSpec, count: int = 2, most_bytes: int = 64 << 20) -> list[BenchCase]:
    """Benchmark shapes for tests, big enough to run in parallel: the largest up to ``most_bytes``, or the smallest."""
    cases = sorted(spec.bench_cases() if spec.bench_cases else (), key=lambda case: case.bytes)
    return [case for case in cases if case.bytes <= most_bytes][-count:] or cases[:1]
