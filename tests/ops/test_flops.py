"""Tests that torch's FLOP counter counts the same products for every native operator as for its reference."""

import pytest
import torch
from specs.quantized_weight import FORMATS
from torch.utils.flop_counter import FlopCounterMode

import pymoe
from pymoe.nn import MoE, quantize_experts
from pymoe.ops import flops

pytestmark = pytest.mark.only_on("cpu")
TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 24, 16, 20, 4, 2
ROUTER = 2 * TOKENS * HIDDEN * EXPERTS


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def products(gated=True, rows=TOKENS * TOP_K):
    return 2 * rows * (HIDDEN * FFN * (2 if gated else 1) + FFN * HIDDEN)


def layer(**options):
    return MoE(HIDDEN, FFN, EXPERTS, TOP_K, **options)


def test_every_operator_has_a_formula():
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("pymoe::")}
    assert {f"pymoe::{name}" for name in flops.FORMULAS} == names


@pytest.mark.parametrize("options", [{}, {"activation": "relu"}, {"bias": True}], ids=str)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_layer_is_counted_with_and_without_gradients(options, recorded):
    moe, x = layer(**options), torch.randn(TOKENS, HIDDEN)
    expected = ROUTER + products(gated="activation" not in options)
    with torch.set_grad_enabled(recorded):
        assert counted(lambda: moe(x)) == expected


def test_a_backward_pass_counts_twice_the_forward_pass():
    moe, x = layer(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    y = moe(x)
    assert counted(lambda: y.sum().backward()) == 2 * (ROUTER + products())


def test_choices_that_a_capacity_drops_count():
    moe = layer(capacity_factor=0.5)
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded):
            assert counted(lambda: moe(torch.randn(TOKENS, HIDDEN))) == ROUTER + products()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_quantised_experts_count_as_their_weights_did(form, activation):
    moe = layer(activation=activation).eval()
    quantize_experts(moe, *form)
    with torch.no_grad():
        assert counted(lambda: moe(torch.randn(TOKENS, HIDDEN))) == ROUTER + products(gated=activation == "swiglu")


@pytest.mark.parametrize("outputs", [8, 12])
def test_products_are_counted_by_the_rows_that_an_order_names(outputs):
    x, weight = torch.randn(6, 16), torch.randn(2, outputs, 16, requires_grad=True)
    offsets, order = torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor([5, 4, 3, 2, 1, 0], dtype=torch.int32)
    assert counted(lambda: pymoe.ops.grouped_linear(x, weight, offsets)) == 2 * 6 * 16 * outputs
    y = pymoe.ops.grouped_linear(x, weight, offsets, order=order)
    assert counted(lambda: y.sum().backward()) == 2 * 6 * 16 * outputs


def test_a_pipeline_is_split_where_half_of_the_products_are():
    """MoE layers counted as 0 FLOPs, so one stage got all of them and most of the other layers."""
    linear = torch.nn.Linear(HIDDEN, HIDDEN)
    model = torch.nn.Sequential(layer(), layer(), linear, torch.nn.Linear(HIDDEN, HIDDEN))
    pipe = pymoe.pipeline(model, (torch.randn(TOKENS, HIDDEN),), split_policy=pymoe.pipe.split_by_flops(2))
    assert [name.split(".")[0] for name, _ in pipe.get_stage_module(0).named_parameters()].count("1") == 0
