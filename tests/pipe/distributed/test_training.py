"""Pipes on several processes train as the unsplit model does, under torch's schedules."""

import pytest
from training import EXACT, SCHEDULES, steps


@pytest.mark.slow
@pytest.mark.thinned(deep=8)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "ScheduleZBVZeroBubble"])
def test_twenty_steps_equal_the_unsplit_model(ranks, schedule, world):
    for worst in ranks(world).run(steps, name=schedule):
        assert max(worst.values()) <= EXACT, worst
