"""Parts that replace a layer's own, and options of parts that change after the layer is made."""

import pytest
import torch
from moe_layers import BACKENDS, assert_same, make_input, make_layer, run
from torch import nn

from pymoe.nn import Router
from pymoe.nn.options import MIN_STEPS_TO_WARN

PARTS = ("router", "experts", "losses", "shared")


class Around(nn.Module):
    """A module around another one that exposes only the call."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


class FirstChoice(Router):
    """A router that passes on only the first of its choices."""

    def forward(self, x_TH):
        gate, logits_TE = super().forward(x_TH)
        first = gate._replace(weights=gate.weights[:, :1], experts=gate.experts[:, :1].contiguous())
        load = torch.bincount(first.experts.flatten().long(), minlength=self.num_experts).to(torch.int32)
        return first._replace(load=load), logits_TE


def on_the_layer(layer):
    layer.top_k = 1


def on_the_router(layer):
    layer.router.top_k = 1


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.5}, {"capacity_factor": 1.0}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("set_to_one", [on_the_layer, on_the_router])
def test_another_number_of_choices_holds_for_all_of_the_layer(set_to_one, backend, options):
    """The layer kept its own number of choices: its capacity was for two choices although the router made one."""
    layer = make_layer(renormalize=False, backend=backend, **options)
    expected = make_layer(top_k=1, renormalize=False, backend=backend, **options)
    set_to_one(layer)
    assert layer.top_k == layer.router.top_k == 1
    assert repr(layer) == repr(expected)
    x = make_input(40)
    found, wanted = run(layer, x), run(expected, x)
    assert torch.equal(found[0], wanted[0])
    assert_same(found[1], wanted[1])
    assert torch.equal(layer.stats.dropped, expected.stats.dropped)
    with torch.no_grad():
        assert torch.equal(layer(x), wanted[0])


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "no_grad"])
def test_a_capacity_counts_the_choices_that_a_router_of_ones_own_makes(recorded):
    layer = make_layer(renormalize=False, capacity_factor=0.5)
    layer.router.__class__ = FirstChoice
    x = make_input(40)
    with torch.set_grad_enabled(recorded):
        layer(x)
    assert int(layer.stats.load.sum()) == 40
    limit = 3  # ceil(0.5 * 40 / 8)
    assert int(layer.stats.dropped) == int((layer.stats.load - limit).clamp(min=0).sum()) > 0


@pytest.mark.filterwarnings("ignore:MoE. the layer was trained without")
@pytest.mark.parametrize("options", [{}, {"aux_loss_coef": 0.1, "bias_update_rate": 0.1}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", PARTS)
def test_a_layer_with_a_part_in_a_wrapper_goes_on(part, backend, options):
    """``eval()`` and ``state_dict()`` asked the router for what a wrapper does not show, and so did the statistics."""
    layer, x = make_layer(num_shared_experts=1, backend=backend, **options), make_input(5)
    with torch.no_grad():
        for _ in range(MIN_STEPS_TO_WARN):
            layer.router.weight.add_(0)
    expected, before = run(layer, x)[0], layer.stats
    setattr(layer, part, Around(getattr(layer, part)))
    assert torch.equal(run(layer, x)[0], expected)
    assert torch.equal(layer.eval()(x), expected)
    with torch.no_grad():
        assert torch.equal(layer.train()(x), expected)
    assert all(torch.equal(one, other) for one, other in zip(layer.stats, before, strict=True))
    assert layer.state_dict()
    assert repr(layer)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "no_grad"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_experts_of_ones_own_return_rows_of_the_hidden_size(backend, recorded, device):
    """The shared experts' single feature per token was added to every feature of the output."""
    layer, x = make_layer(num_shared_experts=1, backend=backend), make_input(5)
    layer.shared = nn.Linear(12, 1, dtype=torch.float64).to(device)
    with (
        torch.set_grad_enabled(recorded),
        pytest.raises(ValueError, match=r"shared experts must return rows \(T, H\) = \(5, 12\), got \(5, 1\)"),
    ):
        layer(x)
