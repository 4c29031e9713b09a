"""Results are the same bits at every call, for every number of threads and on every stream."""

import pytest
import torch
from devices import moved
from specs import all_specs, large_cases, samples_of, verify, with_grad

from pymoe.bench.calls import generator

SPECS = {spec.name: spec for spec in all_specs()}


def leaves_where_differentiable(spec, sample):
    """Return the sample, with leaves if the operator has gradients."""
    return (with_grad(sample) if spec.gradient_samples is not None else None) or sample


def size(sample):
    return sum(value.numel() for value in verify.tensors_in((sample.args, sample.kwargs)))


CASES = [
    pytest.param(spec.name, dtype, id=f"{spec.name}-{dtype}")
    for spec in SPECS.values()
    for dtype in [dtype for dtype in (torch.float32, torch.bfloat16) if dtype in spec.dtypes] or spec.dtypes[:1]
]


@pytest.mark.thinned(usual=8)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_largest_samples(name, dtype, device):
    spec = SPECS[name]
    for sample in sorted(samples_of(spec, dtype), key=size)[-5:]:
        verify.deterministic(spec, moved(leaves_where_differentiable(spec, sample), device))


LARGE_CASES = [
    pytest.param(spec.name, case, id=f"{spec.name}-{case.name}")
    for spec in SPECS.values()
    for case in large_cases(spec)
]


@pytest.mark.thinned(usual=6)
@pytest.mark.parametrize(("name", "case"), LARGE_CASES)
def test_benchmark_shapes(name, case, device):
    """The shapes are large enough for every kernel to use all threads."""
    sample = case.make(generator())
    verify.deterministic(SPECS[name], moved(leaves_where_differentiable(SPECS[name], sample), device), repeats=1)
