"""Schedules whose workers run what is ready instead of waiting."""

import itertools
from dataclasses import replace

import pytest
from any_schedule import examples, schedules, times
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overtaking import compare
from pymoe.pipe.schedules import Kind, Times, build, simulate
from pymoe.pipe.schedules.overtaking import simulate_overtaking


@examples(100)
@given(schedules(5, 7), st.integers(0, 2**20), st.integers(0, 3))
def test_where_nothing_overtakes_the_two_simulators_agree(schedule, seed, communication):
    time = times(schedule, seed)
    assert simulate_overtaking(schedule, time, communication) == simulate(schedule, time, communication)


@examples(150)
@given(schedules(5, 7), st.integers(0, 2**20), st.sets(st.sampled_from(Kind), min_size=1))
def test_the_rules_hold_for_any_times(schedule, seed, overtakes):
    time = times(schedule, seed)
    bent = replace(schedule, overtakes=frozenset(overtakes))
    record = simulate(bent, time)
    spans = {span.action: span for order in record.spans for span in order}
    assert spans.keys() == schedule.places.keys()
    planned = simulate(schedule, time)
    for worker, order in enumerate(record.spans):
        for before, after in itertools.pairwise(order):
            assert before.end <= after.start
        for stage in range(schedule.stages):
            for kind in Kind:
                numbers = [s.action.micro_batch for s in order if (s.action.stage, s.action.kind) == (stage, kind)]
                plan = [a.micro_batch for a in schedule.orders[worker] if (a.stage, a.kind) == (stage, kind)]
                assert numbers == plan
        limit = schedule.live_limits[worker] if schedule.live_limits else None
        if limit is not None:
            assert record.peak_live[worker] <= max(limit, planned.peak_live[worker])
        # What has run before its turn may overtake.
        turn = {action: position for position, action in enumerate(schedule.orders[worker])}
        for number, span in enumerate(order):
            if any(turn[later.action] < turn[span.action] for later in order[number + 1 :]):
                assert span.action.kind in overtakes
    for action, span in spans.items():
        for needed in schedule.dependencies(action):
            assert spans[needed].end <= span.start


def test_a_gap_is_filled():
    """The second micro-batch comes late to the second stage, which meanwhile has a backward of weights to do."""
    schedule = build("zero-bubble-greedy", 2, 3)
    late = Times(forward=(3, 1))
    greedy = simulate(schedule, late)
    order = [str(span.action) for span in greedy.spans[1]]
    assert order.index("1W0") < order.index("1F1")
    assert greedy.makespan <= simulate(replace(schedule, overtakes=frozenset()), late).makespan


@pytest.mark.parametrize(("spread", "better"), [(0.02, False), (0.6, True)])
def test_it_pays_where_times_vary(spread, better):
    """What the docstring of the schedule says."""
    found = compare(build("zero-bubble", 4, 16), spread, 20)
    assert (found["all"] < 0.98) == better
    assert 0.9 < found["all"] < 1.1
