"""Functions that the ranks run for simulate/test_against_ranks.py: a sharded layer's step, with its choices and
rows sent.
"""

import torch
import torch.distributed as dist
from rank_setup import exchanges

from pymoe import ep
from pymoe.ep.simulate import LoadRecorder
from pymoe.nn import MoE

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 24, 8, 16, 10, 3


def sent_in_a_step(rank, world, chunks, deduplicate=False, clones=0):
    """Return this rank's choices, the rows that each exchange sends to every rank, a row's size in bytes, and a byte
    count.

    The byte count is of bytes sent to other ranks in addition to rows: expert numbers and weights, or clones.
    """
    layer = MoE(HIDDEN, FFN, EXPERTS, TOP_K, dtype=torch.float32)
    with torch.no_grad():
        layer.router.weight.mul_(torch.linspace(0.5, 4, EXPERTS)[:, None])  # some experts are chosen more often
    layer = ep.shard(
        layer, dist.group.WORLD, chunks=chunks, deduplicate=deduplicate, clones=clones, min_rows_to_clone=1
    )
    x = torch.randn(world, TOKENS, HIDDEN, dtype=torch.float32)[rank]
    recorder = LoadRecorder(layer)
    with exchanges() as seen:
        with recorder:
            y = layer(x.requires_grad_())
        y.sum().backward()
    rows = [one for one in seen if one["width"] == HIDDEN]
    beside = sum(bytes_of(one) * (sum(one["sent"]) - one["sent"][rank]) for one in seen if one["width"] != HIDDEN)
    return recorder.steps[0][0].tolist(), [one["sent"] for one in rows], sorted(set(map(bytes_of, rows))), beside


def bytes_of(exchange):
    """Return the size of one row in bytes."""
    return exchange["width"] * getattr(torch, exchange["dtype"]).itemsize
