"""Run with the plugin ``emulated_ops``: every operator does reach its CUDA kernel there."""

import pytest
import torch

import pymoe  # noqa: F401
from pymoe.testing.calls import generator
from pymoe.testing.specs import all_specs

CALLS = [call for spec in all_specs() if spec.raw_calls for call in spec.raw_calls(generator())]


@pytest.mark.parametrize("name", sorted({call.operator for call in CALLS}))
def test_operator_launches_an_emulated_kernel(name):
    before = torch.ops.pymoe_emulator.launches("")
    for call in CALLS:
        if call.operator == name:
            getattr(torch.ops.pymoe, name)(*call.args)
    assert torch.ops.pymoe_emulator.launches("") > before
