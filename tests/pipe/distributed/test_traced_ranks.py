"""Traced pipes on several processes: values that skip stages, arguments of middle stages, shared parameters."""

import pathlib
import sys

import pytest
import torch
from pipe_models import sgd
from torch.nn import functional as F
from training import EXACT, largest_difference, make, own_gradients, run

import pymoe

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "traced"))

import traced_models

SCHEDULES = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


def steps(rank, world, kind, name, checkpoint="never", transmit=False, count=20):
    """Return the largest differences from the model in some training steps: outputs, gradients, state."""
    kind = getattr(traced_models, kind)
    model, plain = traced_models.made(kind)
    args, kwargs = traced_models.call_of(kind, 2)
    way = pymoe.MultiUseParameterConfig.TRANSMIT if transmit else pymoe.MultiUseParameterConfig.REPLICATE
    pipe = pymoe.pipeline(model, args, kwargs, checkpoint=checkpoint, multi_use_param_spec=way)
    micro_batches = len(pipe)
    schedule, stages = make(name, pipe, rank, world, micro_batches, F.mse_loss)
    own = [p for stage in stages for p in stage.submod.parameters()]
    optimizers = torch.optim.SGD(dict.fromkeys(own), lr=0.05, momentum=0.9), sgd(plain)
    worst = {"output": 0.0, "gradients": 0.0}
    for step in range(count):
        rows = 2 * micro_batches + step % 3
        args, kwargs = traced_models.call_of(kind, rows, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = plain(*args, **kwargs)
        target = torch.ones_like(expected)
        F.mse_loss(expected, target).backward()
        output, _ = run(schedule, stages, args, kwargs, target=target)
        if output is not None:
            worst["output"] = max(worst["output"], (output - expected).abs().max().item())
        difference = largest_difference(own_gradients(pipe, stages), traced_models.gradients(plain))
        worst["gradients"] = max(worst["gradients"], difference)
        for optimizer in optimizers:
            optimizer.step()
    return worst


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_skips_and_arguments_of_middle_stages(ranks, schedule):
    for worst in ranks(2).run(steps, kind="Skips", name=schedule):
        assert max(worst.values()) <= EXACT, worst


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("transmit", [False, True])
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_shared_parameters_that_are_replicated_or_transmitted(ranks, schedule, transmit):
    for worst in ranks(3).run(steps, kind="Tied", name=schedule, transmit=transmit):
        assert max(worst.values()) <= EXACT, worst


def loss_of_its_own(rank, world):
    """Test a model with several arguments that returns its loss: gradients, a step in evaluation, replaced
    parameters.
    """
    model, plain = traced_models.made(traced_models.Many)
    rows = traced_models.rows

    def call(count):
        return ({"left": rows(count, 2), "right": rows(count, 3)}, rows(count, 4)), {"factor": 0.5}

    args, kwargs = call(2)
    pipe = pymoe.pipeline(model, args, kwargs, output_loss_value_spec={"loss": True})
    schedule, stages = make("ScheduleGPipe", pipe, rank, world, world, lambda output, _: output["loss"])
    worst = 0.0
    for count in (2 * world, 3 * world + 1):
        args, kwargs = call(count)
        plain(*args, **kwargs)["loss"].backward()
        run(schedule, stages, args, kwargs, target=torch.zeros(count), return_outputs=False)
        worst = max(worst, largest_difference(own_gradients(pipe, stages), traced_models.gradients(plain)))
    return worst


def test_a_model_that_returns_its_loss(ranks):
    assert max(ranks(3).run(loss_of_its_own)) <= EXACT
