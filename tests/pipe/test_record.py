"""A run gives the same record as its plan, for any clock, and for any order in which its parts are reported."""

import random

import pytest
from any_schedule import examples, schedules, times
from hypothesis import given
from hypothesis import strategies as st

from pymoe.pipe.schedules import Action, Kind, Times, as_run, build, mean_times, simulate


def triples(record, zero=0):
    return [(action, start + zero, end + zero) for order in record.spans for action, start, end in order]


@examples(100)
@given(schedules(), st.integers(0, 2**20))
def test_a_run_as_planned_has_the_record_of_the_plan(schedule, seed):
    time = times(schedule, seed)
    plan = simulate(schedule, lambda action: 1 + time(action), communication=2)
    told = triples(plan, zero=12345)
    random.Random(seed).shuffle(told)
    run = as_run(schedule, told)
    assert run.spans == plan.spans
    for what in ("makespan", "busy", "bubble", "ideal", "speed_up", "peak_live", "peak_live_of_stages", "placement"):
        assert getattr(run, what) == getattr(plan, what)


def test_a_run_may_keep_another_order():
    """Live activations are counted in the run's own order: three forwards precede the first backward."""
    schedule = build("1f1b", 1, 3)
    order = ["0F0", "0F1", "0F2", "0B2", "0B0", "0B1"]
    named = {str(action): action for action in schedule.places}
    run = as_run(schedule, [(named[name], i, i + 1) for i, name in enumerate(order)])
    assert [str(span.action) for span in run.spans[0]] == order
    assert run.peak_live == (3,)
    assert simulate(schedule).peak_live == (1,)


def test_a_run_that_failed_has_a_record():
    schedule = build("1f1b", 2, 2)
    run = as_run(schedule, [(Action(0, 0, Kind.FORWARD), 5.0, 6.0), (Action(0, 1, Kind.FORWARD), 6.0, 8.0)], "failed")
    assert (run.title, run.makespan, run.busy, run.bubble) == ("failed", 3, (3, 0), (0, 1))
    assert run.peak_live == (2, 0)
    assert as_run(schedule, []).makespan == 0


@pytest.mark.parametrize(
    ("spans", "match"),
    [
        ([("0F7", 0, 1)], "action 0F7 is not of this schedule, 1f1b"),
        ([("0I0", 0, 1)], "action 0I0 is not of this schedule"),
        ([("0F0", 0, 1), ("0F0", 1, 2)], "action 0F0 was run twice"),
        ([("0F0", 1, 0)], "action 0F0 starts at 1 and ends at 0"),
        ([("0F0", 0, 2), ("0F1", 1, 3)], "worker 0 starts 0F1 before 0F0 has ended"),
    ],
)
def test_what_no_run_can_be_is_refused(spans, match):
    def action(name):
        return Action(int(name[0]), int(name[2]), Kind(name[1]))

    with pytest.raises(ValueError, match=match):
        as_run(build("1f1b", 2, 2), [(action(name), start, end) for name, start, end in spans])


def test_the_mean_times_of_a_run_predict_it():
    schedule = build("zero-bubble", 3, 5)
    chosen = Times((1, 2, 3), (2, 1, 2), (3, 2, 1))
    run = as_run(schedule, triples(simulate(schedule, chosen), zero=7))
    assert simulate(schedule, mean_times(run)).spans == run.spans
    alone = build("1f1b", 1, 2)
    means = mean_times(as_run(alone, [(action, 10 * i, 10 * i + i) for i, action in enumerate(alone.orders[0])]))
    assert (means(Action(0, 0, Kind.FORWARD)), means(Action(0, 0, Kind.BACKWARD))) == (1, 2)


def test_the_summary_says_what_matters():
    assert simulate(build("1f1b", 2, 3)).summary() == (
        "1f1b\n"
        "  makespan     12, without bubbles 9; speed-up 1.50\n"
        "  bubble       25.0%; of the workers: 25.0%  25.0%\n"
        "  activations  at most 2  1"
    )
