"""Auxiliary losses reach the gradients by injection, exactly as if they had been added to the model's loss."""

import pytest
import torch
from moe_layers import BACKENDS, assert_same, gradients, make_input, make_layer, run
from torch import nn

from pymoe import reference
from pymoe.nn import inject_loss, quantize_experts, set_aux_loss_scale, update_expert_biases

COEFFICIENTS = {"aux_loss_coef": 0.7, "z_loss_coef": 0.3}


def explicit_auxiliary(layer, x):
    """Return the auxiliary losses that injection replaces, as a user would add them to the loss."""
    gate, logits = layer.router(x)
    losses = reference.router_losses(logits, gate.load, score=layer.router.score)
    return layer.losses.aux_loss_coef * losses.load_balancing + layer.losses.z_loss_coef * losses.z


def without_losses(layer):
    plain = make_layer(**{"backend": layer.backend, "score": layer.router.score})
    plain.load_state_dict(layer.state_dict())
    return plain


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_injection_equals_an_explicit_loss_term(score, backend):
    layer = make_layer(score=score, backend=backend, **COEFFICIENTS)
    x = make_input(20)
    y, injected = run(layer, x)
    plain = without_losses(layer)
    plain_y, _ = run(plain, x)
    assert torch.equal(y, plain_y)

    explicit_auxiliary(layer, x).backward()
    auxiliary = gradients(layer, x)
    _, expected = run(plain, x)
    for name in ("router.weight", "x"):
        expected[name] = expected[name] + auxiliary[name]
        assert auxiliary[name].abs().max() > 1e-3
    assert_same(injected, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("factor", [0.0, 1e-3, 128.0])
def test_the_factor_of_the_main_loss_does_not_scale_the_injected_losses(factor):
    layer = make_layer(**COEFFICIENTS)
    x = make_input(20)
    _, found = run(layer, x, factor=factor)
    _, plain = run(without_losses(layer), x, factor=factor)
    explicit_auxiliary(layer, x).backward()
    auxiliary = gradients(layer, x)
    difference = found["router.weight"] - plain["router.weight"]
    torch.testing.assert_close(difference, auxiliary["router.weight"], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_scale_of_the_injected_losses_follows_loss_scaling(as_tensor):
    layer = make_layer(**COEFFICIENTS)
    model = nn.Sequential(nn.Identity(), layer)
    x = make_input(20)
    _, unscaled = run(layer, x)
    set_aux_loss_scale(model, torch.tensor(1024.0) if as_tensor else 1024.0)
    _, scaled = run(layer, x, factor=1024.0)
    assert_same({name: grad / 1024.0 for name, grad in scaled.items()}, unscaled, rtol=1e-12, atol=1e-13)


def test_scale_divides_over_accumulated_micro_batches():
    layer = make_layer(**COEFFICIENTS)
    batches = [make_input(20, seed=seed) for seed in (1, 2, 3, 4)]
    set_aux_loss_scale(layer, 1 / len(batches))
    for x in batches:
        (layer(x).sum() / len(batches)).backward()
    accumulated = layer.router.weight.grad
    layer.zero_grad()
    set_aux_loss_scale(layer, 1.0)
    loss = sum(layer(x).sum() for x in batches)
    (loss / len(batches)).backward()
    plain = without_losses(layer)
    (sum(plain(x).sum() for x in batches) / len(batches)).backward()
    auxiliary_of_all = layer.router.weight.grad - plain.router.weight.grad
    expected = plain.router.weight.grad + auxiliary_of_all / len(batches)
    torch.testing.assert_close(accumulated, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", ["1", None, float("nan"), float("inf"), torch.ones(2), torch.tensor(1)])
def test_scale_must_be_a_finite_scalar(scale):
    with pytest.raises((TypeError, ValueError), match="set_aux_loss_scale: scale must be"):
        set_aux_loss_scale(make_layer(), scale)


def test_nothing_is_injected_in_evaluation():
    layer = make_layer(**COEFFICIENTS).eval()
    x = make_input(20)
    _, found = run(layer, x)
    _, expected = run(without_losses(layer), x)
    assert_same(found, expected)


def test_losses_of_two_layers_add_up():
    first, second = make_layer(seed=1, **COEFFICIENTS), make_layer(seed=2, **COEFFICIENTS)
    x = make_input(20)
    second(first(x)).sum().backward()
    found = second.router.weight.grad.clone()
    second.zero_grad()
    middle = first(x).detach()
    (without := without_losses(second))(middle).sum().backward()
    explicit_auxiliary(second, middle).backward()
    expected = without.router.weight.grad + second.router.weight.grad
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("call", [quantize_experts, update_expert_biases, lambda model: set_aux_loss_scale(model, 1.0)])
def test_functions_of_a_model_say_what_they_take(call):
    with pytest.raises(TypeError, match=r": model must be a torch\.nn\.Module, got list"):
        call([make_layer()])


def test_inject_loss_gives_the_loss_the_gradient_one():
    a = torch.tensor([1.0, 2.0], requires_grad=True)
    b = torch.tensor(3.0, requires_grad=True)
    out = inject_loss(a, b * b)
    assert torch.equal(out, a)
    (out * torch.tensor([5.0, 7.0])).sum().backward()
    assert a.grad.tolist() == [5.0, 7.0]
    assert b.grad.item() == 6.0


def test_injected_gradients_lead_to_balance():
    """Training only on the auxiliary loss balances a router that sends everything to one expert."""
    layer = make_layer(num_experts=4, top_k=1, aux_loss_coef=1.0)
    x = make_input(64).detach()
    with torch.no_grad():
        layer.router.weight[0] += 2.0 * x.mean(0)
        layer.router.weight[0] += torch.linalg.lstsq(x, torch.full((64,), 1.0, dtype=x.dtype)).solution
    optimizer = torch.optim.Adam(layer.router.parameters(), lr=0.02)
    layer(x)
    before = layer.stats
    for _ in range(60):
        optimizer.zero_grad()
        (0.0 * layer(x).sum()).backward()
        optimizer.step()
    layer(x)
    after = layer.stats
    assert before.load.max() >= 28
    assert after.load.max() <= 22
    assert after.load_balancing_loss < before.load_balancing_loss
