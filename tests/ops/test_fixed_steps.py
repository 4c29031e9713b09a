"""Tests of the functions that references are made of: accuracy, special values and gradients."""

import math

import pytest
import torch
from specs.comparison import assert_close, assert_same_bits

from pymoe.reference import fixed_steps

pytestmark = pytest.mark.only_on("cpu")
NAN, INF = math.nan, math.inf
ROWS = ("softmax", "logsumexp")
SAME_AS_TORCH = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "softmax": lambda x: torch.softmax(x, 1),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
}
names = pytest.mark.parametrize("name", [*SAME_AS_TORCH, "gelu"])


def numbers(low, high, count=20_001):
    return torch.linspace(low, high, count, dtype=torch.float64)


def true_gelu(x):
    values = [0.5 * v * math.erfc(-v * math.sqrt(0.5)) for v in x.double().tolist()]
    return torch.tensor(values, dtype=torch.float64)


def test_erfc_keeps_its_relative_accuracy():
    v = torch.cat((numbers(-6.0, 26.0), torch.tensor([0.46875, -0.46875, 4.0, -4.0, 0.0]).double()))
    true = torch.tensor([math.erfc(one) for one in v.tolist()], dtype=torch.float64)
    assert_close(fixed_steps.erfc_in_fixed_steps(v), true, (1e-15, 0.0))
    special = torch.tensor([INF, -INF, NAN, 1e300, -1e300, 0.0, -0.0], dtype=torch.float64)
    expected = torch.tensor([0.0, 2.0, NAN, 0.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    assert_same_bits(fixed_steps.erfc_in_fixed_steps(special), expected)


def test_log_is_within_an_ulp():
    x = torch.cat((numbers(0.5, 3.0), torch.logspace(-300, 300, 20_001, dtype=torch.float64)))
    true = torch.tensor([math.log(one) for one in x.tolist()], dtype=torch.float64)
    assert_close(fixed_steps.log_in_fixed_steps(x), true, (2.3e-16, 0.0))
    special = torch.tensor([1.0, INF, NAN], dtype=torch.float64)
    assert_same_bits(fixed_steps.log_in_fixed_steps(special), torch.tensor([0.0, INF, NAN], dtype=torch.float64))


@names
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, (5e-7, 1e-38)), (torch.float64, (1e-15, 1e-300))])
def test_near_the_true_values(name, dtype, tolerance):
    x = numbers(-30.0, 30.0, 20_000).to(dtype)
    x = x.reshape(-1, 40) if name in ROWS else x
    true = true_gelu(x) if name == "gelu" else SAME_AS_TORCH[name](x.double())
    relative, absolute = tolerance
    if name in ("gelu", "logsumexp"):  # a rounded argument moves gelu's tail, and a sum may come near 0
        absolute = 8 * relative
    assert_close(getattr(fixed_steps, name)(x).double(), true, (relative, absolute))


@names
def test_special_values(name):
    largest = torch.finfo(torch.float32).max
    expected = {
        "exp": [NAN, INF, 0.0, INF, 0.0, 1.0],
        "sigmoid": [NAN, 1.0, 0.0, 1.0, 0.0, 0.5],
        "silu": [NAN, INF, NAN, largest, -0.0, -0.0],
        "gelu": [NAN, INF, NAN, largest, -0.0, -0.0],
        "softmax": [NAN, NAN, NAN, 1.0, 1.0, 1.0],  # one value a row
        "logsumexp": [NAN, INF, -INF, largest, -largest, 0.0],
    }[name]
    x = torch.tensor([NAN, INF, -INF, largest, -largest, -0.0])
    y = getattr(fixed_steps, name)(x[:, None] if name in ROWS else x).flatten()
    assert_same_bits(y, torch.tensor(expected))


@pytest.mark.parametrize("row", [[INF, 1.0], [INF, INF], [-INF, -INF], [-INF, 1.0], [NAN, INF], [NAN, -INF]], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_special_values_beside_others(name, row):
    x = torch.tensor([row])
    assert_close(getattr(fixed_steps, name)(x), SAME_AS_TORCH[name](x))


@names
def test_derivatives_of_both_modes(name):
    x = (torch.rand(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6 - 3).requires_grad_()
    function = getattr(fixed_steps, name)
    assert torch.autograd.gradcheck(function, x, check_forward_ad=True, check_batched_grad=True, nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(function, x, check_fwd_over_rev=True, nondet_tol=0.0)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("size", [0, 1, 2, 5, 8])
def test_spread_and_its_gradient(size, in_order):
    value = torch.rand(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    spread = fixed_steps.spread(value, 1, size, in_order=in_order)
    assert torch.equal(spread, value[:, None].expand(3, size, 2))
    assert torch.autograd.gradcheck(
        lambda v: fixed_steps.spread(v, 1, size, in_order=in_order) ** 2, value, check_forward_ad=True
    )


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 1000])
def test_sums(count):
    values = torch.rand(2, count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for sums in (fixed_steps.sum_in_tree, fixed_steps.sum_in_order):
        assert_close(sums(values, 1), values.sum(1), (1e-14, 0.0))
