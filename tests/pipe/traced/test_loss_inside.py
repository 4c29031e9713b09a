"""Models that compute their own loss: its place in the output, and what a step does with it."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree
from traced_models import WIDTH, Many, Mlp, furthest, gradients, made, rows

from pymoe import LossWrapper, Pipe, TrivialLossWrapper, pipe_split, pipeline

pytestmark = pytest.mark.usefixtures("doubles")
TOLERANCE = 1e-12


class Pair(nn.Module):
    """Returns ``(output, loss)``, and in evaluation only the output."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, target):
        x = torch.tanh(self.first(x))
        pipe_split()
        out = self.second(x)
        return (out, F.mse_loss(out, target)) if self.training else out


@dataclass
class Result:
    out: torch.Tensor
    loss: torch.Tensor


_pytree.register_dataclass(Result)


class Named(Pair):
    def forward(self, x, target):
        return Result(*super().forward(x, target))


class Early(Pair):
    """Computes the loss before the last stage."""

    def forward(self, x, target):
        x = torch.tanh(self.first(x))
        loss = F.mse_loss(x, target)
        pipe_split()
        return {"loss": loss, "out": self.second(x.detach())}


@pytest.mark.thinned(usual=8)
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (Pair, (False, True)),
        (Pair, [None, True]),
        (Named, {"loss": True}),
        (Early, {"loss": True}),
        (Early, {"loss": True, "out": False}),
    ],
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_step_minimises_the_models_own_loss(kind, spec, schedule):
    model, plain = made(kind)
    pipe = pipeline(model, (rows(2), rows(2)), output_loss_value_spec=spec, chunks=3)
    assert pipe.has_loss_and_backward
    assert pipe.info().has_loss_and_backward
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for count in (7, 6, 8, 5) * 5:  # uneven micro-batches are weighted by their rows
        x, y = rows(count), rows(count, 2)
        losses = pipe.step(x, y, schedule=schedule)
        output = plain(x, y)
        loss = output[1] if isinstance(output, tuple) else output.loss if kind is Named else output["loss"]
        loss.backward()
        weights = torch.tensor([len(part) / count for part in x.tensor_split(3)])
        torch.testing.assert_close((losses * weights).sum(), loss.detach(), rtol=0, atol=TOLERANCE)
        for name, grad in gradients(plain).items():
            if grad is not None:
                torch.testing.assert_close(gradients(model)[name], grad, rtol=0, atol=TOLERANCE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert furthest(model.state_dict(), plain.state_dict()) <= TOLERANCE


def test_the_loss_of_a_mini_batch_is_the_mean_over_its_rows():
    model, plain = made(Pair)
    pipe = pipeline(model, (rows(2), rows(2)), output_loss_value_spec=(False, True), chunks=3)
    out, loss = pipe(rows(7), rows(7, 2))
    expected, expected_loss = plain(rows(7), rows(7, 2))
    torch.testing.assert_close((out, loss), (expected, expected_loss), rtol=0, atol=TOLERANCE)
    loss.backward()
    expected_loss.backward()
    assert furthest(gradients(model), gradients(plain)) <= TOLERANCE
    # In evaluation this model returns no loss.
    torch.testing.assert_close(pipe.eval()(rows(7), rows(7, 2)), expected, rtol=0, atol=TOLERANCE)


def test_a_loss_function_of_the_step_goes_before_the_models_own():
    model, plain = made(Pair)
    pipe = pipeline(model, (rows(2), rows(2)), output_loss_value_spec=(False, True), chunks=2)
    pipe.step(rows(6), rows(6, 2), loss_fn=lambda pair: pair[0].square().mean())
    plain(rows(6), rows(6, 2))[0].square().mean().backward()
    assert furthest(gradients(model), gradients(plain)) <= TOLERANCE


def test_losses_that_are_sums_add_up():
    class Sum(Pair):
        def forward(self, x, target):
            return F.mse_loss(super().forward(x, target)[0], target, reduction="sum")

    model = Sum()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, (rows(2), rows(2)), output_loss_value_spec=True, chunks=3)
    losses = pipe.step(rows(7), rows(7, 2), reduction="sum")
    loss = plain(rows(7), rows(7, 2))
    loss.backward()
    torch.testing.assert_close(losses.sum(), loss.detach(), rtol=0, atol=TOLERANCE)
    assert furthest(gradients(model), gradients(plain)) <= TOLERANCE


def test_a_model_in_a_loss_wrapper_says_itself_where_the_loss_is():
    model, plain = made(Mlp)
    pipe = Pipe.from_tracing(TrivialLossWrapper(model, F.mse_loss), (rows(2), rows(2)), chunks=3)
    assert pipe.num_stages == 3
    assert pipe.has_loss_and_backward
    losses = pipe.step(rows(7), rows(7, 2))
    assert losses.shape == (3,)
    F.mse_loss(plain(rows(7)), rows(7, 2)).backward()
    assert furthest(gradients(model), gradients(plain)) <= TOLERANCE


def test_a_loss_wrapper_of_ones_own():
    class Weighted(LossWrapper):
        @property
        def loss_spec(self):
            return {"total": True}

        def forward(self, x, target, factor):
            out = self.module(x)
            return {"total": self.loss_fn(out, target) * factor, "out": out}

    model, plain = made(Mlp)
    pipe = pipeline(Weighted(model, F.l1_loss), (rows(2), rows(2), 0.5), chunks=2)
    pipe.step(rows(6), rows(6, 2), 0.5)
    (F.l1_loss(plain(rows(6)), rows(6, 2)) * 0.5).backward()
    assert furthest(gradients(model), gradients(plain)) <= TOLERANCE
    assert set(pipe.state_dict()) == {f"module.{name}" for name in model.state_dict()}


def test_without_a_specification_there_is_no_loss():
    model, _ = made(Mlp)
    pipe = pipeline(model, (rows(2),), chunks=2)
    assert not pipe.has_loss_and_backward
    with pytest.raises(ValueError, match="one element"):
        pipe.step(rows(4))


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ({"halves": (False, False), "name": False}, ValueError, "expected one loss.* names 0"),
        ({"halves": (True, True)}, ValueError, "names 2"),
        ({"halves": True}, ValueError, "not a structure"),
        ({"halves": (True,)}, ValueError, "not a sequence of 1"),
        ({"loss": True}, ValueError, "has no 'loss'"),
        ({"name": True}, ValueError, "expected a tensor as the loss, got 'many'"),
        ({"halves": ("loss", True)}, TypeError, "got 'loss'"),
        ((False, True), ValueError, "not a sequence of 2"),
    ],
)
def test_specifications_that_name_no_loss_are_refused(spec, error, words):
    model, _ = made(Many)
    with pytest.raises(error, match=words):
        pipeline(model, ({"left": rows(2), "right": rows(2)},), output_loss_value_spec=spec)


def test_a_loss_wrapper_without_a_forward_is_refused():
    class Silent(LossWrapper):
        pass

    model = Silent(nn.Linear(2, 2), nn.functional.mse_loss)
    with pytest.raises(NotImplementedError, match="Silent has no forward: a subclass of LossWrapper computes the loss"):
        model(torch.ones(2, 2), torch.ones(2, 2))
