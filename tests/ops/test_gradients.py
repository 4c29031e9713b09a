"""Tests of the first and second derivatives of all differentiable operators, in float64.

test_native_equals_reference.py compares gradients in the other dtypes with the reference, for every sample.
"""

from functools import cache

import pytest
import torch
from devices import moved
from specs import all_specs, verify
from specs.comparison import assert_same_bits

from pymoe.bench.calls import call, generator, gradients, gradients_of, leaves, mapped, outputs_of, tensors_in

SPECS = {spec.name: spec for spec in all_specs() if spec.gradient_samples is not None}


@cache
def cases(name):
    return {sample.name: sample for sample in SPECS[name].gradient_samples(generator())}


EVERY_SAMPLE = [pytest.param(name, sample, id=f"{name}-{sample}") for name in SPECS for sample in cases(name)]


@pytest.mark.parametrize(("name", "sample"), EVERY_SAMPLE)
def test_native_passes_gradcheck_and_gradgradcheck(name, sample, device):
    verify.gradcheck(SPECS[name], moved(cases(name)[sample], device))


@pytest.mark.thinned(usual=20)
@pytest.mark.parametrize(("name", "sample"), EVERY_SAMPLE)
def test_reference_passes_gradcheck_and_gradgradcheck(name, sample, device):
    verify.gradcheck(SPECS[name], moved(cases(name)[sample], device), SPECS[name].reference)


def changed_in_place(value):
    """Change the contents of ``value`` in place, as a careless caller would between forward and backward."""
    with torch.no_grad():
        if value.is_floating_point():
            value.mul_(2).add_(1)
        else:
            value.zero_()


@pytest.mark.parametrize(("name", "sample"), EVERY_SAMPLE)
def test_change_in_place_before_backward_is_never_silent(name, sample, device):
    """Either autograd refuses, or the gradients belong to the values that the forward saw."""
    spec, original = SPECS[name], moved(cases(name)[sample], device)
    _, expected = gradients(spec.native, original)
    for position in range(len(tensors_in((original.args, original.kwargs)))):
        copy = mapped(original, lambda value: value.detach().clone().requires_grad_(value.requires_grad))
        outputs = outputs_of(call(spec.native, copy))
        changed_in_place(tensors_in((copy.args, copy.kwargs))[position])
        try:
            found = gradients_of(outputs, leaves(copy))
        except RuntimeError as error:
            assert "inplace" in str(error)  # noqa: PT017
        else:
            for got, wanted in zip(found, expected, strict=True):
                assert_same_bits(got, wanted, f"gradient after argument {position} was changed")
