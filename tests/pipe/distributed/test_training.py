"""Pipes on several processes train as the unsplit model does, under torch's schedules."""

import copy

import pytest
import torch
from pipe_models import WIDTH, batches
from torch import nn
from torch.nn import functional as F
from training import EXACT, SCHEDULES, compare, linear_model, make, run, steps

import pymoe


@pytest.mark.slow
@pytest.mark.thinned(deep=8)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "ScheduleZBVZeroBubble"])
def test_twenty_steps_equal_the_unsplit_model(ranks, schedule, world):
    for worst in ranks(world).run(steps, name=schedule):
        assert max(worst.values()) <= EXACT, worst


def replaced(rank, world, kind):
    """A step, then one in which every process has another layer, whose weight an earlier layer shares."""
    torch.manual_seed(0)
    model = linear_model(1)
    if kind == "stages":
        pipe = pymoe.Pipe.from_stages(nn.ModuleList(copy.deepcopy(model)), checkpoint="never")
    else:
        pipe = pymoe.Pipe(copy.deepcopy(model), balance=[1, 1], checkpoint="never")
    schedule, stages = make("Schedule1F1B", pipe, rank, world, 4, F.mse_loss)
    for edited in (False, True):
        if edited:
            for one in (model, pipe.staged.module):
                torch.manual_seed(1)
                one[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
                one[0][0].weight = one[1][0].weight
        model.zero_grad()
        pipe.zero_grad()
        (x, y), *_ = batches(1, [8])
        F.mse_loss(model(x), y).backward()
        run(schedule, stages, (x,), target=y)
    return compare(model, pipe, stages)


@pytest.mark.parametrize("kind", ["sequential", "stages"])
def test_a_layer_that_is_replaced_in_every_process_is_run(ranks, kind):
    assert max(ranks(2).run(replaced, kind=kind)) <= EXACT
