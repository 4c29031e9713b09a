"""Pipelines over processes, in which each stage's experts are spread over ranks that have the same stage."""

import pipes

import pytest


@pytest.mark.parametrize("clones", [0, 1])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleavedZeroBubble"])
def test_gradients_are_those_of_one_process(ranks, schedule, checkpoint, clones):
    assert max(ranks.run(pipes.gradients, schedule=schedule, checkpoint=checkpoint, clones=clones)) < 1e-12
