"""Functions that the ranks run for test_transformers.py: experts modules of transformers on ranks and in one process."""

import copy
import sys
from pathlib import Path

import torch
from rank_setup import full, groups, same_bits

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations" / "transformers"))

import pymoe.integrations.transformers
from experts_classes import EXPERTS, ExpertsClass, experts_classes, hidden_size
from pymoe import ep

TOKENS = [13, 5, 0, 9]
CHOICES = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def built(name, dtype="float32"):
    """Return an experts module of a class, the same on every rank, that runs on pymoe."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        one = next(one for one in experts_classes() if one.name == name)
        experts = one.build().to(DTYPES[dtype])
    finally:
        torch.set_default_dtype(torch.float64)
    experts.config._experts_implementation = "pymoe"
    return experts


def inputs(experts, ranks):
    """Return, for every rank, hidden states, choices, weights of the choices, and output gradients."""
    generator = torch.Generator().manual_seed(1)
    dtype = experts.down_proj.dtype

    def drawn(tokens, *size):
        return torch.randn(tokens, *size, generator=generator, dtype=torch.float32)

    hidden, number = hidden_size(experts), experts.down_proj.shape[0]
    return [
        (
            drawn(tokens, hidden).to(dtype),
            drawn(tokens, number).topk(min(CHOICES, number)).indices,
            drawn(tokens, min(CHOICES, number)).sigmoid(),
            drawn(tokens, hidden).to(dtype),
        )
        for tokens in TOKENS[:ranks]
    ]


def results(experts, x, index, weights, directions):
    """Return the output and all gradients, by name."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = experts(x, index, weights)
    y.backward(directions)
    found = {"y": y.detach(), "dx": x.grad, "dweights": weights.grad}
    return found | {name: full(parameter.grad) for name, parameter in experts.named_parameters()}


def one(rank, world, name, ranks, dtype="float32", **way):
    """Return what differs on this rank from one process, with the largest difference; None if it is not in the group."""
    group = groups()[ranks]
    if rank >= ranks:
        return None
    whole = built(name, dtype)
    spread = ep.shard(torch.nn.ModuleDict({"experts": copy.deepcopy(whole)}), group, **way)["experts"]
    parts = inputs(whole, ranks)
    expected = results(whole, *map(torch.cat, zip(*parts, strict=True)))
    found = results(spread, *parts[rank])
    for own in ("y", "dx", "dweights"):
        expected[own] = expected[own].split(TOKENS[:ranks])[rank]
    return {
        name: (found[name].double() - expected[name].double()).abs().max().item()
        / expected[name].double().abs().max().item()
        for name in expected
        if not same_bits(found[name], expected[name])
    }
