"""Functions that the ranks run for test_built_spread.py: layers built with their experts spread over ranks."""

import copy

import torch
import torch.distributed as dist
from rank_setup import full, groups, mesh_of, same_bits
from torch import nn

from pymoe import ep
from pymoe.nn import MoE

OPTIONS = {"num_shared_experts": 1, "bias": True, "bias_update_rate": 0.1}


def layer(ranks=None, **options):
    """Return a layer made from one seed, and the next random number."""
    torch.manual_seed(5)
    made = MoE(12, 10, 6, 2, **{**OPTIONS, "expert_parallel": ranks, **options})
    return made, torch.rand(1).item()


def as_one_process(rank, world, dtype, by):
    """Return the differences from a layer that is spread after its construction."""
    ranks = dist.group.WORLD if by == "group" else mesh_of(4)
    built, following = layer(ranks, dtype=getattr(torch, dtype))
    whole, its_following = layer(dtype=getattr(torch, dtype))
    spread = ep.shard(copy.deepcopy(whole), ranks)
    x = torch.randn(7, 12).to(built.router.weight.dtype)
    expected = dict(whole.named_parameters())
    return {
        "values": [name for name, p in built.named_parameters() if not same_bits(full(p), expected[name])],
        "random numbers": following == its_following,
        "output": same_bits(built(x), spread(x)),
        "text": repr(built) == repr(spread),
        "kind": type(built).__name__,
        "keys": list(built.state_dict()) == list(whole.state_dict()),
        "copy": same_bits(copy.deepcopy(built)(x), built(x)),
        "own": [p.to_local().shape[0] for p in built.experts.parameters()] == [len(built.sharding.own_experts)] * 4,
    }


def largest(rank, world):
    """Return the largest number of values drawn in one call when experts are initialized, and the size of one expert's
    weight.
    """
    sizes, real = [], torch.empty

    def spy(*args, **options):
        made = real(*args, **options)
        sizes.append(made.numel() if made.is_floating_point() and not made.is_meta else 0)
        return made

    torch.empty = spy
    try:
        built, _ = layer(mesh_of(4), num_shared_experts=0)
    finally:
        torch.empty = real
    return max(sizes), built.experts.w_in[0].numel()


def several(rank, world):
    """Return whether a model of two such layers, on half of the ranks, gets the gradients of one process."""
    groups()
    if rank > 1:
        return True
    torch.manual_seed(1)
    built = nn.Sequential(*(MoE(12, 10, 6, 2, expert_parallel=groups()[2]) for _ in range(2)))
    torch.manual_seed(1)
    whole = nn.Sequential(*(MoE(12, 10, 6, 2) for _ in range(2)))
    for one in whole:
        one.router.row_invariant = True
    x = torch.randn(2, 9, 12)
    built(x[rank]).square().sum().backward()
    whole(x.flatten(0, 1)).square().sum().backward()
    pairs = zip(built.parameters(), whole.parameters(), strict=True)
    return all(same_bits(full(a.grad), b.grad) for a, b in pairs if hasattr(a, "full_tensor"))


def on_meta(rank, world):
    """Check that a layer on the meta device waits for its memory."""
    built, _ = layer(mesh_of(4), device="meta")
    assert built.experts.w_in.is_meta
    built.to_empty(device="cpu")
    torch.manual_seed(5)
    built.reset_parameters()
    expected = dict(layer()[0].named_parameters())
    return all(same_bits(full(p), expected[name]) for name, p in built.named_parameters())


def refused(rank, world):
    """Return the error for an argument that is not a mesh."""
    try:
        layer("ep")
    except TypeError as error:
        return str(error)
