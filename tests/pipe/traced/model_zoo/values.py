"""Models that accept, return and keep values other than tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import THREE, Batch, Case, ThreeLayers, numbers, of_numbers, seeded

WIDTH = 6


class TwoByTwo(nn.Module):
    """The second input goes only to the last stage, and the first output comes from the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.right = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
        early = torch.tanh(self.left(x))
        x = self.middle(early, pair[0])
        late = self.right(torch.cat([x, pair[1]], 1))
        return early, [late, x]


def two_by_two(rows: int, generator: torch.Generator) -> Batch:
    x, first, second, *targets = (numbers(generator, rows, WIDTH) for _ in range(6))
    return Batch((x, (first, second)), {}, targets)


def of_three(output: tuple[Tensor, list[Tensor]], target: list[Tensor]) -> Tensor:
    early, (late, x) = output
    return F.mse_loss(late, target[0]) + 0.1 * F.mse_loss(early, target[1]) + 0.01 * F.mse_loss(x, target[2])


class Keywords(ThreeLayers):
    """A middle stage takes keyword arguments: a tensor of rows, and values other than tensors."""

    def forward(
        self, x: Tensor, *, gate: Tensor | None = None, scale: float = 1.0, kind: str = "tanh", steps: int = 1
    ) -> Tensor:
        x = self.first(x)
        for _ in range(steps):
            x = self.second(x) * scale
        if gate is not None:
            x = x * gate.sigmoid()
        return self.third(x.tanh() if kind == "tanh" else x.relu())


def keywords(rows: int, generator: torch.Generator) -> Batch:
    x, gate, target = (numbers(generator, rows, WIDTH) for _ in range(3))
    return Batch((x,), {"gate": gate, "scale": 0.7, "kind": "relu", "steps": 2}, target)


class Buffers(nn.Module):
    """Has persistent and non-persistent constants, one that two stages read, and statistics that the forward edits."""

    scale: Tensor
    shift: Tensor
    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH), persistent=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale + self.shift
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            self.seen += 1
        return self.second(torch.tanh(x)) * self.scale


class Named(ThreeLayers):
    """Takes and returns dictionaries that also hold values other than tensors."""

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        hidden = F.softplus(self.first(batch["x"]) + batch["more"][0])
        inner = {"mean": hidden.mean(1, keepdim=True), "name": "middle"}
        logits = self.second(hidden - inner["mean"])
        return {
            "logits": self.third(logits) * batch["mask"],
            "inner": {**inner, "hidden": hidden},
            "count": 3,
            "none": None,
            "best": logits.argmax(1),
        }


def named(rows: int, generator: torch.Generator) -> Batch:
    x, more, target = (numbers(generator, rows, WIDTH) for _ in range(3))
    return Batch(({"x": x, "more": [more], "mask": x > 0},), {}, {"logits": target})


def of_logits(output: dict[str, Any], target: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output["logits"], target["logits"]) + output["inner"]["hidden"].pow(2).mean()


CASES = {
    "two inputs, three outputs": Case(
        seeded(TwoByTwo), two_by_two, {"middle": "BEGINNING", "right": "BEGINNING"}, of_three
    ),
    "keywords": Case(seeded(Keywords), keywords, {"first": "END", "third": "BEGINNING"}),
    "buffers": Case(seeded(Buffers), of_numbers(WIDTH), {"second": "BEGINNING"}, rows_meet=True),
    "dictionaries": Case(seeded(Named), named, THREE, of_logits),
}
