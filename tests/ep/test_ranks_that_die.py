"""A rank that is killed, or raises, ends the calls of the others with an error that names it, long before any timeout.

Ranks that were told stay alive and keep their connections, so that the others do not learn it from their end.
"""

import random
import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from deaths import RANKS, VICTIM, again, all_raise, leaves, recompute, train, two_groups
from rank_processes import ranks

from pymoe._ranks import GroupStore, Process
from pymoe.ep import failures

PLACES = ["gate", "experts", "after the experts", "backward", "between two steps"]
DIED = f"the process of rank {VICTIM} of the expert-parallel group has ended"
UNNAMED = "a rank of the expert-parallel group has died, has left, or took longer than the group's timeout"


def are_told(ends, what, who=(VICTIM,), count=RANKS - 1):
    """Check that the layer told every rank except the victim, and what it told them."""
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


@pytest.mark.slow
def test_where_all_ranks_raise_alike_the_group_goes_on_and_no_record_stays():
    with ranks(all_raise, RANKS) as group:
        ends = group.ends(RANKS)
    assert ends == dict.fromkeys(range(RANKS), ("done", None))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [VICTIM, 0])
def test_a_rank_that_is_stopped_is_alive_and_the_others_wait(rank):
    with ranks(train, RANKS, steps=100) as group:
        group.wait_for("step", RANKS)
        group.signal(rank, signal.SIGSTOP)
        time.sleep(8)  # longer than calls to the store wait
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


@pytest.mark.slow
def test_nothing_is_left_of_a_group_that_was_destroyed():
    with ranks(leaves, RANKS) as group:
        ends = group.ends(RANKS)
    assert {end for end, _ in ends.values()} == {"done"}, ends
    assert max(files for _, files in ends.values()) <= 0, ends


def test_where_all_ranks_raise_in_a_backward_pass_they_may_run_it_again():
    with ranks(again, RANKS) as group:
        ends = group.ends(RANKS)
    assert ends == dict.fromkeys(range(RANKS), ("done", None))


def test_a_call_that_is_recomputed_is_no_failure_where_checkpointing_stops_it_early():
    """In such a call, torch raises an error of its own inside the layer, on healthy ranks, once it has recomputed
    enough.
    """
    with ranks(recompute, RANKS, how="sleep") as group:
        ends = group.ends(RANKS)
    assert ends == dict.fromkeys(range(RANKS), ("done", None))


def test_a_rank_that_raises_in_a_call_that_is_recomputed_ends_the_others():
    with ranks(recompute, RANKS, how="raise") as group:
        ends = group.ends(RANKS)
    assert ends.pop(VICTIM) == ("raised", "the answer is not 42")
    are_told(ends, f"rank {VICTIM} of the expert-parallel group raised in the backward pass in MoE ")


class Group:
    """A stand-in for a process group; only its identity and its store are used."""

    def __init__(self, store):
        self.store = store

    def get_group_store(self):
        return self.store


def members_of(group):
    """Make this process a member of a group, and return what it knows about the group."""
    members = failures.GroupMembers(0, [Process.own()] * 2, GroupStore(group, "test", 5.0))
    failures._members[group] = members
    return members


def test_where_no_backward_pass_runs_none_is_reported_to_have_failed():
    """Passes compiled by torch call the functions of a graph outside any pass of its engine."""
    group = Group(dist.HashStore())
    members = members_of(group)
    assert not failures.report_failed_backward(SimpleNamespace(group=group, title="'layer'"))
    assert not members.reports
    assert members.reported(1) is None


def test_the_timeout_of_a_store_that_is_its_own_clone_stays():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=300))
    mine = GroupStore(Group(dist.PrefixStore("group", store)), "test", 5.0)
    assert store.timeout == timedelta(seconds=300)
    mine.write("key", 3)
    assert mine.read("key") == 3
    assert mine.read("other") is None


def test_a_group_without_a_store_is_served_without_records():
    group = Group(None)
    group.rank = lambda: 0
    failures.remember_members(group, [Process.own()] * 2, "name")
    assert failures._members[group].store is None


def test_a_wait_that_takes_no_timeout_is_not_repeated():
    """Work objects of some backends, such as those created from futures, refuse timeouts before they are done."""
    waits = []

    class Work:
        def wait(self, *timeout):
            waits.append(timeout)
            assert len(waits) < 9
            if timeout:
                raise RuntimeError("wait() with finite timeout not implemented")

        def is_completed(self):
            return False

    group = Group(dist.HashStore())
    members_of(group)
    sharding = SimpleNamespace(group=group, mesh=SimpleNamespace(device_type="cpu"))
    failures.Exchange(sharding, "rows", Work).wait()
    assert waits == [(failures.LOOK,), ()]
