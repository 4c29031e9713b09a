"""Functions that the ranks run for test_failures.py: all ranks except one act correctly."""

import re
import time

import torch
import torch.distributed as dist
from calls import case, prepared
from rank_setup import groups
from torch import nn

from pymoe import ep
from pymoe.nn import MoE, quantize_experts

WRONG = 2
"""The rank that makes the mistake."""


def told(function, *args):
    """Return an error's kind, text and ranks, or None if there is no error."""
    try:
        function(*args)
    except Exception as error:
        return [type(error).__name__, str(error), list(getattr(error, "ranks", ()))]
    return None


def without_models(text):
    """Return an error's text without the numbers of models, since the tests make many models."""
    return re.sub(r" of model \d+", "", text)


def one_wrong_call(rank, world, wrong):
    """Return the error on each rank, the time until then, and whether the ranks can go on afterwards."""
    wide = case(options={"num_shared_experts": 0}).layer()
    torch.manual_seed(0)
    layers = nn.ModuleDict({"first": wide, "second": MoE(24, 8, 6, 2), "third": MoE(12, 8, 5, 2)})
    ep.shard(layers.to(torch.float32), dist.group.WORLD)
    x, mine = torch.randn(3, 12, dtype=torch.float32, requires_grad=True), rank == WRONG
    layer, mode = layers["first"], torch.enable_grad()
    if mine and wrong == "layer":
        layer, x = layers["second"], torch.randn(3, 24, dtype=torch.float32)
    elif mine and wrong == "experts":
        layer = layers["third"]
    elif mine and wrong == "dtype":
        mode = torch.autocast("cpu", torch.bfloat16)
    elif mine and wrong == "no gradients":
        mode = torch.no_grad()
    elif mine and wrong == "frozen input":
        x = x.detach()
    elif mine and wrong == "frozen experts":
        layer.experts.requires_grad_(False)
    elif mine and wrong == "width":
        x = torch.randn(3, 13, dtype=torch.float32)
    elif mine and wrong == "a bug":
        layer.router.register_forward_pre_hook(bug)
    start = time.perf_counter()
    with mode:
        said = told(layer, x)
    seconds = time.perf_counter() - start
    afterwards = told(layers["third"], torch.randn(rank, 12, dtype=torch.float32))
    return said, seconds, afterwards


def bug(*_):
    """Raise."""
    raise ArithmeticError("a bug of rank 2")


def too_many_rows(rank, world, scope):
    """Return the ranks' errors when one would receive one row too many, and when the rows just fit."""
    one = case(scope=scope, options={"capacity_factor": 0.8})
    layer, x, _ = prepared(rank, one)
    layer(x)
    fullest = max(
        sum(sum(load[e] for load in layer.last_loads) for e in own) for own in layer.sharding.experts_of_ranks
    )
    plain = case(options={"num_shared_experts": 0})
    fits, y, _ = prepared(rank, plain, room=fullest_of(plain, rank))
    tight, _, _ = prepared(rank, plain, room=fullest_of(plain, rank) - 1)
    allocated, real = [], torch.Tensor.new_empty
    torch.Tensor.new_empty = lambda self, *shape, **options: allocated.append(shape) or real(self, *shape, **options)
    try:
        said = told(tight, y)
    finally:
        torch.Tensor.new_empty = real
    return said, told(fits, y), [shape for shape in allocated if len(shape) == 2], fullest


def fullest_of(one, rank):
    """Return the most rows that a rank receives."""
    layer, x, _ = prepared(rank, one)
    layer(x)
    return max(sum(load[e] for load in layer.last_loads for e in own) for own in layer.sharding.experts_of_ranks)


def wrong_arguments(rank, world, wrong):
    """Return the errors that ``shard`` raises on the ranks."""
    mine = rank == WRONG
    torch.manual_seed(1 if mine and wrong == "seed" else 0)
    model = nn.Sequential(MoE(12, 8, 7 if mine and wrong == "experts" else 6, 2, num_shared_experts=1))
    if mine and wrong == "layers":
        model.append(MoE(12, 8, 6, 2))
    if mine and wrong == "frozen":
        model[0].experts.requires_grad_(False)
    chunks = {"chunks": 2, "bad chunks": 0}.get(wrong, 1) if mine else 1
    return told(lambda: ep.shard(model, dist.group.WORLD, chunks=chunks))


def refused(rank, world, what):
    """Return the error of ``shard`` for a mistake that all ranks make."""

    class Own(MoE):
        """A user's own layer."""

    group, options = dist.group.WORLD, {}
    model = nn.Sequential(MoE(12, 8, 6, 2))
    if what == "no layer":
        model = nn.Linear(2, 2)
    elif what == "twice":
        ep.shard(model, group)
    elif what == "own class":
        model = nn.Sequential(Own(12, 8, 6, 2))
    elif what == "quantised":
        quantize_experts(model.float().eval(), 8)
    elif what == "no group":
        group = "ep"
    elif what == "two dimensions":
        from rank_setup import mesh_of

        group = mesh_of(2, 2)
    elif what == "scope":
        options["scope"] = "world"
    elif what == "room":
        options["room"] = -1
    elif what == "torch.func":
        layer = ep.shard(model, group)[0]
        return told(torch.func.vmap(layer), torch.randn(2, 3, 12, dtype=torch.float64))
    elif what == "forward mode":
        layer = ep.shard(model, group)[0]
        with torch.autograd.forward_ad.dual_level():
            return told(layer, torch.randn(3, 12, dtype=torch.float64))
    return told(lambda: ep.shard(model, group, **options))


def length_of_text(rank, world):
    """Return the length of a long error's text as another rank receives it."""
    layer = ep.shard(MoE(12, 8, 6, 2), groups()[4])

    def long_bug(*_):
        raise ArithmeticError("x" * 10_000)

    if rank == WRONG:
        layer.router.register_forward_pre_hook(long_bug)
    said = told(layer, torch.randn(3, 12))
    return len(said[1])
