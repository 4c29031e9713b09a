"""A configuration that runs without an error but balances nothing is reported once, at no cost to a training step."""

import copy
import warnings

import pytest
import torch
from moe_layers import make_input, make_layer
from torch import nn

from pymoe.nn import MoE, Router, options, update_expert_biases

COUNTS_STEPS = pytest.mark.only_on("cpu", "cuda")  # a move to the pretended device makes other parameters


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(options, "_warned", set())


@pytest.fixture
def heard():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def texts(heard):
    return [str(one.message) for one in heard if issubclass(one.category, UserWarning)]


def with_bias():
    """Return a layer with a bias that begins at zero, as a user's does."""
    layer = make_layer(bias_update_rate=0.1)
    layer.router.expert_bias.zero_()
    return layer


def trained(layer, steps=options.MIN_STEPS_TO_WARN, after=lambda layer: None):
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    x = make_input(5)
    for _ in range(steps):
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()
        after(layer)
    return layer


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(make_layer())], ids=["no_layer", "no_bias"])
def test_an_update_of_nothing(heard, model):
    for _ in range(3):
        update_expert_biases(model)
    (text,) = texts(heard)
    assert text.startswith("update_expert_biases: ")
    assert "bias_update_rate=" in text
    assert heard[0].filename == __file__, "the warning names the caller's line"


@COUNTS_STEPS
@pytest.mark.parametrize("tell", [lambda layer: layer.eval(), lambda layer: layer.state_dict()], ids=["eval", "save"])
def test_a_bias_that_is_never_updated(heard, tell):
    layer = trained(with_bias())
    assert texts(heard) == []
    tell(layer)
    tell(layer.train())
    (text,) = texts(heard)
    assert "call pymoe.nn.update_expert_biases(model) after every optimizer.step()" in text


@COUNTS_STEPS
@pytest.mark.parametrize("tell", [lambda layer: layer.eval(), lambda layer: layer.state_dict()], ids=["eval", "save"])
def test_training_without_any_balancing(heard, tell):
    layer = trained(make_layer(aux_loss_coef=0.0, z_loss_coef=0.1))
    assert texts(heard) == []
    tell(layer)
    tell(layer.train())
    (text,) = texts(heard)
    assert "set aux_loss_coef" in text


def test_what_balances_is_not_told_of(heard):
    trained(with_bias(), after=update_expert_biases).eval().state_dict()
    trained(make_layer(aux_loss_coef=0.01)).eval().state_dict()
    trained(make_layer(num_experts=2, top_k=2)).eval().state_dict()  # every expert sees every token
    assert texts(heard) == []


def test_a_bias_that_something_else_moves_is_not_told_of(heard):
    """The bias may follow a user's own rule, or be a running mean of another model's parameters and buffers."""

    def by_hand(layer):
        with torch.no_grad():
            layer.router.expert_bias += 0.01 * (layer.stats.load == 0)

    trained(with_bias(), after=by_hand).eval().state_dict()
    model = with_bias()
    mean = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)

    def averaged(layer):
        update_expert_biases(layer)
        mean.update_parameters(layer)

    trained(model, after=averaged)
    mean.eval().state_dict()
    assert texts(heard) == []


def test_a_short_run_a_copy_and_a_trained_bias_are_not_told_of(heard):
    trained(with_bias(), steps=3).eval().state_dict()
    copy.deepcopy(make_layer()).eval()
    frozen = with_bias()
    frozen.load_state_dict(with_bias().state_dict())
    trained(frozen).eval()
    assert texts(heard) == []


@pytest.mark.only_on("cpu", "cuda")  # the pretended device does not support inference mode
@torch.inference_mode()
def test_made_for_inference(heard):
    layer = with_bias()
    layer(make_input(3))
    layer.eval()
    Router(4, 4, 2).eval()
    assert texts(heard) == []


def test_one_choice_with_renormalized_weights_is_told_of_once(heard, device):
    """With one renormalized choice, the router's gradient is exactly 0, so the router never learns."""
    layer = MoE(12, 10, 8, 1).to(device)
    layer(torch.randn(5, 12)).sum().backward()
    assert layer.router.weight.grad.eq(0).all()
    (text,) = texts(heard)
    assert "top_k=1 with renormalize=True" in text
    assert "pass renormalize=False" in text
    Router(12, 8, 1)
    assert len(texts(heard)) == 1


@pytest.mark.parametrize("options", [{"renormalize": False}, {"num_experts": 1}, {"top_k": 2}], ids=str)
def test_a_router_that_learns_is_not_told_of(options, heard):
    MoE(**{"hidden_size": 12, "ffn_size": 10, "num_experts": 8, "top_k": 1} | options)
    assert not texts(heard)
