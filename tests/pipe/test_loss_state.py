"""A loss function is called once for each micro-batch, in order, even if others are recomputed: it may have state."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from pipe_models import assert_same_gradients
from torch import nn

from pymoe.nn import MoE
from pymoe.pipe import Pipe

D = torch.float64


class Centre(nn.Module):
    """A distance to a running mean, kept in a buffer, in a plain tensor and in a list."""

    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.zeros(4, dtype=D))
        self.plain, self.calls = torch.zeros(4, dtype=D), []
        self.norm = nn.BatchNorm1d(4, dtype=D)

    def forward(self, output):
        loss = (self.norm(output) - self.buffer - self.plain).square().mean()
        with torch.no_grad():
            self.buffer.mul_(0.9).add_(output.mean(0) * 0.1)
            self.plain = self.plain * 0.9 + output.mean(0) * 0.1
        self.calls.append(len(output))
        return loss

    compute = forward


class Plain:
    """The same distance without a module, so that its state cannot be found."""

    def __init__(self, centre):
        self.centre = centre
        self.held = [centre]

    def __call__(self, output):
        return vars(self)["held"][0](output)


HOLDERS = {
    "module": lambda centre: centre,
    "method": lambda centre: centre.compute,
    "partial": lambda centre: partial(Centre.forward, centre),
    "closure": lambda centre: lambda output: centre(output),
    "default": lambda centre: lambda output, held=centre: held(output),
    "object": Plain,
}


def state(centre):
    return [centre.buffer, centre.plain, centre.calls, centre.norm.running_var, centre.norm.num_batches_tracked]


@pytest.mark.parametrize("held", HOLDERS)
def test_the_state_of_a_loss_function_is_that_of_a_loop_over_micro_batches(held):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(D)
    x = torch.randn(12, 4, dtype=D)
    for checkpoint in ("never", "except_last", "always"):
        plain, piped = copy.deepcopy(model), copy.deepcopy(model)
        expected, found = Centre(), Centre()
        pipe = Pipe(piped, 4, checkpoint, balance=[2, 1])
        for _ in range(3):
            pipe.step(x, loss_fn=HOLDERS[held](found))
            for part in x.split(3):
                (expected(plain(part)) / 4).backward()
        torch.testing.assert_close(state(found), state(expected), rtol=0, atol=1e-15)
        for ours, theirs in zip(
            [*piped.parameters(), *found.parameters()], [*plain.parameters(), *expected.parameters()], strict=True
        ):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


class Trainer:
    """Has the model, and a loss with an MoE layer."""

    def __init__(self, model, moe):
        self.model, self.moe = model, moe

    def loss(self, output):
        return self.moe(output).square().mean()


LOSSES = {
    "module": lambda model, moe: nn.Sequential(moe, Mean()),
    "closure": lambda model, moe: lambda output: moe(output).square().mean(),
    "partial": lambda model, moe: partial(lambda moe, output: moe(output).square().mean(), moe),
    "method": lambda model, moe: Trainer(model, moe).loss,
    "attribute": lambda model, moe: (lambda trainer: lambda output: trainer.loss(output))(Trainer(model, moe)),
}


class Mean(nn.Module):
    def forward(self, output):
        return output.square().mean()


@pytest.mark.parametrize("held", LOSSES)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_auxiliary_loss_within_a_loss_function_counts_by_the_share_of_its_micro_batch(held, checkpoint):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(D)
    moe = MoE(4, 8, 4, top_k=2, aux_loss_coef=0.5).to(D)
    x = torch.randn(7, 4, dtype=D)
    inner = copy.deepcopy(moe)
    as_layer = nn.Sequential(*copy.deepcopy(model), inner)
    Pipe(as_layer, 3, checkpoint, balance=[1, 2]).step(x, loss_fn=Mean())
    Pipe(model, 3, checkpoint, balance=[1, 1]).step(x, loss_fn=LOSSES[held](model, moe))
    assert_same_gradients(moe, inner, rtol=1e-12, atol=1e-14)
    assert all(part.scale == 1.0 for part in moe.modules() if hasattr(part, "scale"))
