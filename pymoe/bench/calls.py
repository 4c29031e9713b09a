"""Types for the operators and calls that benchmark lines time, and helpers for a call's arguments and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

SEED = 20211


@dataclass(frozen=True)
class Sample:
    """The arguments of one call, ``operator(*args, **kwargs)``."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """The target of a benchmark line: the native call is at least ``ratio`` times as fast as ``over``."""

    over: Literal["reference", "baseline", "floor", "seconds"]
    """What the native call is compared with. ``floor`` is ``copy_`` of as many bytes, or ``torch.mm`` of about as many
    operations; ``ratio`` is then a share of the floor's rate.

    With ``seconds``, ``ratio`` is instead the time limit of a call on the device, in seconds: without the launch if
    the call can be captured in a CUDA graph.
    """
    ratio: float


@dataclass(frozen=True)
class BenchCase:
    """The inputs of one line of the benchmark, made by ``make`` from a random generator."""

    name: str
    dtype: torch.dtype
    make: Callable[[torch.Generator], Sample]
    bytes: int
    """Minimum number of bytes that a call moves through memory: each large input read once, each large output written
    once. Small tensors, such as offsets, may be left out; of products with quantised weights, only the weights count.
    """
    flops: int = 0
    """Number of floating-point operations of a call if they determine the floor, else 0."""
    backward: bool = False
    """True to time forward and backward together; some tensors that ``make`` returns then require grad."""
    source: str = ""
    """Name of the model, paper or library that publishes this shape, or a description; empty if there is none."""
    baseline: Callable[..., Any] | None = None
    """The same computation in plain torch, as a user would write it, without the reference's efforts at exactness."""
    target: Target | None = None
    """Target of the line on a CPU. It is shown next to the result; no test asserts it."""
    cuda_target: Target | None = None
    """Target of the line on an H200."""


@dataclass(frozen=True)
class Operator:
    """A native operator, its reference, the allowed differences between their results, and the benchmark's cases."""

    name: str
    native: Callable[..., Any]
    reference: Callable[..., Any]
    exact: tuple[bool, ...]
    """For each output, True if native and reference must agree bit for bit. A single flag applies to all outputs."""
    tolerances: dict[torch.dtype, tuple[float, float]]
    """(rtol, atol) by dtype, for gradients and for outputs that are not exact."""
    bench_cases: tuple[BenchCase, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Types of devices for which the operator has a kernel."""

    def is_exact(self, output: int) -> bool:
        """Return whether the output with index ``output`` must agree bit for bit."""
        return self.exact[output if len(self.exact) > 1 else 0]


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """Return the tensors in an operator's result, at any depth of nesting.

    So that ints and strings can be compared, too, an int becomes a scalar tensor, and a str a tensor of its character
    codes.
    """
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, int):
        return (torch.tensor(result),)
    if isinstance(result, str):
        return (torch.tensor([ord(one) for one in result]),)
    if result is None:
        return ()
    return tuple(tensor for part in result for tensor in outputs_of(part))


def generator(device: torch.device | str = "cpu") -> torch.Generator:
    """Return a fresh generator, always with the same seed."""
    return torch.Generator(device).manual_seed(SEED)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a copy of ``value`` with ``function`` applied to every tensor in its tuples, lists and dicts."""
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
    """Return all tensors in ``value`` and its tuples, lists and dicts, in order."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


def mapped(sample: Sample, function: Callable[[Tensor], Any]) -> Sample:
    """Return a copy of ``sample`` with ``function`` applied to every tensor in its arguments."""
    return replace(sample, args=map_tensors(sample.args, function), kwargs=map_tensors(sample.kwargs, function))


def same_layout_copy(value: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a detached copy, on ``device`` if given, with the strides of ``value`` and its storage offset modulo 16.

    Elements of the storage that lie between those of ``value`` are copied, too. A tensor without elements gets the
    storage offset 0.
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
    """Return ``function(*args, **kwargs)`` for the arguments of ``sample``; a tensor ``out`` is copied first."""
    kwargs = dict(sample.kwargs)
    if isinstance(kwargs.get("out"), Tensor):
        kwargs["out"] = same_layout_copy(kwargs["out"])
    return function(*sample.args, **kwargs)


def widened(sample: Sample) -> Sample:
    """Return ``sample`` with its bfloat16 and float16 tensors converted to float32."""
    return mapped(
        sample,
        lambda value: (
            value.detach().float().requires_grad_(value.requires_grad)
            if value.dtype in (torch.bfloat16, torch.float16)
            else value
        ),
    )


def leaves(sample: Sample) -> list[Tensor]:
    """Return the tensors of a sample that require grad."""
    return [value for value in tensors_in((sample.args, sample.kwargs)) if value.requires_grad]


def gradients(function: Callable[..., Any], sample: Sample) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return the outputs of ``function`` for ``sample``, and the gradients (:func:`gradients_of`) of its leaves."""
    outputs = outputs_of(call(function, sample))
    return outputs, gradients_of(outputs, leaves(sample))


def gradients_of(outputs: Iterable[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of ``inputs`` for fixed random gradients of the differentiable outputs.

    The gradient of an input that does not influence the outputs is zero.
    """
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable:
        return [torch.zeros_like(value) for value in inputs]
    random = generator()
    # Rounding to bfloat16 makes the values the same in every dtype. The values are uniformly distributed, because those
    # of randn depend on the processor.
    seeds = [
        (torch.rand(output.shape, generator=random, dtype=torch.float64) * 4 - 2).bfloat16().to(output)
        for output in differentiable
    ]
    found = torch.autograd.grad(differentiable, inputs, seeds, allow_unused=True)
    return [
        torch.zeros_like(value) if gradient is None else gradient for value, gradient in zip(inputs, found, strict=True)
    ]
