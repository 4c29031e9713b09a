"""The simulator's times agree with an independent computation, for any schedule and any times."""

import pytest
from any_schedule import examples, schedules, times
from hypothesis import given
from hypothesis import strategies as st

from pymoe.pipe.schedules import Action, Kind, Schedule, ScheduleError, Times, build, simulate


def brute_force(schedule, time, communication):
    """Return (start, end) of every action: all begin at 0, and are delayed until no rule is broken. The rules are
    only these: a forward follows the forward of the stage before, and a backward follows its forward and the
    gradient that it needs.
    """
    spans = {action: (0, 0) for order in schedule.orders for action in order}
    kinds = {(action.stage, action.micro_batch, action.kind.value): action for action in spans}
    last = len(schedule.placement) - 1

    def earliest(worker, position, action):
        stage, micro_batch, letter = action.stage, action.micro_batch, action.kind.value
        wanted = {
            "F": [(stage - 1, "F")],
            "B": [(stage, "F"), (stage + 1, "I"), (stage + 1, "B")],
            "I": [(stage, "F"), (stage + 1, "I"), (stage + 1, "B")],
            "W": [(stage, "I")],
        }[letter]
        bounds = [0]
        if position:
            bounds.append(spans[schedule.orders[worker][position - 1]][1])
        for other, kind in wanted:
            if 0 <= other <= last and (other, micro_batch, kind) in kinds:
                travel = communication if schedule.placement[other] != worker else 0
                bounds.append(spans[kinds[other, micro_batch, kind]][1] + travel)
        return max(bounds)

    settled = False
    while not settled:
        settled = True
        for worker, order in enumerate(schedule.orders):
            for position, action in enumerate(order):
                start = earliest(worker, position, action)
                if spans[action] != (start, start + time(action)):
                    spans[action], settled = (start, start + time(action)), False
    return spans


@examples(150)
@given(schedules(5, 7), st.integers(0, 2**20), st.integers(0, 3))
def test_every_time_is_that_of_a_brute_force_computation(schedule, seed, communication):
    time = times(schedule, seed)
    record = simulate(schedule, time, communication)
    expected = brute_force(schedule, time, communication)
    assert {span.action: (span.start, span.end) for order in record.spans for span in order} == expected
    assert record.makespan == max(end for _, end in expected.values())
    assert [tuple(span.action for span in order) for order in record.spans] == list(schedule.orders)


@examples(100)
@given(schedules(), st.integers(0, 2**20))
def test_the_numbers_of_a_record_fit_together(schedule, seed):
    time = times(schedule, seed)
    record = simulate(schedule, time)
    work = [sum(map(time, order)) for order in schedule.orders]
    assert list(record.busy) == work
    assert record.ideal == max(work) <= record.makespan <= sum(work)
    if record.makespan:
        assert list(record.bubble) == pytest.approx([1 - busy / record.makespan for busy in work])
        assert record.speed_up == pytest.approx(schedule.workers * (1 - record.mean_bubble))


@examples(100)
@given(schedules(), st.integers(0, 2**20))
def test_live_activations_are_those_of_the_clock(schedule, seed):
    """Counts use only the ends of actions; no two actions of a worker end at the same time."""
    time = times(schedule, seed)
    record = simulate(schedule, lambda action: 1 + time(action))
    for worker, order in enumerate(record.spans):
        ends = sorted((s.end, s.action.kind is Kind.FORWARD, s.action.kind.value in "BW") for s in order)
        live = [sum(up - down for _, up, down in ends[: i + 1]) for i in range(len(ends))]
        assert record.peak_live[worker] == max(live)
        own = [stage for stage, home in enumerate(schedule.placement) if home == worker]
        assert max(record.peak_live_of_stages[s] for s in own) <= max(live)
        if len(own) == 1:
            assert record.peak_live_of_stages[own[0]] == max(live)
    assert all(0 < peak <= limit for peak, limit in zip(record.peak_live, schedule.live_limits, strict=True))


def test_a_simulation_by_hand():
    """Use two stages, two micro-batches and 1F1B; stage 1 is slow, and a message takes 1 time unit."""
    record = simulate(build("1f1b", 2, 2), Times((1, 3), (1, 2), (0, 2)), communication=1)
    assert [[(str(s.action), s.start, s.end) for s in order] for order in record.spans] == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 10, 11), ("0B1", 17, 18)],
        [("1F0", 2, 5), ("1B0", 5, 9), ("1F1", 9, 12), ("1B1", 12, 16)],
    ]
    assert (record.makespan, record.ideal, record.busy) == (18, 14, (4, 14))
    assert record.speed_up == 1


def test_messages_between_stages_of_one_worker_take_no_time():
    schedule = build("interleaved-1f1b", 4, 3, virtual_stages=4)
    assert simulate(schedule, communication=100).makespan == simulate(schedule).makespan == 36


def test_times_of_kinds():
    at = {kind: Action(1, 0, kind) for kind in Kind}
    times = Times(2, 3, 4)
    assert [times(at[kind]) for kind in Kind] == [2, 7, 3, 4]
    assert Times(2, 3, 4, backward=5)(at[Kind.BACKWARD]) == 5
    assert Times((9, 8), (7, 6), (5, 4))(at[Kind.BACKWARD]) == 10
    assert Times(backward=(1, 2))(at[Kind.BACKWARD]) == 2
    with pytest.raises(ValueError, match="times for 1 stages, none for stage 1"):
        Times((1,))(at[Kind.FORWARD])
    with pytest.raises(ValueError, match="backward_input must take 0 or longer, got -1"):
        Times(backward_input=(1, -1))


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_a_time_that_is_none_is_refused(wrong):
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ValueError, match=r"action 1F0 must take 0 or longer, got"):
        simulate(schedule, lambda action: wrong if action.stage else 1)
    with pytest.raises(ValueError, match="communication must take 0 or longer"):
        simulate(schedule, communication=wrong)


def test_what_cannot_run_is_not_simulated():
    backward_first = (Action(0, 0, Kind.BACKWARD), Action(0, 0, Kind.FORWARD))
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(Schedule("mine", 1, (0,), (backward_first,)))


def test_times_may_be_zero():
    record = simulate(build("zero-bubble", 3, 4), Times(0, 0, 0))
    assert (record.makespan, record.bubble, record.speed_up) == (0, (0, 0, 0), 1)


def test_a_large_plan_keeps_its_closed_form():
    """A thousand micro-batches on sixteen stages have 47,000 actions."""
    record = simulate(build("zero-bubble", 16, 1000))
    assert record.makespan == 3 * 1000 + 15
    assert sum(map(len, record.spans)) == 47_000
