"""A rank that dies or raises ends the others, long before any timeout, with an error that names rank, place and reason.

The ranks are a pipeline without a model: messages, and a failure detector.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import LIMIT, are_told, ranks

from pymoe import _ranks
from pymoe.pipe.distributed import watchdog
from pymoe.pipe.distributed.watchdog import FailureDetector, RankError, watching

PLACES = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0), ("loss", 2)]
RANKS, MICRO_BATCHES = 3, 4


class Bug(Exception):
    """Raised by a rank on purpose."""


@dataclass
class Plan:
    """What ranks do."""

    bug: tuple[int, str, int, int] | None = None
    """Rank, phase, micro-batch and step of an error."""
    steps: int = 100_000
    after_bug: str = "ends"
    """The behaviour of the rank after it raised: "ends", "lingers", or "goes on" with the next step."""
    is_in_block: bool = True
    """Whether steps are in ``with`` blocks."""
    hosts_differ: bool = False
    """True if every rank pretends to be on a separate host."""
    patience: float = 30.0
    slow: dict[int, float] | None = None
    """Seconds that ranks sleep at the end of a step."""
    hanging_rank: int | None = None
    """A rank that never gets beyond the forward of micro-batch 2 in step 3."""
    timeout_s: float = 300.0
    """Timeout of the group, which is far too long for the test."""


def train(rank: int, address: str, results: Any, **options: Any) -> None:
    """Run the planned steps; report "step" for each, and "done", "raised", "told" or "other" at the end."""
    plan = Plan(**options)
    torch.set_num_threads(1)
    watchdog.GRACE_S = 60.0  # a busy machine takes longer than a pipeline would wait
    if plan.hosts_differ:
        _ranks.this_host = lambda: f"host {rank}"
    timeout = timedelta(seconds=plan.timeout_s)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=timeout)
    watch = watching(patience=plan.patience)
    for step in range(plan.steps):
        try:
            if plan.is_in_block:
                with watch:
                    one_step(watch, rank, step, plan)
            else:
                try:
                    watch.begin()
                    one_step(watch, rank, step, plan)
                    watch.end()
                except RankError:  # known when the rank noted its position
                    raise
                except RuntimeError as error:  # an error of messages, not a planted bug
                    instead = watch.fail(error)
                    assert instead is not None
                    raise instead from error
        except RankError as error:
            results.send(("told", (error.rank, error.phase, error.stage, error.micro_batch, str(error))))
            break
        except Bug as error:
            results.send(("raised", str(error)))
            if not plan.is_in_block:
                sys.excepthook(*sys.exc_info())  # as when an exception ends the interpreter
                break
            if plan.after_bug == "lingers":
                time.sleep(1000)
            if plan.after_bug == "ends":
                break
        except BaseException as error:
            results.send(("other", repr(error)))
            break
        else:
            if step < 3:
                results.send(("step", step))
    else:
        results.send(("done", plan.steps))


def one_step(watch: FailureDetector, rank: int, step: int, plan: Plan) -> None:
    """Run the forwards and backwards of all micro-batches."""

    def work(phase: str, micro_batch: int) -> None:
        watch.at(phase, rank, micro_batch)
        if plan.bug == (rank, phase, micro_batch, step):
            raise Bug("the answer is not 42")
        if (plan.hanging_rank, "forward", 2, 3) == (rank, phase, micro_batch, step):
            time.sleep(1000)

    for micro_batch in range(MICRO_BATCHES):
        if rank > 0:
            dist.recv(torch.zeros(3), rank - 1, tag=micro_batch)
        work("forward", micro_batch)
        if rank < RANKS - 1:
            dist.send(torch.zeros(3), rank + 1, tag=micro_batch)
        else:
            work("loss", micro_batch)
    for micro_batch in range(MICRO_BATCHES):
        if rank < RANKS - 1:
            dist.recv(torch.zeros(3), rank + 1, tag=micro_batch)
        work("backward", micro_batch)
        if rank > 0:
            dist.send(torch.zeros(3), rank - 1, tag=micro_batch)
    if plan.slow:
        time.sleep(plan.slow.get(rank, 0.0))


def is_told_of_the_bug(told, rank, phase):
    """Check the report of a rank that was told of another rank's bug."""
    assert told[:4] == (rank, phase, rank, 2)
    assert told[4].startswith(f"rank {rank} failed in the {phase} of micro-batch 2 in stage {rank}: ")
    assert "Bug: the answer is not 42" in told[4]
    assert "in work" in told[4], "the traceback is not there"


@pytest.mark.thinned(usual=2, deep=4)
@pytest.mark.parametrize("attempt", range(10))
def test_when_a_rank_is_killed_at_any_moment_the_others_end_and_name_it(attempt):
    random.seed(attempt)
    victim = attempt % RANKS
    with ranks(train, RANKS) as started:
        started.wait_for("step", RANKS)
        time.sleep(random.uniform(0, 0.3))
        started.signal(victim, signal.SIGKILL)
        ends = started.ends(RANKS - 1)
    for _, phase, stage, _, message in are_told(ends, victim):
        assert message.startswith(f"the process of rank {victim}, last seen ")
        assert stage in (None, victim)
        assert phase in (None, "forward", "loss", "backward")


@pytest.mark.thinned(usual=4, deep=8)
@pytest.mark.parametrize(("phase", "rank"), PLACES)
@pytest.mark.parametrize("after", ["ends", "lingers"])
def test_when_a_rank_raises_the_others_end_with_its_error(phase, rank, after):
    with ranks(train, RANKS, bug=(rank, phase, 2, 3), after_bug=after) as started:
        ends = started.ends(RANKS)
    assert ends.pop(rank) == ("raised", "the answer is not 42")
    for told in are_told(ends, rank):
        is_told_of_the_bug(told, rank, phase)


@pytest.mark.parametrize("rank", range(RANKS))
def test_an_error_that_ends_a_process_is_told_the_others_without_a_block(rank):
    with ranks(train, RANKS, bug=(rank, "backward", 2, 3), is_in_block=False) as started:
        ends = started.ends(RANKS)
    assert ends.pop(rank) == ("raised", "the answer is not 42")
    for told in are_told(ends, rank):
        is_told_of_the_bug(told, rank, "backward")


def test_a_rank_that_has_raised_cannot_make_further_steps():
    with ranks(train, RANKS, bug=(1, "forward", 2, 3), after_bug="goes on") as started:
        reports = started.wait_for("told", RANKS)
    assert {told[0] for _, told in reports.values()} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_ranks_on_other_hosts_see_that_a_connection_is_broken_and_find_out_whose(victim):
    with ranks(train, RANKS, hosts_differ=True) as started:
        started.wait_for("step", RANKS)
        started.signal(victim, signal.SIGKILL)
        ends = started.ends(RANKS - 1)
    for told in are_told(ends, victim):
        assert f"s of rank {victim}, last seen " in told[4]


@pytest.mark.slow
def test_when_the_host_of_the_store_is_lost_the_others_say_so():
    with ranks(train, RANKS, hosts_differ=True) as started:
        started.wait_for("step", RANKS)
        started.signal(0, signal.SIGKILL)
        ends = started.ends(RANKS - 1)
    assert set(ends) == {1, 2}
    for what, told in ends.values():
        assert what == "told"
        assert "the store of the process group cannot be reached any more" in told[4]


@pytest.mark.slow
def test_a_rank_on_another_host_that_is_silent_for_longer_than_the_patience_has_failed():
    with ranks(train, RANKS, hosts_differ=True, patience=5.0) as started:
        started.wait_for("step", RANKS)
        started.signal(1, signal.SIGSTOP)
        ends = started.ends(RANKS - 1)
    for told in are_told(ends, 1):
        assert told[4].startswith("nothing has been heard for ")


@pytest.mark.slow
def test_when_a_rank_hangs_until_the_timeout_of_the_group_the_others_say_where():
    with ranks(train, RANKS, hanging_rank=1, timeout_s=5.0) as started:
        ends = started.ends(RANKS - 1)
    assert sorted(what for what, _ in ends.values()) == ["other", "told"], ends  # the first rank raises its own error
    (told,) = [value for what, value in ends.values() if what == "told"]
    assert "Timed out" in told[4]
    assert "; the others: " in told[4]
    assert "rank 1, last seen in the forward of micro-batch 2 in stage 1" in told[4]


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("last", range(RANKS))
def test_ranks_that_end_their_last_step_at_different_times_do_not_fail(last):
    with ranks(train, RANKS, steps=2, slow={last: 0.7}) as started:
        ends = started.ends(RANKS)
        for process in started.processes:
            process.join(LIMIT)
        codes = [process.exitcode for process in started.processes]
    assert {what for what, _ in ends.values()} == {"done"}, ends
    assert codes == [0] * RANKS
