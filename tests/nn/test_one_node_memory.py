"""A layer that is one autograd node never holds more memory than its operators' separate nodes, in any part of a
step.
"""

import pytest
import torch
from allocations import allocations
from moe_layers import one_by_one
from torch.autograd.graph import get_gradient_edge

from pymoe.nn import MoE
from pymoe.pipe.split_backward import SplitBackward

pytestmark = pytest.mark.only_on("cpu")
TOKENS, HIDDEN, FFN, EXPERTS, CHOICES = 512, 64, 64, 8, 4
ROWS = TOKENS * CHOICES * HIDDEN * 4
"""The size in bytes of the rows of all choices."""
LITTLE = ROWS // 8

FROZEN = {
    "nothing": (),
    "experts": ("experts",),
    "all but the router": ("x", "experts"),
    "all but w_out": ("x", "router", "w_in", "b_in", "b_out"),
    "all but w_in": ("x", "router", "w_out", "b_in", "b_out"),
    "all but the experts": ("x", "router"),
    "router": ("router",),
    "all but x": ("experts", "router"),
    "all but b_out": ("x", "router", "w_in", "b_in", "w_out"),
}


def make(frozen=(), **options):
    torch.manual_seed(0)
    layer = MoE(HIDDEN, FFN, EXPERTS, CHOICES, bias=True, **options)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not set(name.split(".")) & set(frozen))
    return layer, torch.randn(TOKENS, HIDDEN).requires_grad_("x" not in frozen)


def both_ways(measure):
    found = [measure()]
    with one_by_one():
        found.append(measure())
    return found


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_a_step_takes_no_more_than_that_of_the_operators(frozen, tmp_path):
    """A node kept the rows and the steps of experts without gradients, and the gradient of the last product, S * O,
    until its backward pass was over.
    """

    def measure():
        layer, x = make(frozen)
        y, kept, _ = allocations(lambda: layer(x), tmp_path)
        grad = torch.ones_like(y)
        _, _, most = allocations(lambda: y.backward(grad), tmp_path)
        return kept, kept + most

    (kept, most), (kept_by_nodes, most_by_nodes) = both_ways(measure)
    assert kept <= kept_by_nodes + LITTLE
    assert most <= most_by_nodes + LITTLE


def test_a_backward_pass_in_two_parts_takes_no_more_than_that_of_the_operators(tmp_path):
    """The second part got zeros for all outputs of the node without a gradient, four of them as large as the rows."""

    def measure():
        layer, x = make()
        start = x.mul(1.0)
        y, kept, _ = allocations(lambda: layer(start), tmp_path)
        leaves, edge, grad = list(layer.parameters()), get_gradient_edge(y), torch.ones_like(y)
        split, left, most = allocations(
            lambda: SplitBackward([edge], [grad], [get_gradient_edge(x)], leaves, False), tmp_path
        )
        found, _, later = allocations(split.weight_gradients, tmp_path)
        assert all(one is not None for one in found)
        return kept + left, kept + most, kept + left + later

    found, expected = both_ways(measure)
    for one, other in zip(found, expected, strict=True):
        assert one <= other + LITTLE


def test_the_second_part_of_a_backward_pass_leaves_nothing_behind():
    """The node kept what the first part had left for the second, and a later pass over a kept graph started from it."""
    layer, x = make()
    y = layer(x.mul(1.0))
    split = SplitBackward(
        [get_gradient_edge(y)], [torch.ones_like(y)], [get_gradient_edge(x)], list(layer.parameters()), False
    )
    assert y.grad_fn.left is not None
    split.weight_gradients()
    assert y.grad_fn.left is None


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_only_what_a_gradient_reads_is_saved(frozen):
    """The node saved tensors that frozen experts, a frozen router or tokens without a gradient do not need."""
    layer, x = make(frozen)
    y = layer(x)
    rows, inner, active, outer, _, _, token, _, w_in, w_out, logits, experts = y.grad_fn.saved_tensors
    need = {name: parameter.requires_grad for name, parameter in layer.experts.named_parameters()}
    below = x.requires_grad or need["w_in"] or need["b_in"]
    router = x.requires_grad or layer.router.weight.requires_grad
    assert (rows is not None) == need["w_in"]
    assert (inner is not None) == (w_out is not None) == below
    assert (active is not None) == need["w_out"]
    assert (token is not None) == (w_in is not None) == x.requires_grad
    assert (logits is not None) == (experts is not None) == router
    assert outer is not None
