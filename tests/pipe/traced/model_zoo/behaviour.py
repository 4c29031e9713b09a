"""Models whose code does more than call layers: own gradients, modes, and markers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import THREE, Case, ThreeLayers, of_numbers, seeded

WIDTH = 6


class Bent(torch.autograd.Function):
    """Computes x^3 with a gradient that is not its derivative, which exposes code that differentiates the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * ctx.slope * x.cos(), None


class OwnGradient(ThreeLayers):
    def forward(self, x: Tensor) -> Tensor:
        x = Bent.apply(self.first(x), 0.5)
        return self.third(Bent.apply(self.second(x).tanh(), 2.0))


class Modes(ThreeLayers):
    """Computes different results in training and evaluation, with a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x * 2 if self.training else x.sin()
        x = self.second(x)
        with torch.no_grad():
            hint = self.helper(x)
        if self.training:
            x = x + self.helper(x.detach())
        return self.third(x.tanh() * hint)


class Looped(nn.Module):
    """Calls one layer in several stages; has markers (first, doubled, last) and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        from pymoe import pipe_split

        pipe_split()
        x = self.shared(self.enter(x)).tanh()
        pipe_split()
        pipe_split()
        x = self.shared(x).tanh() + self.frozen(x)
        pipe_split()
        x = self.shared(x) * F.softmax(x, 1)
        pipe_split()
        return x


CASES = {
    "gradients of its own": Case(seeded(OwnGradient), of_numbers(WIDTH), THREE),
    "training and evaluation": Case(seeded(Modes), of_numbers(WIDTH), THREE),
    "one layer in three stages": Case(seeded(Looped), of_numbers(WIDTH), {}, marks=2),
}
