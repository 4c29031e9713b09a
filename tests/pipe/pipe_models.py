"""Models and training loops for tests of Pipe."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from pymoe.autograd import random_streams
from pymoe.pipe.schedules import build, names
from pymoe.pipe.skip import pop, skippable, stash

SCHEDULES = names()
CHECKPOINT = ("never", "except_last", "always")
WIDTH = 5


@skippable(stash=["early", "late"])
class Down(nn.Module):
    """Stashes its input, and a value computed from it that two modules pop."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        yield stash("early", x)
        x = torch.tanh(self.linear(x))
        yield stash("late", x)
        return x


@skippable(pop=["late"])
class Middle(nn.Module):
    def forward(self, x):
        late = yield pop("late")
        return x + 0.5 * late


@skippable(pop=["early", "late"])
class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        late = yield pop("late")
        early = yield pop("early")
        return self.linear(torch.cat([x, early, late], 1))


class Pair(nn.Module):
    """Returns a nested structure that also contains something other than a tensor."""

    def forward(self, x):
        return {"halves": (x * 0.5, x.sin()), "name": "pair", "rows": torch.arange(len(x))}


class Unpair(nn.Module):
    def forward(self, pair):
        first, second = pair["halves"]
        assert pair["name"] == "pair"
        return first + second + 0.01 * pair["rows"].to(first.dtype)[:, None].clamp(max=0)


class Say(nn.Module):
    """A layer that calls a given function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def row_model(seed=0):
    """Return eight layers, whose rows are independent, with skips, tied weights, in-place edits and nested values."""
    torch.manual_seed(seed)
    tied = nn.Linear(WIDTH, WIDTH)
    layers = [
        Down(),
        nn.Sequential(nn.Softplus(), tied),
        nn.LeakyReLU(0.2, inplace=True),  # first in its stage if every stage has two layers
        Pair(),
        Unpair(),
        Middle(),
        nn.Sequential(tied, nn.Tanh()),
        Up(),
    ]
    return nn.Sequential(*layers).double()


def batch_model(seed=0):
    """Return eight layers, some of which draw numbers or combine rows."""
    torch.manual_seed(seed)
    layers = [
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)),
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.2)),
        nn.BatchNorm1d(WIDTH),
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        nn.Dropout(0.1),
        nn.Linear(WIDTH, WIDTH),
    ]
    return nn.Sequential(*layers).double()


def batches(count, rows, seed=1):
    """Return (inputs, targets) of ``count`` mini-batches, whose sizes cycle through ``rows``."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        shape = rows[number % len(rows)], WIDTH
        yield tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def plain_step(model, x, y):
    """Set the gradients of the whole mini-batch; return the loss."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.detach()


def step_by_micro_batches(parts, x, y, chunks):
    """Compute a pipe's results by ordinary means: micro-batch by micro-batch, part by part."""
    random_streams.install()
    source = random_streams.RandomSource()
    chunks = min(chunks, len(x))
    losses = []
    for index, (a, b) in enumerate(zip(x.tensor_split(chunks), y.tensor_split(chunks), strict=True)):
        for number, part in enumerate(parts):
            a = random_streams.with_stream(source.stream(index * len(parts) + number), part, a)
        loss = F.mse_loss(a, b)
        (loss * (len(b) / len(y))).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def assert_same_gradients(model, plain, rtol=0.0, atol=1e-12):
    """Compare the gradients of a model with those of another model, or with given ones."""
    expected = [parameter.grad for parameter in plain.parameters()] if isinstance(plain, nn.Module) else plain
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(parameter.grad, wanted, rtol=rtol, atol=atol)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@functools.cache
def can_build(schedule, stages, micro_batches):
    """Return whether the schedule can be built, since some need certain numbers of micro-batches."""
    try:
        build(schedule, stages, micro_batches)
    except ValueError:
        return False
    return True
