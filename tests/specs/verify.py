"""Checks of every operator, as functions of its specification.

Each raises AssertionError with a message that names the output or the gradient, the element and both values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pymoe.bench.calls import (
    Sample,
    call,
    gradients,
    leaves,
    map_tensors,
    outputs_of,
    same_layout_copy,
    tensors_in,
    widened,
)
from specs import ErrorInput, OpSpec
from specs.comparison import assert_close, assert_same_bits


def outputs_equal(spec: OpSpec, dtype: torch.dtype, sample: Sample) -> None:
    """Check that native and reference return equal results, and that neither changes its arguments."""
    expected = outputs_of(call(spec.reference, sample))
    arguments = (sample.args, {name: value for name, value in sample.kwargs.items() if name != "out"})
    before = map_tensors(arguments, same_layout_copy)
    actual = outputs_of(call(spec.native, sample))
    for old, new in zip(tensors_in(before), tensors_in(arguments), strict=True):
        assert_same_bits(new, old, f"{spec.name}: an argument after the call")
    assert len(actual) == len(expected), f"{spec.name}: {len(actual)} outputs, the reference has {len(expected)}"
    for i, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        what = f"{spec.name}: output {i}"
        if spec.is_exact(i):
            assert_same_bits(got, wanted, what)
        else:
            assert_close(got, wanted, spec.tolerances[dtype], what)


def gradients_equal(spec: OpSpec, dtype: torch.dtype, sample: Sample) -> None:
    """Check that the native operator's gradients equal the reference's within the tolerance.

    For 16-bit dtypes the reference works on the same values in float32: autograd adds up its gradients in the dtype of
    the tensor, and would round at every step where the native backward rounds once.
    """
    _, expected = gradients(spec.reference, widened(sample))
    _, actual = gradients(spec.native, sample)
    for i, (got, wanted, leaf) in enumerate(zip(actual, expected, leaves(sample), strict=True)):
        assert got.dtype == leaf.dtype, f"{spec.name}: gradient {i} has dtype {got.dtype}, its input {leaf.dtype}"
        assert_close(got, wanted.to(got.dtype), spec.tolerances[dtype], f"{spec.name}: gradient {i}")


def gradcheck(spec: OpSpec, sample: Sample, function: Callable[..., Any] | None = None) -> None:
    """Check first and second derivatives against finite differences, also with undefined gradients."""
    function = function or spec.native
    inputs = leaves(sample)
    assert inputs, f"{spec.name}: gradient sample {sample.name} has no tensor that requires grad"
    assert all(value.dtype == torch.float64 for value in inputs), f"{spec.name}: gradient samples must be float64"

    def of_leaves(*values: Tensor) -> tuple[Tensor, ...]:
        replacement = iter(values)
        arguments = map_tensors(
            (sample.args, sample.kwargs), lambda value: next(replacement) if value.requires_grad else value
        )
        return tuple(output for output in outputs_of(function(*arguments[0], **arguments[1])) if output.requires_grad)

    assert torch.autograd.gradcheck(of_leaves, inputs, nondet_tol=0.0, check_undefined_grad=True)
    assert torch.autograd.gradgradcheck(
        of_leaves, inputs, nondet_tol=0.0, check_undefined_grad=True, gen_non_contig_grad_outputs=True
    )


def error_raised(spec: OpSpec, function: Callable[..., Any], error_input: ErrorInput) -> str:
    """Check that the call raises the named exception with operator and argument in its message; return the message."""
    sample = error_input.sample
    raised = None
    try:
        function(*sample.args, **sample.kwargs)
    except Exception as error:
        raised = error
    message, expected = str(raised), error_input.error.__name__
    assert raised is not None, f"{spec.name}: {sample.name} raised nothing, expected {expected}"
    assert type(raised) is error_input.error, (
        f"{spec.name}: {sample.name} raised {type(raised).__name__}, expected {expected}: {message}"
    )
    assert error_input.match in message, f"{spec.name}: {error_input.match!r} is not in the message: {message}"
    assert message.startswith(f"{spec.name}: "), f"the message does not begin with the operator: {message}"
    parameters = inspect.signature(spec.reference).parameters
    assert any(name in message.removeprefix(spec.name) for name in parameters), f"no argument is named: {message}"
    return message


def deterministic(spec: OpSpec, sample: Sample, threads: tuple[int, ...] = (1, 2, 4), repeats: int = 3) -> None:
    """Check that outputs and gradients have the same bits for any number of threads, on every stream and at every
    call.
    """
    expected: list[Tensor] = []
    for where in ways_to_run(sample, threads):
        for _ in range(repeats):
            outputs, found = gradients(spec.native, sample)
            seen = [*outputs, *found]
            expected = expected or seen
            for i, (got, wanted) in enumerate(zip(seen, expected, strict=True)):
                part = f"output {i}" if i < len(outputs) else f"gradient {i - len(outputs)}"
                assert_same_bits(got, wanted, f"{spec.name}: {part} on {where}")


def ways_to_run(sample: Sample, threads: tuple[int, ...]) -> Iterator[str]:
    """Yield after setting torch to each number of threads, or on CUDA, to the current stream and as many others."""
    devices = {value.device for value in tensors_in((sample.args, sample.kwargs)) if value.device.type == "cuda"}
    for device in devices:
        yield "the current stream"
        torch.cuda.synchronize(device)
        for number in range(len(threads)):
            with torch.cuda.stream(torch.cuda.Stream(device)):
                yield f"stream {number}"
                torch.cuda.synchronize(device)
    if devices:
        return
    before = torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            yield f"{count} threads"
    finally:
        torch.set_num_threads(before)
