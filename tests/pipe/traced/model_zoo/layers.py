"""Models of plain layers: a perceptron, convolutions with batch norm, a U-Net, in-place edits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import THREE, Batch, Case, ThreeLayers, numbers, of_numbers, seeded

WIDTH = 6


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.third = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(F.gelu(self.first(x)))))


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4, momentum=0.2),
        nn.Dropout2d(0.1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, WIDTH),
    )


def pictures(rows: int, generator: torch.Generator) -> Batch:
    return Batch((numbers(generator, rows, 2, 6, 6),), {}, numbers(generator, rows, WIDTH))


class Level(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(given, made, 3, padding=1)
        self.norm = nn.GroupNorm(1, made)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.convolution(x)))


class UNet(nn.Module):
    """Each level's skip crosses all stages in between; the first level's skip goes to two of them."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.enter = Level(2, channels)
        self.down = nn.ModuleList([Level(channels, channels) for _ in range(2)])
        self.bottom = Level(channels, channels)
        self.up = nn.ModuleList([Level(2 * channels, channels) for _ in range(2)])
        self.leave = nn.Conv1d(2 * channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.enter(x)
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool1d(x, 2)
        x = self.bottom(x) + F.avg_pool1d(first, 4)
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.leave(torch.cat([x, first], 1))


class InPlace(ThreeLayers):
    """Edits in place a new value, views of it, and a value from another stage."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x[:, 1:].mul_(0.5)
        x = self.second(x.add_(1).relu_())
        kept = x.sigmoid()
        x.mul_(kept)
        x = F.leaky_relu(self.third(x), 0.3, inplace=True) + 0.1 * x
        x[:, 0] = kept[:, 1] * 2
        return x


CASES = {
    "perceptron": Case(seeded(Perceptron), of_numbers(WIDTH), THREE),
    "convolutions with batch norm and dropout": Case(
        seeded(convolutions),
        pictures,
        {"3": "END", "7": "BEGINNING"},
        rows_meet=True,
        parts=lambda model: [model[:4], model[4:7], model[7:]],
    ),
    "u-net": Case(
        seeded(UNet),
        of_numbers(2, 8),
        {"down.1": "BEGINNING", "bottom": "BEGINNING", "up.1": "BEGINNING"},
    ),
    "in-place edits": Case(seeded(InPlace), of_numbers(WIDTH), THREE),
}
