"""Traced pipes on several processes: values past stages, arguments of middle stages, shared parameters."""

import pytest

EXACT = 1e-12
SCHEDULES = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


@pytest.mark.parametrize(
    "schedule", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"]
)
def test_skips_and_arguments_of_middle_stages(ranks, schedule):
    for worst in ranks(2).run("traced.steps", kind="Skips", name=schedule):
        assert max(worst.values()) <= EXACT, worst


@pytest.mark.parametrize("transmit", [False, True])
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_shared_parameters_that_are_replicated_or_transmitted(ranks, schedule, transmit):
    for worst in ranks(3).run("traced.steps", kind="Tied", name=schedule, transmit=transmit):
        assert max(worst.values()) <= EXACT, worst


def test_a_model_that_returns_its_loss(ranks):
    assert max(ranks(3).run("traced.loss_of_its_own")) <= EXACT
