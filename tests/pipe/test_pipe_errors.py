"""Failing stages, and wrong uses of pipes."""

import time

import pytest
import torch
from pipe_models import CHECKPOINT, SCHEDULES, WIDTH, assert_same_gradients, batches, row_model
from torch import nn
from torch.nn import functional as F
from unseen import unseen

from pymoe.pipe import Pipe, is_recomputing, micro_batch
from pymoe.pipe.schedules import build


class Wrong(Exception):
    pass


class FailsAt(nn.Module):
    """Fails in the given pass and micro-batch."""

    def __init__(self, where=None, index=1, pause=0.0):
        super().__init__()
        self.index, self.pause = index, pause
        self.told = unseen([where])  # not state of the model, so a recomputation does not restore it

    @property
    def where(self):
        return self.told()[0]

    @where.setter
    def where(self, where):
        self.told()[0] = where

    def forward(self, x):
        time.sleep(self.pause)
        index = micro_batch().index
        if index == self.index and self.where == ("repetition" if is_recomputing() else "forward"):
            raise Wrong("it")
        if index == self.index and self.where == "backward":

            def fail(grad):
                raise Wrong("it")

            x = x * 1.0
            if x.requires_grad:
                x.register_hook(fail)
        return x


CASES = [("forward", "never"), ("backward", "never"), ("repetition", "always"), ("backward", "always")]


@pytest.mark.thinned(usual=16)
@pytest.mark.parametrize("pause", [0.0, 0.001])  # on one thread, and on several
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("where", "checkpoint"), CASES)
def test_the_exception_of_a_stage_comes_out_with_its_place_and_the_pipe_works_on(where, checkpoint, schedule, pause):
    model = row_model()
    layers = [FailsAt(pause=pause) for _ in range(4)]
    for position, layer in zip((8, 6, 3, 2), layers, strict=True):
        model.insert(position, layer)
    pipe = Pipe(model, 3, checkpoint, balance=[3, 3, 3, 3])
    x, y = next(batches(1, (7,)))
    pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    for stage, layer in enumerate(reversed(layers)):
        pipe.zero_grad()
        layer.where = where
        with pytest.raises(Wrong, match="it") as failed:
            pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
        (note, *_) = failed.value.__notes__
        assert note.endswith(f"of stage {stage}, micro-batch 1")
        assert "backward" in note if where != "forward" else "forward" in note
        assert failed.traceback[-1].name in ("forward", "fail")
        assert all(parameter.grad is None for parameter in model.parameters())
        layer.where = None
        pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
        assert_same_gradients(model, expected, atol=0)


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_an_exception_in_the_loss_or_behind_a_loss_outside_comes_out(checkpoint):
    model = row_model()
    layer = FailsAt()
    model.append(layer)
    pipe = Pipe(model, 3, checkpoint, balance=[3, 3, 3])
    x, y = next(batches(1, (7,)))

    def loss_fn(output, target):
        raise Wrong("loss")

    with pytest.raises(Wrong, match="loss"):
        pipe.step(x, target=y, loss_fn=loss_fn)
    output = pipe(x)
    layer.where = "repetition"
    if checkpoint != "never":
        with pytest.raises(Wrong, match="it"):
            output.sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        with pytest.raises(RuntimeError, match="second time"):
            output.sum().backward()
    layer.where = None
    pipe(x).sum().backward()


def test_wrong_models_are_refused():
    class Own(nn.Sequential):
        def forward(self, x):
            return x

    for model, words in [
        (nn.Linear(2, 2), "must be an nn.Sequential, got Linear"),
        (Own(nn.ReLU()), "Own has a forward of its own"),
    ]:
        with pytest.raises(TypeError, match=words):
            Pipe(model)
    with pytest.raises(ValueError, match="no layers"):
        Pipe(nn.Sequential())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"chunks": 0}, ValueError, "chunks must be a positive integer, got 0"),
        ({"chunks": 2.0}, ValueError, "chunks must be a positive integer"),
        ({"checkpoint": "sometimes"}, ValueError, "always, except_last, never, got 'sometimes'"),
        ({"balance": [4, 5]}, ValueError, r"balance=\[4, 5\] is for 9 layers, the model has 8"),
        ({"balance": [8, 0]}, ValueError, "every stage must have a layer"),
        ({"balance": [4.0, 4.0]}, TypeError, "list of integers"),
        ({"balance": [4, 4], "devices": ["cpu"]}, ValueError, r"one device per stage \(2\), got 1"),
    ],
)
def test_wrong_options_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        Pipe(row_model(), **options)


def test_wrong_steps_are_refused():
    pipe = Pipe(row_model(), 2, balance=[4, 4])
    x, y = next(batches(1, (6,)))
    good = {"target": y, "loss_fn": F.mse_loss}
    for options, error, words in [
        ({"schedule": "fastest"}, ValueError, "no schedule 'fastest'"),
        ({"schedule": build("gpipe", 2, 3)}, ValueError, "got one for 2 stages and 3 micro-batches"),
        ({"chunks": 0}, ValueError, "chunks"),
        ({"reduction": "max"}, ValueError, "'mean' or 'sum', or a function, got 'max'"),
        ({"loss_fn": lambda a, b: a}, ValueError, r"one element, got a tensor of shape \(3, 5\)"),
        ({"loss_fn": lambda a, b: 1.0}, ValueError, "one element, got float"),
        ({"loss_fn": lambda a, b: a.sum().detach()}, RuntimeError, "does not require gradients"),
        ({"target": y[:3]}, ValueError, "same number of rows"),
    ]:
        with pytest.raises(error, match=words):
            pipe.step(x, **{**good, **options})
    with pytest.raises(TypeError, match="expected 1 input, got 2"):
        pipe.step(x, x, **good)
    pipe.step(x, **good)


def test_a_repetition_that_does_otherwise_is_refused():
    class Fickle(nn.Module):
        def forward(self, x):
            return (x, x) if is_recomputing() else (x,)

    pipe = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Fickle(), nn.Identity()), 2, "always")
    with pytest.raises(RuntimeError, match="has returned 1 tensors, and 2 when it was recomputed"):
        pipe.step(torch.randn(4, WIDTH), loss_fn=lambda pair: pair[0].sum())
