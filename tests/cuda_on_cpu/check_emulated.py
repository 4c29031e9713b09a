"""Tests that every operator reaches its CUDA kernel on the emulator. Run with the plugin ``emulated_ops``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from specs import WITHOUT_CUDA, all_raw_calls

import pymoe

CALLS = all_raw_calls()


@pytest.mark.parametrize("name", sorted({call.operator for call in CALLS} - WITHOUT_CUDA))
def test_operator_launches_an_emulated_kernel(name):
    before = torch.ops.pymoe_emulator.launches("")
    for call in CALLS:
        if call.operator == name:
            getattr(torch.ops.pymoe, name)(*call.args)
    assert torch.ops.pymoe_emulator.launches("") > before


@pytest.mark.parametrize(
    ("dtype", "features", "by_torch"),
    [(torch.bfloat16, 16, True), (torch.bfloat16, 12, False), (torch.float16, 16, False), (torch.float32, 16, False)],
    ids=str,
)
def test_grouped_linear_leaves_to_torch_what_torch_makes_without_the_host(dtype, features, by_torch):
    """The inputs are small integers, so sums are exact, and both ways must give the reference's bits."""
    offsets = torch.tensor([0, 5, 5, 40], dtype=torch.int32)
    shapes = [(43, features), (3, 24, features), (43, 24)]
    x, weight, grad = (
        torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(1)).to(dtype) for shape in shapes
    )
    results = []
    for ops in (pymoe.ops, pymoe.reference):
        leaves = [value.clone().requires_grad_() for value in (x, weight)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            y = ops.grouped_linear(leaves[0], leaves[1], offsets)
            results.append([y.detach(), *torch.autograd.grad(y, leaves, grad)])
        calls = sum(event.name == "aten::_grouped_mm" for event in profile.events())
        assert calls == (3 if by_torch and ops is pymoe.ops else 0)  # y, dx and dweight
    for native, reference in zip(*results, strict=True):
        assert torch.equal(native, reference)


SWITCHED = """
import emulated_ops, torch, pymoe

x, weight = torch.ones(8, 16).bfloat16(), torch.ones(2, 24, 16).bfloat16().requires_grad_()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    y = pymoe.ops.grouped_linear(x.requires_grad_(), weight, torch.tensor([0, 3, 8], dtype=torch.int32))
    torch.autograd.grad(y, [x, weight], torch.ones_like(y))
assert (y == 16).all()
print(sum(event.name == "aten::_grouped_mm" for event in profile.events()))
"""


@pytest.mark.parametrize(("value", "calls"), [(None, "3"), ("", "3"), ("1", "3"), ("0", "0"), ("no", "")])
def test_a_variable_of_the_environment_keeps_products_away_from_torch(value, calls):
    """The variable allows comparing pymoe's kernel with torch's product, and avoiding torch's product."""
    environment = {name: text for name, text in os.environ.items() if name != "PYMOE_TORCH_GROUPED_MM"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    if value is not None:
        environment["PYMOE_TORCH_GROUPED_MM"] = value
    done = subprocess.run(
        [sys.executable, "-c", SWITCHED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == calls, done.stderr
    if value == "no":
        assert "ValueError: grouped_linear: PYMOE_TORCH_GROUPED_MM must be 0 or 1, got 'no'" in done.stderr
