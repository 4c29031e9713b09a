"""Training steps of a pipe on several ranks, under torch's schedules, compared with the unsplit model."""

import copy

import pytest
import torch
from pipe_models import WIDTH, batches, row_model, sgd
from torch import nn
from torch.distributed.pipelining import schedules
from torch.nn import functional as F

import pymoe

CPU = torch.device("cpu")
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
EXACT = 1e-12
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
some_schedules = pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleavedZeroBubble"])
BALANCES = {2: [4, 4], 3: [3, 2, 3], 4: [2, 2, 2, 2], 6: [1, 1, 2, 1, 1, 2]}


def stages_of(name, world):
    """Return the number of stages that torch's schedule ``name`` runs on ``world`` ranks."""
    return world if name in ("ScheduleGPipe", "Schedule1F1B") else 2 * world


def rank_of(name, world, stage):
    if name == "ScheduleZBVZeroBubble" or name == "ScheduleDualPipeV":
        return min(stage, 2 * world - 1 - stage)
    return stage % world


def make(name, pipe, rank, world, micro_batches, loss_fn, group=None, **options):
    """Return torch's schedule and this rank's stages."""
    own = [stage for stage in range(len(pipe)) if rank_of(name, world, stage) == rank]
    stages = [pipe.build_stage(stage, CPU, group) for stage in own]
    kind = getattr(schedules, name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    return kind(stages[0] if single else stages, micro_batches, loss_fn=loss_fn, **options), stages


def run(schedule, stages, args, kwargs=None, target=None, **options):
    """Run a step, with arguments passed as torch's users do."""
    first = any(stage.is_first for stage in stages)
    last = any(stage.is_last for stage in stages)
    losses = [] if last else None
    if last and target is not None:
        options |= {"target": target, "losses": losses}
    return schedule.step(*(args if first else ()), **(kwargs or {} if first else {}), **options), losses


def in_two_stages(kind, rank, world):
    """Return a model of two layers, a pipe of a copy of it, built in the given way, and a function that runs this
    rank's part.
    """
    torch.manual_seed(0)
    model = linear_model(1)
    if kind == "stages":
        pipe = pymoe.Pipe.from_stages(nn.ModuleList(copy.deepcopy(model)), checkpoint="never")
    else:
        pipe = pymoe.Pipe(copy.deepcopy(model), balance=[1, 1], checkpoint="never")
    return model, pipe, *make("Schedule1F1B", pipe, rank, world, 4, F.mse_loss)


def step_of_both(model, pipe, schedule, stages):
    """Run a step of the model and of its pipe on the same rows, without earlier gradients."""
    model.zero_grad()
    pipe.zero_grad()
    (x, y), *_ = batches(1, [8])
    F.mse_loss(model(x), y).backward()
    run(schedule, stages, (x,), target=y)


def gradients(module):
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def largest_difference(found, expected):
    """Return the largest difference between tensors by name; infinite if one is missing."""
    worst = 0.0
    for name, tensor in found.items():
        other = expected[name]
        if (tensor is None) != (other is None):
            return float("inf")
        if tensor is not None:
            worst = max(worst, (tensor - other).abs().max().item())
    return worst


def own_gradients(pipe, stages):
    """Return the gradients of this rank's stages by the model's names."""
    own = {id(p) for stage in stages for p in stage.submod.parameters()}
    return {name: p.grad for name, p in pipe.named_parameters() if id(p) in own}


def linear_model(world, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 * world)])


def parallel(model, name, rank, world, micro_batches, loss_fn=F.mse_loss, checkpoint="never", **options):
    """Return a schedule and stages that run a copy of the model on the ranks."""
    count = stages_of(name, world)
    balance = [len(model) // count] * count
    pipe = pymoe.Pipe(copy.deepcopy(model), balance=balance, checkpoint=checkpoint)
    return pipe, *make(name, pipe, rank, world, micro_batches, loss_fn, **options)


def compare(model, pipe, stages):
    return largest_difference(own_gradients(pipe, stages), {n: p.grad for n, p in model.named_parameters()})


def steps(rank, world, name, checkpoint="never", micro_batches=None, rows=(12, 7, 8), count=20, group=None):
    """Return the largest differences of outputs, losses, gradients and parameters in some training steps."""
    stages_count = stages_of(name, world)
    micro_batches = micro_batches or 2 * world
    model = row_model()
    pipe = pymoe.Pipe(copy.deepcopy(model), balance=BALANCES[stages_count], checkpoint=checkpoint)
    schedule, stages = make(name, pipe, rank, world, micro_batches, F.mse_loss, group)
    own = torch.nn.ModuleList([*[stage.submod for stage in stages], torch.nn.Linear(1, 1)])  # some have no parameters
    optimizers = sgd(model), sgd(own)
    worst = dict.fromkeys(("output", "gradients", "parameters"), 0.0)
    for x, y in batches(count, rows):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = model(x)
        F.mse_loss(expected, y).backward()
        output, _ = run(schedule, stages, (x,), target=y)
        if output is not None:
            worst["output"] = max(worst["output"], (output - expected).abs().max().item())
        names = dict(model.named_parameters())
        found = own_gradients(pipe, stages)
        worst["gradients"] = max(worst["gradients"], largest_difference(found, {n: p.grad for n, p in names.items()}))
        for optimizer in optimizers:
            optimizer.step()
        own = {n: p.detach() for n, p in pipe.named_parameters() if n in found}
        worst["parameters"] = max(
            worst["parameters"], largest_difference(own, {n: p.detach() for n, p in names.items()})
        )
    return worst
