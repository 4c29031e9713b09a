"""Functions that the ranks run for test_pipes.py: two stages, each with its experts on two ranks."""

import torch
import torch.distributed as dist
from rank_setup import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules

import pymoe
from pymoe import ep
from pymoe.nn import MoE

H, ROWS = 8, 12


def model():
    """Return a model of two blocks."""
    torch.manual_seed(0)
    blocks = [[nn.Linear(H, H), MoE(H, 6, 4, 2, num_shared_experts=1), nn.Tanh()] for _ in range(2)]
    return nn.Sequential(*(layer for block in blocks for layer in block)).double()


def gradients(rank, world, schedule, checkpoint, clones=0):
    """Return the largest difference of a gradient from that of one process with both pipes' rows, relative to the
    largest one.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    stage_number, place = mesh.get_coordinate()
    whole, spread = model(), model()
    # Ranks of a group have the same stage, whose experts they shard; the layers of the other stage do not change.
    own = range(3 * stage_number, 3 * stage_number + 3)
    for index in own:
        if isinstance(spread[index], MoE):
            ep.shard(spread[index], mesh["ep"], chunks=2, clones=clones, min_rows_to_clone=1)
    pipe = pymoe.Pipe(spread, balance=[3, 3], checkpoint=checkpoint)
    stage = pipe.build_stage(stage_number, "cpu", mesh["pp"].get_group())
    kind = getattr(schedules, schedule)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    run = kind(stage if single else [stage], n_microbatches=4, loss_fn=nn.functional.mse_loss)
    x, y = (torch.randn(2, ROWS, H, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    if stage_number == 0:
        run.step(x[place])
    else:
        run.step(target=y[place])
    nn.functional.mse_loss(whole(x.flatten(0, 1)), y.flatten(0, 1)).backward()
    apart = largest = 0.0
    for index in own:
        expected = dict(whole[index].named_parameters())
        for name, parameter in spread[index].named_parameters():
            if name.startswith("experts."):
                gradient = full(parameter.grad)
            else:
                gradient = parameter.grad.clone()
                dist.all_reduce(gradient, group=mesh["ep"].get_group())
            apart = max(apart, (gradient / 2 - expected[name].grad).abs().max().item())
            largest = max(largest, expected[name].grad.abs().max().item())
    return apart / largest
