"""An operator without a CUDA kernel says so to CUDA tensors, in words that help."""

import pytest
import torch

import pymoe
from pymoe.testing.calls import generator
from pymoe.testing.specs import all_specs

pytestmark = pytest.mark.only_on("cpu")  # nothing is run
CALLS = {call.operator: call for spec in all_specs() if spec.raw_calls for call in spec.raw_calls(generator())}


@pytest.mark.parametrize("name", CALLS)
def test_every_operator_has_a_kernel_or_a_refusal(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pymoe::{name}", "CUDA")


def test_the_refusal_names_the_operator_and_the_ways_out():
    """Sent to the CUDA kernel past the choice by device, so that no GPU is needed."""
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    refused = 0
    for name, call in CALLS.items():
        if name.startswith("dispatch") and pymoe.build_info()["cuda_kernels"]:
            continue  # the kernel is there
        with pytest.raises(RuntimeError, match=rf"^pymoe::{name}: there is no CUDA kernel .* backend='reference'$"):
            getattr(torch.ops.pymoe, name).default.redispatch(cuda, *call.args)
        refused += 1
    assert refused >= len(CALLS) - 2
