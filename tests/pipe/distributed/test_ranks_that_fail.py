"""A rank that dies or raises ends the others with an error that says who, where and why, long before any timeout."""

from __future__ import annotations

import random
import signal
import time

import failing_pipes
import pytest
from failing_ranks import RANKS, Plan, train
from rank_processes import LIMIT, ranks

PLACES = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0), ("loss", 2)]


def are_told(ends, victim):
    """That all ranks but one have ended since that one failed; what they were told."""
    assert {what for what, _ in ends.values()} == {"told"}, ends
    assert set(ends) == set(range(RANKS)) - {victim}
    assert {told[0] for _, told in ends.values()} == {victim}, ends
    return [told for _, told in ends.values()]


def is_told_of_the_bug(told, rank, phase):
    """That a rank was told of the bug of another."""
    assert told[:4] == (rank, phase, rank, 2)
    assert told[4].startswith(f"rank {rank} failed in the {phase} of micro-batch 2 in stage {rank}: ")
    assert "Bug: the answer is not 42" in told[4]
    assert "in work" in told[4], "the traceback is not there"


@pytest.mark.thinned(4)
@pytest.mark.parametrize("attempt", range(10))
def test_when_a_rank_is_killed_at_any_moment_the_others_end_and_name_it(attempt):
    random.seed(attempt)
    victim = attempt % RANKS
    with ranks(train, RANKS, Plan()) as started:
        started.wait_for("step", RANKS)
        time.sleep(random.uniform(0, 0.3))
        started.signal(victim, signal.SIGKILL)
        ends = started.ends(RANKS - 1)
    for _, phase, stage, _, message in are_told(ends, victim):
        assert message.startswith(f"the process of rank {victim}, last seen ")
        assert stage in (None, victim)
        assert phase in (None, "forward", "loss", "backward")


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("phase", "rank"), PLACES)
@pytest.mark.parametrize("after", ["ends", "lingers"])
def test_when_a_rank_raises_the_others_end_with_its_error(phase, rank, after):
    with ranks(train, RANKS, Plan(bug=(rank, phase, 2, 3), after_bug=after)) as started:
        ends = started.ends(RANKS)
    assert ends.pop(rank) == ("raised", "the answer is not 42")
    for told in are_told(ends, rank):
        is_told_of_the_bug(told, rank, phase)


@pytest.mark.parametrize("rank", range(RANKS))
def test_an_error_that_ends_a_process_is_told_the_others_without_a_block(rank):
    with ranks(train, RANKS, Plan(bug=(rank, "backward", 2, 3), is_in_block=False)) as started:
        ends = started.ends(RANKS)
    assert ends.pop(rank) == ("raised", "the answer is not 42")
    for told in are_told(ends, rank):
        is_told_of_the_bug(told, rank, "backward")


def test_a_rank_that_has_raised_cannot_make_further_steps():
    with ranks(train, RANKS, Plan(bug=(1, "forward", 2, 3), after_bug="goes on")) as started:
        reports = started.wait_for("told", RANKS)
    assert {told[0] for _, told in reports.values()} == {1}


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_ranks_on_other_hosts_see_that_a_connection_is_broken_and_find_out_whose(victim):
    with ranks(train, RANKS, Plan(hosts_differ=True)) as started:
        started.wait_for("step", RANKS)
        started.signal(victim, signal.SIGKILL)
        ends = started.ends(RANKS - 1)
    for told in are_told(ends, victim):
        assert f"s of rank {victim}, last seen " in told[4]


def test_when_the_host_of_the_store_is_lost_the_others_say_so():
    with ranks(train, RANKS, Plan(hosts_differ=True)) as started:
        started.wait_for("step", RANKS)
        started.signal(0, signal.SIGKILL)
        ends = started.ends(RANKS - 1)
    assert set(ends) == {1, 2}
    for what, told in ends.values():
        assert what == "told"
        assert "the store of the process group cannot be reached any more" in told[4]


def test_a_rank_on_another_host_that_is_silent_for_longer_than_the_patience_has_failed():
    with ranks(train, RANKS, Plan(hosts_differ=True, patience=5.0)) as started:
        started.wait_for("step", RANKS)
        started.signal(1, signal.SIGSTOP)
        ends = started.ends(RANKS - 1)
    for told in are_told(ends, 1):
        assert told[4].startswith("nothing has been heard for ")


@pytest.mark.parametrize("last", range(RANKS))
def test_ranks_that_end_their_last_step_at_different_times_do_not_fail(last):
    with ranks(train, RANKS, Plan(steps=2, slow={last: 0.7})) as started:
        ends = started.ends(RANKS)
        for process in started.processes:
            process.join(LIMIT)
        codes = [process.exitcode for process in started.processes]
    assert {what for what, _ in ends.values()} == {"done"}, ends
    assert codes == [0] * RANKS


class TestPipes:
    """The same of pipes under a schedule of torch's."""

    @pytest.mark.parametrize(("phase", "rank"), [("forward", 1), ("backward", 2), ("backward", 0), ("loss", 2)])
    @pytest.mark.parametrize("is_in_block", [True, False])
    def test_an_error_of_a_layer_or_of_the_loss_ends_the_other_ranks(self, phase, rank, is_in_block):
        with ranks(failing_pipes.train, RANKS, failing_pipes.Bad(phase, rank, is_in_block)) as started:
            ends = started.ends(RANKS)
        what, (message, notes) = ends.pop(rank)
        assert (what, message) == ("raised", "the answer is not 42")
        if phase != "loss":
            assert f"rank {rank}, stage {rank}, {phase} of micro-batch 2" in notes
        for told in are_told(ends, rank):
            assert told[:4] == (rank, phase, rank, 2)
            assert "Bug: the answer is not 42" in told[4]

    @pytest.mark.parametrize("victim", range(RANKS))
    def test_where_a_rank_was_killed_is_told(self, victim):
        """What it had told through the store was up to a fifth of a second old: "between its steps"."""
        with ranks(failing_pipes.train, RANKS, failing_pipes.Bad("killed", victim)) as started:
            ends = started.ends(RANKS - 1)
        for told in are_told(ends, victim):
            assert told[:4] == (victim, "forward", victim, 2)
            assert f"rank {victim}, last seen in the forward of micro-batch 2 in stage {victim}, has ended" in told[4]

    @pytest.mark.parametrize("victim", range(RANKS))
    def test_a_killed_rank_ends_the_others(self, victim):
        with ranks(failing_pipes.train, RANKS, failing_pipes.Bad()) as started:
            started.wait_for("step", RANKS)
            started.signal(victim, signal.SIGKILL)
            ends = started.ends(RANKS - 1)
        for told in are_told(ends, victim):
            assert told[4].startswith(f"the process of rank {victim}, last seen ")
