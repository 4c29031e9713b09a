"""The simulated events: cases by hand, the lower bound, and what can never happen."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from expert_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from pymoe.ep.simulate import Phases, Task, best_possible, run, timeline
from pymoe.ep.simulate.timeline import PROCESSOR, WIRE

NOTHING = {"gate": 0, "counts": 0, "gather": 0, "latency": 0, "dispatch": 0, "shared": 0, "experts": 0, "combine": 0}
NOTHING |= {"sum": 0, "clones": 0, "clones_back": 0}
CUT = ("dispatch", "experts", "combine")
# Whole numbers divided by 1, 2, 4, 8 chunks are exact in floating point.
TIME = st.integers(0, 60).map(lambda number: 8.0 * number)
TIMES = st.fixed_dictionaries(dict.fromkeys(NOTHING, TIME))
CHUNKS = st.sampled_from([1, 2, 4, 8])


def equal_parts(chunks, **given):
    """Phases whose rows are cut into chunks of equal size."""
    times = NOTHING | given
    return Phases(**times | {name: (times[name] / chunks,) * chunks for name in CUT})


def seconds(chunks, **given):
    return timeline(equal_parts(chunks, **given)).seconds


@st.composite
def uneven_parts(draw):
    """Phases of chunks and ranks of any size."""
    chunks, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    times = draw(TIMES)
    for name in CUT:
        times[name] = tuple(draw(st.lists(TIME, min_size=chunks, max_size=chunks)))
    work = st.lists(TIME, min_size=ranks, max_size=ranks).map(np.array)
    times["experts"] = tuple(draw(st.lists(work, min_size=chunks, max_size=chunks)))
    return Phases(**times)


def test_a_wire_as_slow_as_the_experts():
    """40 each way and 40 of experts: 120 in one part, 80 in two, which is all that the wire allows."""
    times = {"dispatch": 40, "experts": 40, "combine": 40}
    assert [seconds(chunks, **times) for chunks in (1, 2, 4)] == [120, 80, 80]
    assert [best_possible(equal_parts(chunks, **times)) for chunks in (1, 2, 4)] == [120, 80, 80]


def test_experts_slower_than_the_wire_hide_all_but_the_first_and_last_part():
    times = {"dispatch": 8, "experts": 80, "combine": 8}
    assert [seconds(chunks, **times) for chunks in (1, 2, 4)] == [96, 88, 84]


def test_every_part_pays_the_latency():
    """Four parts: 4 of latency each and 2 of rows; experts end before the wire is free. 4 * 6 there and 4 * 6 back."""
    assert seconds(4, latency=4, dispatch=8, experts=8, combine=8) == 48
    assert seconds(1, latency=4, dispatch=8, experts=8, combine=8) == 12 + 8 + 12


def test_shared_experts_run_while_the_first_rows_travel():
    assert seconds(1, dispatch=40, experts=40, combine=40, shared=30) == 120
    assert seconds(1, dispatch=40, experts=40, combine=40, shared=50) == 130


def test_counts_travel_beside_the_gather():
    assert seconds(1, gate=3, counts=5, gather=2, dispatch=1) == 9
    assert seconds(1, gate=3, counts=2, gather=5, dispatch=1) == 9


def test_weights_of_clones_are_needed_by_the_last_chunk():
    assert seconds(1, dispatch=10, clones=6, experts=20, combine=10, sum=1) == 47
    assert seconds(2, dispatch=10, clones=6, experts=40, combine=10) == seconds(2, dispatch=10, experts=40, combine=10)
    assert seconds(2, dispatch=10, clones=26, experts=40, combine=10) == 36 + 20 + 5


def test_gradients_of_clones_leave_behind_the_first_chunk_and_the_sum_waits_for_them():
    assert seconds(1, dispatch=10, experts=20, combine=10, sum=1, clones_back=6) == 47
    assert seconds(2, dispatch=10, experts=40, combine=10, sum=1, clones_back=6) == 5 + 40 + 5 + 1
    assert seconds(2, dispatch=10, experts=40, combine=10, sum=1, clones_back=26) == 5 + 20 + 5 + 26 + 5 + 1


def test_rows_are_gathered_when_clones_are_planned():
    assert seconds(1, counts=4, gather=5, dispatch=1) == 6
    assert seconds(1, counts=4, gather=5, dispatch=1, clones=2) == 4 + 5 + 1 + 2


def test_the_events_of_two_parts():
    found = timeline(equal_parts(2, gate=1, gather=1, dispatch=4, experts=6, combine=4, sum=1))
    spans = {event.name: (event.start, event.end) for event in found.seen_by(0)}
    assert spans == {
        "gate": (0, 1),
        "counts": (1, 1),
        "gather": (1, 2),
        "dispatch 0": (2, 4),
        "dispatch 1": (4, 6),
        "shared": (2, 2),
        "experts 0": (4, 7),
        "experts 1": (7, 10),
        "combine 0": (7, 9),
        "combine 1": (10, 12),
        "sum": (12, 13),
    }
    assert (found.busy(WIRE), found.busy(PROCESSOR)) == (8, 9)


def test_an_exchange_starts_when_the_last_rank_is_ready():
    """Rank 0 is slow in the first part, rank 1 in the second; neither waits for what it does not need."""
    first, second = np.array([10.0, 2.0]), np.array([3.0, 9.0])
    phases = Phases(**NOTHING | {"dispatch": (1, 1), "experts": (first, second), "combine": (4, 4)})
    found = timeline(phases)
    spans = {event.name: (event.start, event.end) for event in found.seen_by(1)}
    assert spans["experts 0"] == (1, 3)
    assert spans["experts 1"] == (3, 12)
    assert spans["combine 0"] == (11, 15)  # rank 0 has the first part ready at 11, both the second at 14 and 12
    assert spans["combine 1"] == (15, 19)
    assert found.fullest == 0
    assert found.busy(PROCESSOR) == 13


def test_a_part_without_rows_hides_nothing():
    """One expert a rank, in two parts: the first is empty, and costs its latency."""
    whole = seconds(1, latency=1, dispatch=10, experts=20, combine=10)
    parts = Phases(**NOTHING | {"latency": 1, "dispatch": (0, 10), "experts": (0, 20), "combine": (0, 10)})
    assert timeline(parts).seconds == whole + 1


@examples(200)
@given(TIMES)
def test_one_part_takes_the_sum_of_what_waits_for_each_other(times):
    gathered = times["gate"] + times["gather"] + (times["counts"] if times["clones"] else 0)
    known = max(times["gate"] + times["counts"], gathered)
    arrived = known + times["latency"] + times["dispatch"] + times["clones"]
    shared = gathered + times["shared"]
    after = times["experts"] + times["latency"] + times["combine"] + times["clones_back"] + times["sum"]
    assert seconds(1, **times) == max(arrived, shared) + after


@examples(300)
@given(uneven_parts())
def test_no_run_is_shorter_than_the_best_possible(phases):
    found = timeline(phases)
    assert found.seconds >= found.best
    assert found.seconds >= found.busy(WIRE)
    assert found.seconds >= found.busy(PROCESSOR)


@examples(200)
@given(TIMES, CHUNKS)
def test_equal_parts_reach_the_best_possible_without_shared_experts_and_clones(times, chunks):
    """If the way back takes as long as the way there."""
    times |= {"shared": 0.0, "clones": 0.0, "clones_back": 0.0, "combine": times["dispatch"]}
    found = timeline(equal_parts(chunks, **times))
    assert found.seconds == found.best


@examples(300)
@given(uneven_parts(), st.sampled_from(list(NOTHING)), st.sampled_from([0.0, 0.25, 0.5]))
def test_nothing_gets_slower_when_a_part_gets_faster(phases, name, factor):
    before = getattr(phases, name)
    after = tuple(factor * one for one in before) if name in CUT else factor * before
    faster = replace(phases, **{name: after})
    assert timeline(faster).seconds <= timeline(phases).seconds
    assert best_possible(faster) <= best_possible(phases)


@examples(200)
@given(uneven_parts())
def test_lanes_run_one_task_at_a_time_in_the_order_of_launches(phases):
    found = timeline(phases)
    for rank in range(len(phases.experts[0])):
        for lane in (WIRE, PROCESSOR):
            events = [event for event in found.seen_by(rank) if event.lane == lane]
            assert all(earlier.end <= later.start for earlier, later in pairwise(events))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task("a", WIRE, 1, ("b",)), Task("b", WIRE, 1)], "task a must wait for tasks before it .* got a wait for b"),
        ([Task("a", WIRE, 1), Task("a", WIRE, 1)], "task a must .* have a new name, got the same name again"),
        ([Task("a", WIRE, -1)], "task a must take 0 or longer, got -1"),
        ([Task("a", WIRE, float("nan"))], "task a must take 0 or longer, got nan"),
    ],
)
def test_tasks_that_cannot_run_are_refused(tasks, message):
    with pytest.raises(ValueError, match=message):
        run(tasks)
