"""A pipe keeps its stages with a loss function from step to step, but nothing of a step."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pymoe.pipe import Pipe


def pipe_of() -> Pipe:
    torch.manual_seed(0)
    return Pipe(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), 2)


def halved(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) / 2


@pytest.mark.parametrize("functions", [(F.mse_loss, halved, F.mse_loss), (nn.MSELoss(), halved, None)])
def test_every_step_has_the_loss_that_it_asks_for(functions) -> None:
    pipe = pipe_of()
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    for function in functions:
        if function is None:
            found = pipe.step(x, loss_fn=lambda output: output.sum(), reduction="sum")
            wanted = torch.stack([part.sum() for part in pipe(x).chunk(2)])
        else:
            found = pipe.step(x, target=y, loss_fn=function)
            wanted = torch.stack([function(*parts) for parts in zip(pipe(x).chunk(2), y.chunk(2), strict=True)])
        torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-15)


class ToTarget:
    def __init__(self, target: Tensor) -> None:
        self.target = target

    def __call__(self, output: Tensor) -> Tensor:
        return F.mse_loss(output, self.target[: len(output)])


def keeps(target: Tensor, how: str):
    if how == "closure":
        return lambda output: F.mse_loss(output, target[: len(output)])
    if how == "default":

        def with_default(output: Tensor, target: Tensor = target) -> Tensor:
            return F.mse_loss(output, target[: len(output)])

        return with_default
    return ToTarget(target)


@pytest.mark.parametrize("how", ["closure", "default", "object"])
def test_what_a_loss_function_holds_goes_with_its_step(how: str) -> None:
    pipe = pipe_of()
    gc.disable()
    try:
        target = torch.randn(4, 2, dtype=torch.float64)
        alive = weakref.ref(target)
        pipe.step(torch.randn(4, 3, dtype=torch.float64), loss_fn=keeps(target, how))
        del target
        assert alive() is None
    finally:
        gc.enable()
