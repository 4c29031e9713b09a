"""Pipes on several processes train as the unsplit model does, under torch's schedules."""

import pytest
import torch
from pipe_models import WIDTH
from torch import nn
from training import EXACT, SCHEDULES, compare, in_two_stages, step_of_both, steps


@pytest.mark.slow
@pytest.mark.thinned(deep=8)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "ScheduleZBVZeroBubble"])
def test_twenty_steps_equal_the_unsplit_model(ranks, schedule, world):
    for worst in ranks(world).run(steps, name=schedule):
        assert max(worst.values()) <= EXACT, worst


def replaced(rank, world, kind):
    """Run a step, then another with a new layer in every process, whose weight an earlier layer shares."""
    model, pipe, schedule, stages = in_two_stages(kind, rank, world)
    for edited in (False, True):
        if edited:
            for one in (model, pipe.staged.module):
                torch.manual_seed(1)
                one[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
                one[0][0].weight = one[1][0].weight
        step_of_both(model, pipe, schedule, stages)
    return compare(model, pipe, stages)


@pytest.mark.parametrize("kind", ["sequential", "stages"])
def test_a_layer_that_is_replaced_in_every_process_is_run(ranks, kind):
    assert max(ranks(2).run(replaced, kind=kind)) <= EXACT
