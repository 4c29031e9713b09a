"""Boundaries within blocks of ``torch.no_grad()`` and autocast cut the blocks."""

import copy

import pytest
import torch
from torch import nn
from traced_models import WIDTH, gradients

from pymoe import SplitPoint, pipe_split, pipeline


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))


class WithoutGradients(Three):
    def forward(self, x):
        x = self.a(x)
        with torch.no_grad():
            scale = self.b(x).abs()
            pipe_split()
            scale = scale.mean(1, keepdim=True) + 1
        return self.c(x) / scale


class InAutocast(Three):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            skip = self.a(x)
            pipe_split()
            x = self.b(skip).relu()
            pipe_split()
            x = self.c(x) + skip
        return x.float(), skip


class Nested(Three):
    def forward(self, x):
        with torch.no_grad():
            x = self.a(x)
            pipe_split()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.b(x)
                pipe_split()
                y = y * 2
            pipe_split()
            pipe_split()
            x = x + y
        return self.c(x)


class ByName(Three):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.c(self.b(self.a(x)))


@pytest.mark.parametrize(
    ("kind", "spec", "stages"),
    [(WithoutGradients, None, 2), (InAutocast, None, 3), (Nested, None, 4), (ByName, {"c": SplitPoint.BEGINNING}, 2)],
)
def test_a_block_goes_on_in_the_next_stage(kind, spec, stages):
    torch.manual_seed(0)
    model = kind()
    other = copy.deepcopy(model)
    pipe = pipeline(model, (torch.randn(3, WIDTH),), split_spec=spec, chunks=2, checkpoint="never")
    assert pipe.num_stages == stages
    for rows in (6, 5):
        x = torch.randn(rows, WIDTH)
        found = pipe(x)
        parts = [other(part) for part in x.tensor_split(2)]
        wanted = (
            torch.cat(parts) if isinstance(found, torch.Tensor) else tuple(map(torch.cat, zip(*parts, strict=True)))
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        for output in (found, wanted):
            (output if isinstance(output, torch.Tensor) else output[0]).float().square().sum().backward()
        for mine, theirs in zip(gradients(model).values(), gradients(other).values(), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)
