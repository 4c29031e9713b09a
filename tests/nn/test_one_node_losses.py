"""Losses that a layer injects while it is one node of autograd: the output stays free, and derivatives are the same."""

from contextlib import nullcontext

import pytest
import torch
from moe_layers import assert_same, gradients, make_input, make_layer, one_by_one, run, with_backend
from specs.comparison import assert_same_bits
from torch._dynamo import compiled_autograd

from pymoe.nn import set_aux_loss_scale

pytestmark = pytest.mark.only_on("cpu")

INJECTED = {
    "none": {},
    "balancing": {"aux_loss_coef": 0.1},
    "z": {"z_loss_coef": 0.1},
    "both": {"aux_loss_coef": 0.1, "z_loss_coef": 0.2, "score": "sigmoid"},
    "counted": {"bias_update_rate": 0.1},
    "all": {"aux_loss_coef": 0.1, "z_loss_coef": 0.2, "bias_update_rate": 0.1, "num_shared_experts": 1},
}


def add_residual(y, x):
    y += x
    return y


def clear_a_token(y, x):
    y[0].zero_()
    return y


CHANGES = (
    add_residual,
    clear_a_token,
    lambda y, x: y.mul_(2),
    lambda y, x: torch.nn.functional.dropout(y, 0.3, True, inplace=True),
    lambda y, x: torch.nn.functional.relu_(y),
    lambda y, x: y.view(-1).add_(1),
)


@pytest.mark.parametrize("change", CHANGES, ids=["residual", "row", "factor", "dropout", "relu", "view"])
@pytest.mark.parametrize("options", INJECTED.values(), ids=INJECTED)
def test_the_output_may_be_changed_in_place(options, change):
    """Losses were injected into a view of the output, and torch refused to change that view in place."""
    for shape in ((5,), (2, 3)):
        results = []
        for single in (True, False):
            layer, x = make_layer(**options), make_input(*shape)
            with pytest.MonkeyPatch.context() if single else one_by_one():
                y = layer(x)
            torch.manual_seed(5)
            y = change(y, x)
            y.square().sum().backward()
            results.append((y.detach(), gradients(layer, x)))
        (y, found), (y_expected, expected) = results
        assert_same_bits(y, y_expected)
        assert_same(found, expected)


def of_sum(y):
    return y.sum()


def of_square(y):
    return y.square().sum()


@pytest.mark.thinned(usual=40)
@pytest.mark.parametrize("options", INJECTED.values(), ids=INJECTED)
@pytest.mark.parametrize("objective", [of_sum, of_square])
@pytest.mark.parametrize("wrt", ["x", "router.weight", "experts.w_in", "experts.w_out", "everything"])
@pytest.mark.parametrize("with_loss", [False, True], ids=["penalty", "loss and penalty"])
def test_second_derivatives_are_those_of_the_reference(options, objective, wrt, with_loss):
    """A loss is injected as often as a gradient comes back through the weights of the choice: in a second backward pass
    again, if it reaches them. The load is counted as often.
    """
    results = []
    for backend in ("native", "reference"):
        layer, x = with_backend(make_layer(**options), backend), make_input(5)
        parameters = dict(layer.named_parameters())
        leaves = [x, *parameters.values()] if wrt == "everything" else [x if wrt == "x" else parameters[wrt]]
        loss = objective(layer(x))
        penalty = sum(grad.square().sum() for grad in torch.autograd.grad(loss, leaves, create_graph=True))
        (loss + penalty if with_loss else penalty).backward()
        results.append((gradients(layer, x), layer.router.counted["load"].clone()))
    (found, counted), (expected, counted_expected) = results
    for name, grad in expected.items():
        assert (found[name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(
                found[name], grad, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
            )
    assert torch.equal(counted, counted_expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.3, 3, torch.tensor(0.3), torch.tensor(0.3, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("options", INJECTED.values(), ids=INJECTED)
def test_gradients_of_injected_losses_have_the_bits_of_their_operators(options, scale, dtype):
    results = []
    for single in (True, False):
        layer, x = make_layer(**options, dtype=dtype), make_input(7, dtype=dtype)
        set_aux_loss_scale(layer, scale)
        with pytest.MonkeyPatch.context() if single else one_by_one():
            y = layer(x)
        y.sum().backward()
        results.append((gradients(layer, x), layer.stats, layer.router.counted["load"].clone()))
    (found, stats, counted), (expected, stats_expected, counted_expected) = results
    assert_same(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(stats, stats_expected, strict=True))
    assert torch.equal(counted, counted_expected)


def test_a_scale_that_changes_after_the_forward_does_not_count():
    layer, x = make_layer(aux_loss_coef=0.5), make_input(7)
    scale = torch.tensor(2.0)
    set_aux_loss_scale(layer, scale)
    layer(x).sum().backward()
    expected = gradients(layer, x)
    y = layer(x)
    scale.fill_(100.0)
    y.sum().backward()
    assert_same(gradients(layer, x), expected)


@pytest.mark.parametrize("score", ["tanh", None, 3])
def test_a_score_that_is_none_is_refused_where_losses_are_injected(score):
    layer, x = make_layer(aux_loss_coef=0.5), make_input(7)
    layer.losses.score = score
    with pytest.raises((ValueError, TypeError), match="score must be"):
        layer(x)


@pytest.mark.thinned(usual=2)
@pytest.mark.parametrize("options", INJECTED.values(), ids=INJECTED)
def test_compiled_autograd_runs_the_node(options):
    results = []
    for compiled in (True, False):
        layer, x = make_layer(**options), make_input(5)
        y = layer(x)
        with compiled_autograd._enable(torch.compile(backend="eager")) if compiled else nullcontext():
            y.sum().backward()
        results.append((gradients(layer, x), layer.router.counted["load"].clone()))
    (found, counted), (expected, counted_expected) = results
    assert_same(found, expected)
    assert torch.equal(counted, counted_expected)


def test_losses_of_the_reference_are_used():
    layer, x = make_layer(aux_loss_coef=0.5), make_input(7)
    layer.losses.backend = "reference"
    layer(x).sum().backward()
    found = gradients(layer, x)
    layer.losses.backend = "native"
    layer(x).sum().backward()
    torch.testing.assert_close(found["router.weight"], gradients(layer, x)["router.weight"])


@pytest.mark.parametrize("name", ["scale", "aux_loss_coef", "z_loss_coef"])
@pytest.mark.parametrize("value", [2.0, [2.0], [[2.0]]], ids=["scalar", "one element", "one by one"])
def test_tensors_that_were_set_by_hand_scale_what_is_injected(name, value):
    """In one node, losses set by hand had no gradient of their own, and those that were not scalars raised in the
    backward pass.
    """
    results = []
    for mode in (nullcontext, one_by_one):
        layer, factor = make_layer(aux_loss_coef=0.1, z_loss_coef=0.2), torch.tensor(value, requires_grad=True)
        setattr(layer.losses, name, factor)
        with mode():
            y, found = run(layer, make_input(5))
        results.append(found | {"y": y, "factor": factor.grad})
    assert results[0]["factor"] is not None
    assert_same(*results)
