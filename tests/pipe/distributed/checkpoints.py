"""What ranks do: train a pipe and save it; load one that others have saved."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from pipe_models import WIDTH, batches
from torch import nn
from torch.nn import functional as F
from train import BALANCES, make, run

import pymoe
from pymoe.pipe import checkpoint


def model(seed=0):
    """Eight layers; the first and the seventh are one, and the second has buffers."""
    torch.manual_seed(seed)
    tied = nn.Linear(WIDTH, WIDTH)
    own = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return nn.Sequential(tied, nn.BatchNorm1d(WIDTH), nn.Tanh(), own[0], nn.ReLU(), own[1], tied, own[2]).double()


def adam(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def moments(module, optimizer):
    """An optimizer's state by the names of parameters."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {names[id(parameter)]: state for parameter, state in optimizer.state.items()}


def everything(pipe, indices, optimizer):
    """What a rank has of both."""
    values = {name: value.clone() for name, value in checkpoint.stage_state_dict(pipe, indices).items()}
    return {"model": values, "optimizer": moments(pipe, optimizer)}


def train_and_save(rank, world, folder):
    """Also writes every rank's part by plain means, to compare with."""
    pipe = pymoe.Pipe(model(), balance=BALANCES[world], checkpoint="never")
    schedule, stages = make("Schedule1F1B", pipe, rank, world, world, F.mse_loss)
    optimizer = adam(pipe[rank])
    for x, y in batches(3, (8,)):
        optimizer.zero_grad()
        run(schedule, stages, (x,), target=y)
        optimizer.step()
    folder = Path(folder)
    checkpoint.save(pipe, folder / "dcp", stages=[rank], optimizer=optimizer)
    checkpoint.save_safetensors(pipe, folder / "safetensors", stages=[rank])
    torch.save(everything(pipe, [rank], optimizer), folder / f"{rank}.pt")
    dist.barrier()


def load_and_show(rank, world, folder, out):
    """On other ranks, with another split."""
    pipe = pymoe.Pipe(model(seed=1), balance=BALANCES[world], checkpoint="never")
    optimizer = adam(pipe[rank])
    checkpoint.load(pipe, Path(folder) / "dcp", stages=[rank], optimizer=optimizer)
    torch.save(everything(pipe, [rank], optimizer), Path(out) / f"{rank}.pt")
    dist.barrier()
