"""Mixture-of-experts layers on the stages of a pipe: losses, loads and biases."""

import pytest
import torch
from pipe_models import CHECKPOINT, SCHEDULES, assert_same_gradients
from torch import nn
from torch.nn import functional as F

from pymoe.nn import MoE, set_aux_loss_scale, update_expert_biases
from pymoe.pipe import Pipe

HIDDEN = 8


def build(**options):
    torch.manual_seed(0)
    layers = [
        nn.Linear(HIDDEN, HIDDEN),
        MoE(HIDDEN, 12, 4, 2, **options),
        nn.LayerNorm(HIDDEN),
        MoE(HIDDEN, 12, 4, 2, **options),
        nn.Linear(HIDDEN, HIDDEN),
    ]
    return nn.Sequential(*layers).double()


def batch(rows):
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_that_are_means_over_tokens_are_those_of_the_mini_batch(schedule, checkpoint):
    """The z-loss of a middle layer reaches its router, weighted by the micro-batch's tokens."""
    plain, model = build(z_loss_coef=0.1), build(z_loss_coef=0.1)
    x, y = batch(22)
    F.mse_loss(plain(x), y).backward()
    Pipe(model, 4, checkpoint).step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
    assert_same_gradients(model, plain)
    without = build()
    Pipe(without, 4, checkpoint).step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
    assert not torch.equal(without[1].router.weight.grad, model[1].router.weight.grad)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_the_balancing_loss_is_the_mean_of_those_of_micro_batches(checkpoint, scale):
    plain, model = build(aux_loss_coef=0.1), build(aux_loss_coef=0.1)
    x, y = batch(22)
    for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        set_aux_loss_scale(plain, scale * len(a) / len(x))
        (F.mse_loss(plain(a), b) * (len(a) / len(x))).backward()
    set_aux_loss_scale(model, scale)
    pipe = Pipe(model, 4, checkpoint)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    assert_same_gradients(model, plain)
    pipe.zero_grad()
    F.mse_loss(pipe(x), y).backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_token_is_counted_once_and_biases_move_once_a_step(schedule, checkpoint):
    plain, model = build(bias_update_rate=0.01), build(bias_update_rate=0.01)
    pipe = Pipe(model, 3, checkpoint)
    for rows in (22, 9):
        x, y = batch(rows)
        F.mse_loss(plain(x), y).backward()
        pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
        assert_same_gradients(model, plain)
        for net in (plain, model):
            update_expert_biases(net)
        for layer in (1, 3):
            assert model[layer].router.expert_bias.abs().sum() > 0
            assert torch.equal(model[layer].router.expert_bias, plain[layer].router.expert_bias)
