"""Random stages: both parts of their backward passes make up the whole, and no node runs twice."""

import random

import pytest
import torch
from split_graphs import Case, Halves, InParts, Scaled
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("doubles")


def random_stage(seed):
    """Return a function of two tensors (5, 4), composed of random layers, branches and ties."""
    chosen = random.Random(seed)
    linears = [nn.Linear(4, 4, bias=chosen.random() < 0.7) for _ in range(2)]
    norm, table = nn.LayerNorm(4), nn.Embedding(5, 4)
    scale, matrix = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))
    for weight in (*linears[0].parameters(), *norm.parameters(), scale, matrix):
        weight.requires_grad_(chosen.random() < 0.85)
    layers = [
        lambda x, y: linears[0](x),
        lambda x, y: linears[1](y).tanh(),
        lambda x, y: norm(x),
        lambda x, y: x + table(rows),
        lambda x, y: Scaled.apply(x, scale),
        lambda x, y: Scaled.apply(x, scale.sin()).cos(),
        lambda x, y: InParts.apply("p", x, matrix),
        lambda x, y: F.linear(x, matrix.t()) * y.sigmoid(),
        lambda x, y: Halves.apply(3, y, scale * 2)[0],
        lambda x, y: F.scaled_dot_product_attention(x[None], matrix[None], linears[0](y)[None, :4])[0],
        lambda x, y: x * scale + y,
        lambda x, y: F.prelu(x, scale),
        lambda x, y: table(rows).exp(),
    ]
    kinds = [chosen.randrange(len(layers)) for _ in range(chosen.randint(1, 9))]
    picks = [chosen.randrange(1000) for _ in range(40)]
    rows = torch.tensor([chosen.randrange(5) for _ in range(5)])

    def build(*inputs):
        values, pick = list(inputs) or [torch.ones(5, 4)], iter(picks)
        for kind in kinds:
            x = values[next(pick) % len(values)]
            y = values[next(pick) % len(values)]
            values.append(layers[kind](x, y))
        outputs = tuple(value for value in values[-3:] if value.requires_grad)
        return outputs or (table(rows),)

    return build


@pytest.mark.thinned(usual=40)
@pytest.mark.parametrize("seed", range(150))
def test_random_graphs(seed):
    torch.manual_seed(seed)
    inputs = [torch.randn(5, 4) for _ in range(seed % 3)]
    Case(random_stage(seed), *inputs).check(exact=False)
