"""Experts in a split backward pass: their weight gradients wait, and everything is computed once."""

import pytest
import torch
from split_graphs import Case
from torch import nn

from pymoe import ops
from pymoe.nn import MoE

PRODUCTS = {"pymoe.grouped_linear": 2}
WEIGHT_PRODUCTS = {"pymoe.grouped_linear_weight_grad": 2}


def only(counted, names):
    return {name: times for name, times in counted.items() if name in names}


GROUPED = ("pymoe.grouped_linear", "pymoe.grouped_linear_weight_grad", "pymoe.grouped_linear_bias_grad")


@pytest.mark.parametrize("options", [{}, {"bias": True, "activation": "gelu"}, {"num_shared_experts": 2}], ids=str)
def test_a_mixture_puts_its_weights_off(options):
    torch.manual_seed(0)
    layer = MoE(8, 16, 4, 2, aux_loss_coef=0.01, z_loss_coef=0.001, **options)
    first, second = Case(nn.Sequential(nn.Linear(8, 8), layer), torch.randn(12, 8)).check()
    assert only(first, GROUPED) == PRODUCTS
    biases = {"pymoe.grouped_linear_bias_grad": 2} if options.get("bias") else {}
    assert only(second, GROUPED) == WEIGHT_PRODUCTS | biases


def test_a_mixture_under_autocast_puts_its_weights_off():
    torch.manual_seed(0)
    layer = MoE(8, 16, 4, 2)

    def build(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    first, second = Case(build, torch.randn(12, 8)).check()
    assert only(first, GROUPED) == PRODUCTS
    assert only(second, GROUPED) == WEIGHT_PRODUCTS


def test_tied_experts_put_their_weights_off():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 4, 4))
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)

    def build(x):
        return ops.grouped_linear(ops.grouped_linear(x, weight, offsets).sin(), weight.transpose(1, 2), offsets)

    first, second = Case(build, torch.randn(5, 4)).check()
    assert only(first, GROUPED) == PRODUCTS
    assert only(second, GROUPED) == WEIGHT_PRODUCTS


def test_frozen_experts_have_no_second_part():
    torch.manual_seed(0)
    layer = MoE(8, 16, 4, 2).requires_grad_(False)
    first, second = Case(layer, torch.randn(12, 8)).check()
    assert only(first, GROUPED) == PRODUCTS
    assert not second
