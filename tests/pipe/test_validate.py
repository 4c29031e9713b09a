"""Every schedule of a builder is accepted, and every corrupted one is refused with the place of the error."""

from dataclasses import replace
from itertools import accumulate

import pytest
from any_schedule import examples, schedules
from hypothesis import assume, given
from hypothesis import strategies as st

from pymoe.pipe.schedules import Action, Kind, Schedule, ScheduleError, build, run, validate

F, B, I, W = Kind  # noqa: E741


def changed(schedule, worker, order):
    orders = list(schedule.orders)
    orders[worker] = tuple(order)
    return replace(schedule, orders=tuple(orders))


def refused(schedule, match):
    with pytest.raises(ScheduleError, match=match) as caught:
        validate(schedule)
    return caught.value


@st.composite
def schedules_with_a_place(draw):
    schedule = draw(schedules())
    worker = draw(st.integers(0, schedule.workers - 1))
    assume(schedule.orders[worker])
    return schedule, worker, draw(st.integers(0, len(schedule.orders[worker]) - 1))


@examples(150)
@given(schedules())
def test_what_builders_make_is_accepted(schedule):
    validate(schedule)


@examples(100)
@given(schedules())
def test_a_run_has_every_action_after_what_it_needs(schedule):
    ended = set()
    for worker, action, dependencies in run(schedule):
        assert dependencies == schedule.dependencies(action)
        assert ended.issuperset(dependencies)
        assert schedule.placement[action.stage] == worker
        ended.add(action)
    assert len(ended) == sum(map(len, schedule.orders))


@examples(100)
@given(schedules_with_a_place())
def test_a_dropped_action_is_missed(case):
    schedule, worker, position = case
    order = list(schedule.orders[worker])
    dropped = order.pop(position)
    error = refused(changed(schedule, worker, order), "missing")
    assert (error.worker, error.action) == (worker, dropped)


@examples(100)
@given(schedules_with_a_place(), st.data())
def test_a_doubled_action_is_found(case, data):
    schedule, worker, position = case
    order = list(schedule.orders[worker])
    double = order[position]
    order.insert(data.draw(st.integers(0, len(order))), double)
    first, second = (i for i, action in enumerate(order) if action == double)
    error = refused(changed(schedule, worker, order), f"done before, at position {first}")
    assert (error.worker, error.position, error.action) == (worker, second, double)


@examples(100)
@given(schedules_with_a_place(), st.data())
def test_an_action_on_a_wrong_worker_is_found(case, data):
    schedule, worker, position = case
    assume(schedule.workers > 1)
    other = data.draw(st.integers(0, schedule.workers - 1).filter(lambda w: w != worker))
    order = list(schedule.orders[worker])
    moved = order.pop(position)
    schedule = changed(schedule, worker, order)
    place = data.draw(st.integers(0, len(schedule.orders[other])))
    strange = [*schedule.orders[other][:place], moved, *schedule.orders[other][place:]]
    error = refused(changed(schedule, other, strange), f"stage {moved.stage} is placed on worker {worker}")
    assert (error.worker, error.position, error.action) == (other, place, moved)


def needed_before(schedule, action):
    """Return the earlier actions of the same worker that the action needs, directly or through other workers."""
    worker, position = schedule.places[action]
    needed, unseen = set(), list(schedule.dependencies(action))
    while unseen:
        one = unseen.pop()
        if one not in needed:
            needed.add(one)
            home, place = schedule.places[one]
            unseen += schedule.dependencies(one)
            unseen += schedule.orders[home][place - 1 : place] if home != worker else ()
    return [i for i in range(position) if schedule.orders[worker][i] in needed]


@examples(150)
@given(schedules_with_a_place(), st.data())
def test_swapped_actions_of_which_one_needs_the_other_are_a_deadlock(case, data):
    schedule, worker, position = case
    order = list(schedule.orders[worker])
    earlier = needed_before(schedule, order[position])
    assume(earlier)
    other = data.draw(st.sampled_from(earlier))
    order[position], order[other] = order[other], order[position]
    broken = changed(schedule, worker, order)
    error = refused(broken, "deadlock: .* waits for .*, at position")
    assert broken.orders[error.worker][error.position] == error.action


def test_a_deadlock_names_everyone_in_the_ring():
    """Worker 0 wants the first gradient before its second forward; worker 1 wants both forwards before any backward."""
    first = (Action(0, 0, F), Action(0, 0, B), Action(0, 1, F), Action(0, 1, B))
    second = (Action(1, 0, F), Action(1, 1, F), Action(1, 0, B), Action(1, 1, B))
    error = refused(Schedule("mine", 2, (0, 1), (first, second)), "deadlock")
    assert str(error) == (
        "worker 0, position 1, action 0B0: deadlock: 0B0 waits for 1B0, at position 2 of worker 1; "
        "1F1 waits for 0F1, at position 2 of worker 0"
    )


def test_a_deadlock_is_blamed_on_the_ring_and_not_on_those_who_wait_for_it():
    """Worker 0 only waits. Worker 2 wants two forwards before its first backward; worker 1 wants a backward in
    between.
    """
    schedule = build("1f1b", 4, 2)
    calm = (Action(1, 0, F), Action(1, 0, B), Action(1, 1, F), Action(1, 1, B))
    hasty = (Action(2, 0, F), Action(2, 1, F), Action(2, 0, B), Action(2, 1, B))
    error = refused(changed(changed(schedule, 1, calm), 2, hasty), "1B0 waits for 2B0.*; 2F1 waits for 1F1")
    assert (error.worker, error.position) == (1, 1)
    assert "0B0" not in str(error)


def test_a_backward_before_its_own_forward_is_a_deadlock():
    schedule = Schedule("mine", 1, (0,), ((Action(0, 0, B), Action(0, 0, F)),))
    assert refused(schedule, "0B0 waits for 0F0, at position 1 of worker 0").position == 0


@pytest.mark.parametrize(
    ("orders", "place", "match"),
    [
        ([[Action(0, 0, F), Action(0, 0, I)]], (0, None, Action(0, 0, W)), "missing, while 0I0 is there"),
        ([[Action(0, 0, F), Action(0, 0, W)]], (0, None, Action(0, 0, I)), "missing, while 0W0 is there"),
        ([[Action(0, 0, F)]], (0, None, Action(0, 0, B)), "missing, and so are its two parts"),
        ([[Action(0, 0, B)]], (0, None, Action(0, 0, F)), "missing"),
        (
            [[Action(0, 0, F), Action(0, 0, B), Action(0, 0, W)]],
            (0, 2, Action(0, 0, W)),
            "the whole backward 0B0 is there too",
        ),
        ([[Action(0, 0, F), Action(1, 0, F)]], (0, 1, Action(1, 0, F)), "there are 1 stages"),
        ([[Action(0, 0, F), Action(0, 1, F)]], (0, 1, Action(0, 1, F)), "there are 1 micro-batches"),
        ([], (None, None, None), "stage 0 is placed on worker 0, there are 0 workers"),
    ],
)
def test_a_wrong_table_is_refused_with_the_place(orders, place, match):
    error = refused(Schedule("mine", 1, (0,), tuple(map(tuple, orders))), match)
    assert (error.worker, error.position, error.action) == place


@examples(60)
@given(schedules_with_a_place())
def test_a_live_limit_below_what_is_held_is_found(case):
    schedule, worker, _ = case
    limits = list(schedule.live_limits)
    order = schedule.orders[worker]
    changes = [1 if action.kind is F else -1 if action.kind in (B, W) else 0 for action in order]
    live = list(accumulate(changes))
    limits[worker] = max(live) - 1
    error = refused(replace(schedule, live_limits=tuple(limits)), f"holds {max(live)} activations, the limit is")
    assert (error.worker, error.position) == (worker, live.index(max(live)))


def test_limits_and_workers_must_match_in_number():
    refused(replace(build("1f1b", 2, 2), live_limits=(2,)), "1 live limits for 2 workers")


def test_parts_and_wholes_may_be_mixed():
    """Stages next to a split one wait for the values and gradients that it really sends."""
    middle = (Action(1, 0, F), Action(1, 0, I), Action(1, 0, W))
    schedule = Schedule(
        "mine", 1, (0, 1, 2), ((Action(0, 0, F), Action(0, 0, B)), middle, (Action(2, 0, F), Action(2, 0, B)))
    )
    validate(schedule)
    assert schedule.dependencies(Action(0, 0, B)) == (Action(0, 0, F), Action(1, 0, I))
    assert schedule.dependencies(Action(1, 0, I)) == (Action(1, 0, F), Action(2, 0, B))
    assert schedule.dependencies(Action(1, 0, W)) == (Action(1, 0, I),)
