"""Models other than nn.Sequential, for tests of traced pipes; in float64 under the fixture ``doubles``."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from pymoe import pipe_split

WIDTH, WORDS = 6, 11


class Mlp(nn.Module):
    """Has two boundaries, and an in-place edit at the beginning of a stage."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        x = F.relu_(x)
        x = self.second(x)
        pipe_split()
        return self.third(torch.tanh(x))


class Skips(nn.Module):
    """Has a value that skips stages and goes to two of them, a keyword argument for middle stages, views, and sizes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x, *, gate, offset=None):
        rows = x.shape[0]
        early = self.layers[0](x) * self.scale
        pipe_split()
        x = self.layers[1](early).sigmoid() * gate
        pipe_split()
        x = self.layers[2](x + early)
        if offset is not None:
            x = x + offset
        pipe_split()
        first, second = torch.chunk(torch.cat([x, early * gate], 1), 2, 1)
        x = (first + second + self.shift).reshape(rows * 2, WIDTH // 2).view(rows, WIDTH)
        return self.layers[3](x)


class Tied(nn.Module):
    """The embedding's table is the last layer's weight; a table of positions is used at both ends."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight
        self.register_buffer("positions", torch.randn(20, WIDTH), persistent=False)

    def forward(self, ids):
        x = self.words(ids) + self.positions[: ids.shape[1]]
        pipe_split()
        x = x + torch.tanh(self.middle(x))
        pipe_split()
        return self.head(self.norm(x) + self.positions[: ids.shape[1]])


class Counting(nn.Module):
    """Has batch norm, dropout, and a count that a later stage reads."""

    def __init__(self, dropout=0.25):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.seen.add_(1)
        x = self.norm(self.first(x))
        pipe_split()
        x = self.drop(torch.relu(x))
        pipe_split()
        return self.second(x) + self.seen + self.table[0]


class Many(nn.Module):
    """Has several inputs and outputs: a dictionary that contains a tuple, a constant and the loss."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair, target=None, factor=1.0):
        left, right = self.left(pair["left"]), self.right(pair["right"])
        pipe_split()
        both = left * right
        pipe_split()
        out = self.out(both) * factor
        found = {"halves": (left, out), "name": "many"}
        if target is not None:
            found["loss"] = F.mse_loss(out, target)
        return found


def rows(count, seed=1):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def ids(count, length=5, seed=1):
    return torch.randint(0, WORDS, (count, length), generator=torch.Generator().manual_seed(seed))


def call_of(kind, count, seed=1):
    """Return (args, kwargs) of a mini-batch for a model of this class."""
    if kind is Skips:
        return (rows(count, seed),), {"gate": rows(count, seed + 50), "offset": rows(count, seed + 60)}
    if kind is Tied:
        return (ids(count, seed=seed),), {}
    return (rows(count, seed),), {}


def made(kind, seed=0):
    """Return a model of this class, and a copy of it."""
    torch.manual_seed(seed)
    model = kind()
    return model, copy.deepcopy(model)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def furthest(left, right):
    """Return the greatest difference between values of two dictionaries with the same keys."""
    assert left.keys() == right.keys()
    return max((left[key] - right[key]).abs().max().item() for key in left)
