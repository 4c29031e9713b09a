"""Pipes of stages that the user gives."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pymoe import Pipe
from pymoe.pipe import INPUT, Source

pytestmark = pytest.mark.usefixtures("doubles")
WIDTH = 5


class Both(nn.Module):
    """Takes one value and returns two of other kinds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x)), {"early": x * 2}


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, early, mask):
        return self.linear(x * mask + early["early"])


def stages():
    torch.manual_seed(0)
    return [Both(), nn.Linear(WIDTH, WIDTH), Join()]


TAKES = [[Source(INPUT, 0)], [Source(0, 0)], [1, Source(0, 1), Source(INPUT, 1)]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_edges_go_where_they_are_said_to(schedule, checkpoint):
    first, middle, last = modules = stages()
    pipe = Pipe.from_stages(modules, TAKES, outputs=[2, Source(0, 0)], chunks=3, checkpoint=checkpoint)
    x, mask = torch.randn(7, WIDTH), torch.rand(7, WIDTH)

    def plain():
        value, early = first(x)
        return last(middle(value), early, mask), value

    torch.testing.assert_close(pipe(x, mask), plain(), rtol=0, atol=1e-12)
    pipe.step(x, mask, loss_fn=lambda pair: (pair[0] * pair[1]).mean(), schedule=schedule)
    ours = [parameter.grad for parameter in pipe.parameters()]
    pipe.zero_grad()
    output, value = plain()
    (output * value).mean().backward()
    torch.testing.assert_close(ours, [parameter.grad for parameter in pipe.parameters()], rtol=0, atol=1e-12)


def test_by_default_every_stage_takes_what_the_one_before_returns():
    modules = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    pipe = Pipe.from_stages(modules, chunks=2)
    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(pipe(x), nn.Sequential(*modules)(x), rtol=0, atol=1e-12)
    assert list(pipe.state_dict()) == list(nn.Sequential(*modules).state_dict())
    assert pipe.num_stages == 3
    assert pipe.get_stage_module(2) is modules[2]


def test_a_module_in_two_stages_is_replicated():
    tied = nn.Linear(WIDTH, WIDTH)
    pipe = Pipe.from_stages([tied, nn.Tanh(), tied], chunks=2)
    assert pipe.replicated_params == [{0: "weight", 2: "weight"}, {0: "bias", 2: "bias"}]
    x = torch.randn(6, WIDTH)
    plain = copy.deepcopy(tied)
    pipe.step(x, loss_fn=torch.mean)
    plain(torch.tanh(plain(x))).mean().backward()
    torch.testing.assert_close(tied.weight.grad, plain.weight.grad, rtol=0, atol=1e-12)


def test_the_picture_shows_edges():
    pipe = Pipe.from_stages(stages(), TAKES)
    assert [line.split("takes ")[1] for line in str(pipe.info()).splitlines()[1:]] == [
        "input 0",
        "stage 0: 0",
        "stage 1: 0, stage 0: 1 (skip), input 1",
        "stage 2: 0",
    ]
    assert not pipe.info().has_loss_and_backward


def test_stages_that_cannot_be_are_refused():
    for arguments, error, words in [
        (([],), TypeError, "a sequence of modules"),
        (([F.relu],), TypeError, "a sequence of modules"),
        ((stages(), TAKES[:2]), ValueError, r"takes: expected one entry per stage \(3\), got 2"),
        ((stages(), [[Source(INPUT, 0)], [1], [1]]), ValueError, "stage 1 cannot take 1"),
        ((stages(), TAKES, 3), ValueError, "the pipe's output cannot take 3"),
        ((stages(), TAKES, Source(INPUT, 2)), ValueError, "the pipe's output cannot take .*an input that stages take"),
        ((stages(), TAKES, [2, Source(INPUT, 9)]), ValueError, "the pipe's output cannot take"),
    ]:
        with pytest.raises(error, match=words):
            Pipe.from_stages(*arguments)
    pipe = Pipe.from_stages(stages(), TAKES)
    with pytest.raises(TypeError, match="expected 2 positional inputs, got 1"):
        pipe(torch.randn(2, WIDTH))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_an_output_that_a_later_stage_edits_in_place_gives_no_wrong_gradients(chunks, checkpoint):
    """The output's values were right, but the gradients belonged to a model without the edit."""

    class Edits(nn.Module):
        def forward(self, h):
            h.mul_(3.0)
            return h.sum(1)

    first = nn.Linear(WIDTH, WIDTH)
    pipe = Pipe.from_stages([first, Edits()], outputs=[0, 1], chunks=chunks, checkpoint=checkpoint)
    x = torch.randn(6, WIDTH)
    with pytest.raises(RuntimeError, match="is an output of the model, was changed in place by a stage"):
        pipe(x)
    with torch.no_grad():
        edited, _ = pipe(x)
        torch.testing.assert_close(edited, 3 * first(x))
