"""Tests that an operator without a CUDA kernel refuses CUDA tensors with a helpful message."""

from functools import partial

import pytest
import torch
from specs import WITHOUT_CUDA, all_raw_calls, all_specs

import pymoe
from pymoe.ops import missing_cuda

pytestmark = pytest.mark.only_on("cpu")  # nothing is run
CALLS = {call.operator: call for call in all_raw_calls()}


@pytest.mark.parametrize("name", CALLS)
def test_every_operator_has_a_kernel_or_a_refusal(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pymoe::{name}", "CUDA")


def test_a_build_with_cuda_kernels_has_all_that_there_are_and_one_without_has_none():
    refused = {name.removeprefix("pymoe::") for name in missing_cuda.refused}
    assert refused & CALLS.keys() == (WITHOUT_CUDA if pymoe.build_info()["cuda_kernels"] else CALLS.keys())


def test_benchmarks_leave_the_same_operators_out():
    specs = {spec.name: spec for spec in all_specs()}
    assert WITHOUT_CUDA & specs.keys() == {name for name, spec in specs.items() if "cuda" not in spec.devices}


def test_the_refusal_names_the_operator_and_the_ways_out():
    """The call goes directly to the CUDA kernel, whatever the device, so that no GPU is needed."""
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for name, call in CALLS.items():
        operator = getattr(torch.ops.pymoe, name).default
        if f"pymoe::{name}" in missing_cuda.refused:
            to_cuda = partial(operator.redispatch, cuda)
        else:  # this build has the kernel, so check the message of a build without it
            to_cuda = missing_cuda._refusal(f"pymoe::{name}")
        with pytest.raises(RuntimeError, match=rf"^pymoe::{name}: there is no CUDA kernel .* backend='reference'$"):
            to_cuda(*call.args)
