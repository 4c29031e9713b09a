"""A rank that is killed, or raises, ends the calls of the others with an error that names it, long before any timeout.

Ranks that were told stay alive and keep their connections, so that the others do not learn it from their end.
"""

import random
import signal
import time

import pytest
from deaths import RANKS, VICTIM, all_raise, leaves, train, two_groups
from rank_processes import ranks

PLACES = ["gate", "experts", "after the experts", "backward", "between two steps"]
DIED = f"the process of rank {VICTIM} of the expert-parallel group has ended"
UNNAMED = "a rank of the expert-parallel group has died, has left, or took longer than the group's timeout"


def are_told(ends, what, who=(VICTIM,), count=RANKS - 1):
    """Check that all but the victim were told by the layer, and of what."""
    assert len(ends) == count
    assert VICTIM not in ends
    for end, value in ends.values():
        assert end == "told", value
        layer, text, named = value
        assert text.startswith(f"MoE {layer!r}")
        assert " did not arrive: " in text
        assert what in text
        assert named == who


@pytest.mark.thinned(usual=3)
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_dies_inside_a_layer_or_while_experts_move_ends_the_others(place):
    with ranks(train, RANKS, place=place) as group:
        are_told(group.ends(RANKS - 1), DIED)


@pytest.mark.slow
@pytest.mark.thinned(deep=2)
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_is_killed_at_any_time_ends_the_others(seed):
    with ranks(train, RANKS) as group:
        group.wait_for("step", RANKS)
        time.sleep(random.Random(seed).uniform(0, 0.05))
        group.signal(VICTIM, signal.SIGKILL)
        are_told(group.ends(RANKS - 1), DIED)


@pytest.mark.thinned(usual=2)
@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("experts", {}),
        ("backward", {}),
        ("after the experts", {}),
        ("experts", {"deduplicate": True}),
        ("gate", {"transport": "padded", "room": 64}),
        ("backward", {"transport": "padded", "room": 64}),
    ],
)
def test_a_rank_that_raises_and_lives_on_ends_the_others_with_its_error(place, options):
    with ranks(train, RANKS, place=place, how="raise", **options) as group:
        ends = group.ends(RANKS)
    assert ends.pop(VICTIM) == ("raised", "the answer is not 42")
    error = "in the backward pass" if place == "backward" else "Bug: the answer is not 42"
    are_told(ends, f"rank {VICTIM} of the expert-parallel group raised {error} in MoE ")


def test_where_all_ranks_raise_alike_the_group_goes_on_and_no_record_stays():
    with ranks(all_raise, RANKS) as group:
        ends = group.ends(RANKS)
    assert ends == dict.fromkeys(range(RANKS), ("done", None))


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("rank", [VICTIM, 0])
def test_a_rank_that_is_stopped_is_alive_and_the_others_wait(rank):
    with ranks(train, RANKS, steps=100) as group:
        group.wait_for("step", RANKS)
        group.signal(rank, signal.SIGSTOP)
        time.sleep(8)  # longer than calls of the store wait
        group.signal(rank, signal.SIGCONT)
        ends = group.ends(RANKS)
    assert ends == dict.fromkeys(range(RANKS), ("done", None))


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("place", ["experts", "backward"])
def test_a_slow_rank_is_waited_for(place):
    with ranks(train, RANKS, place=place, how="sleep", steps=5) as group:
        ends = group.ends(RANKS)
    assert ends == dict.fromkeys(range(RANKS), ("done", None))


def test_a_death_in_one_group_ends_the_groups_of_that_rank_alone():
    with ranks(two_groups, RANKS) as group:
        are_told(group.ends(RANKS - 1), DIED)


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("store", ["a file", "none"])
def test_it_needs_no_store_of_a_kind(store, tmp_path):
    options = {"file": str(tmp_path / "store")} if store == "a file" else {}
    with ranks(train, RANKS, place="gate", store=store, **options) as group:
        are_told(group.ends(RANKS - 1), DIED)


def test_a_rank_that_raises_reports_it_in_a_file_as_well(tmp_path):
    with ranks(train, RANKS, place="experts", how="raise", store="a file", file=str(tmp_path / "store")) as group:
        ends = group.ends(RANKS)
    assert ends.pop(VICTIM)[0] == "raised"
    are_told(ends, f"rank {VICTIM} of the expert-parallel group raised Bug")


def test_a_death_on_another_host_ends_the_others():
    with ranks(train, RANKS, place="experts", hosts_differ=True) as group:
        are_told(group.ends(RANKS - 1), UNNAMED, ())


def test_nothing_is_left_of_a_group_that_was_destroyed():
    with ranks(leaves, RANKS) as group:
        ends = group.ends(RANKS)
    assert {end for end, _ in ends.values()} == {"done"}, ends
    assert max(files for _, files in ends.values()) <= 0, ends
