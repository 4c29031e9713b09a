"""What ranks do for test_ranks_that_die.py: steps of two layers, until one of them is gone."""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from pymoe import ep
from pymoe.ep.placement import Placement
from pymoe.ep.sharding import ExpertMove
from pymoe.nn import MoE

RANKS, VICTIM = 3, 1


def train(rank, address, results, place=None, steps=100_000):
    """Steps, each reported; at last "told" with what a GroupError says, or "other"."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=timeout)
    torch.manual_seed(0)
    model = ep.shard(nn.Sequential(MoE(8, 8, 6, 2), MoE(8, 8, 6, 2)), dist.group.WORLD, chunks=2)
    try:
        for step in range(steps):
            if rank == VICTIM and step == 2 and place is not None:
                plant(model[1], place)
            if step == 2 and place == "between two steps":
                ep.redistribute(model, Placement(((2,), (2,), (1,), (1,), (0,), (0,)), RANKS))
            model(torch.randn(5, 8, requires_grad=True)).sum().backward()
            results.send(("step", step))
    except ep.GroupError as error:
        results.send(("told", (error.layer, str(error))))
    except BaseException as error:
        results.send(("other", repr(error)))
    signal.pause()  # a rank that has been told stays: the others learn it from the dead one


def plant(layer, place):
    """Have the rank die there."""

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if place == "gate":
        layer.router.register_forward_pre_hook(die)
    elif place == "experts":
        layer.experts.register_forward_pre_hook(die)
    elif place == "after the experts":
        layer.experts.register_forward_hook(die)
    elif place == "backward":
        layer.experts.w_out.register_hook(die)
    elif place == "between two steps":
        ExpertMove.__call__ = die
