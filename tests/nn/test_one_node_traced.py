"""Programs of torch.jit.trace, recorded with gradients, compute what the layer does, also for other tokens."""

import warnings

import pytest
import torch
from moe_layers import OPTIONS, assert_same, make_input, make_layer, run

from pymoe.nn import apply_experts

pytestmark = pytest.mark.only_on("cpu")


def traced(function, *example):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return torch.jit.trace(function, example, check_trace=False)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_traced_layer_routes_the_tokens_that_it_is_given(options):
    """The tracer did not record how the node computes its logits, so a traced program sent all tokens to the experts of
    its example's tokens.
    """
    layer = make_layer(**options)
    program = traced(layer, make_input(5))
    for seed in (3, 4):
        y, found = run(layer, make_input(5, seed=seed), program)
        y_expected, expected = run(make_layer(**options), make_input(5, seed=seed))
        assert_same(found | {"y": y}, expected | {"y": y_expected})


def test_traced_experts_follow_the_choice_that_they_are_given():
    layer, x = make_layer(), make_input(4)
    w_in, w_out = layer.experts.w_in.detach(), layer.experts.w_out.detach()
    weights = torch.rand(4, 2, dtype=x.dtype)

    def choose(x, experts):
        return apply_experts(x, experts, weights, w_in, w_out)

    program = traced(choose, x, torch.tensor([[0, 1]] * 4))
    other = torch.tensor([[2, 1], [3, 0], [1, 2], [0, 3]])
    assert torch.equal(program(x, other), choose(x, other))
