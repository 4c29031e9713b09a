"""First and second derivatives of every operator that has any."""

from functools import cache

import pytest
import torch

from pymoe.testing import verify
from pymoe.testing.calls import generator, in_dtype
from pymoe.testing.specs import all_specs

SPECS = {spec.name: spec for spec in all_specs() if spec.gradient_samples is not None}


@cache
def cases(name):
    return {sample.name: sample for sample in SPECS[name].gradient_samples(generator())}


EVERY_SAMPLE = [pytest.param(name, sample, id=f"{name}-{sample}") for name in SPECS for sample in cases(name)]


@pytest.mark.parametrize(("name", "sample"), EVERY_SAMPLE)
def test_native_passes_gradcheck_and_gradgradcheck(name, sample):
    verify.gradcheck(SPECS[name], cases(name)[sample])


@pytest.mark.parametrize(("name", "sample"), EVERY_SAMPLE)
def test_reference_passes_gradcheck_and_gradgradcheck(name, sample):
    verify.gradcheck(SPECS[name], cases(name)[sample], SPECS[name].reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "sample"), EVERY_SAMPLE)
def test_native_gradients_equal_reference_gradients(name, sample, dtype):
    if dtype in SPECS[name].dtypes:
        verify.gradients_equal(SPECS[name], dtype, in_dtype(cases(name)[sample], dtype))
