"""What ranks do for simulate/test_against_ranks.py: a sharded layer's step, with what it chose and sent."""

import torch
import torch.distributed as dist
from rank_setup import exchanges

from pymoe import ep
from pymoe.ep.simulate import LoadRecorder
from pymoe.nn import MoE

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 24, 8, 16, 10, 3


def sent_in_a_step(rank, world, chunks):
    """The choices of this rank's tokens, and for each exchange of rows whom it sent how many, and their bytes."""
    layer = MoE(HIDDEN, FFN, EXPERTS, TOP_K, dtype=torch.float32)
    with torch.no_grad():
        layer.router.weight.mul_(torch.linspace(0.5, 4, EXPERTS)[:, None])  # some experts are chosen more often
    layer = ep.shard(layer, dist.group.WORLD, chunks=chunks)
    x = torch.randn(world, TOKENS, HIDDEN, dtype=torch.float32)[rank]
    recorder = LoadRecorder(layer)
    with exchanges() as seen:
        with recorder:
            y = layer(x.requires_grad_())
        y.sum().backward()
    sent = [one["sent"] for one in seen]
    widths = {one["width"] * getattr(torch, one["dtype"]).itemsize for one in seen}
    return recorder.steps[0][0].tolist(), sent, sorted(widths)
