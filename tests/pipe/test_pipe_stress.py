"""A thousand steps whose layers take random times and raise at random: every step ends correctly and leaves nothing."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flaky import CHUNKS, STAGES, Faults, Planted, batch, expected_grads, grads_of, model, places, run_step
from limits import LONG, rounds

from pymoe.pipe import Pipe
from pymoe.pipe.execution import plan
from pymoe.pipe.schedules import names

SCHEDULES = names()
CHECKPOINTED = {"always": range(CHUNKS), "except_last": range(CHUNKS - 1), "never": range(0)}
SLOW = 4e-4  # most seconds that a call takes
STEPS = rounds(1000, 5000)


@pytest.fixture(autouse=True)
def threads_for_short_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set limits so that some actions are worth a thread, and some are not."""
    monkeypatch.setattr(plan, "INLINE_LIMIT_S", SLOW / 2)
    monkeypatch.setattr(plan, "LONG_ACTIONS_S", SLOW)


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def tensors_alive() -> list[torch.Tensor]:
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]


class Stress:
    """Runs steps under all schedules and kinds of checkpointing, each of which checks itself."""

    def __init__(self, rate: float) -> None:
        self.faults = Faults(7, rate=rate)
        self.pipe = Pipe(model(self.faults), CHUNKS)
        self.expected = expected_grads()
        self.outcomes: Counter[str] = Counter()

    def step(self, number: int) -> None:
        """Run a step, which must raise the planted error or have the plain model's gradients."""
        schedule = SCHEDULES[number % len(SCHEDULES)]
        self.pipe.checkpoint = list(CHECKPOINTED)[number // len(SCHEDULES) % 3]
        self.faults.longest = 0.0 if number // 50 % 3 == 0 else SLOW
        self.faults.step = number
        planted = [place for place in places(CHECKPOINTED[self.pipe.checkpoint]) if self.faults.planted(*place)]
        raised, notes = (), []
        try:
            run_step(self.pipe, self.faults, schedule=schedule)
        except Planted as error:
            raised, notes = error.args, error.__notes__
        self.judge(planted, raised)
        if raised:
            name, stage, micro_batch = raised
            direction = "forward" if name in ("forward", "loss") else "backward"
            assert notes[0].startswith(f"in the {direction} pass")
            assert notes[0].endswith(f"of stage {stage}, micro-batch {micro_batch}")
            assert all("failed, too: " in note for note in notes[1:])

    def judge(self, planted: list[tuple[str, int, int]], raised: tuple[str, int, int]) -> None:
        """Check the gradients after a step, and count its outcome."""
        grads = grads_of(self.pipe)
        if planted:
            assert raised in planted
            assert grads == [None] * len(grads), "what fails adds no gradient"
        else:
            assert raised == ()
            for found, wanted in zip(grads, self.expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)
        self.outcomes[raised[0] if raised else "right"] += 1
        assert self.faults.inside == 0, "a step has ended before all that it began"

    def let_go(self) -> None:
        """Check that no tensor of a step is left, without a run of the garbage collector."""
        assert self.faults.seen
        alive = [one() for one in self.faults.seen]
        self.faults.seen.clear()
        assert alive == [None] * len(alive)


def in_thread(work: Callable[[], object]) -> None:
    """Run ``work`` on its own thread, which must not hang."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive(), "a step hangs"
    if errors:
        raise errors[0]


def wait_for_threads(most: int) -> None:
    """Wait until there are no more than ``most`` threads, or until a timeout."""
    end = time.monotonic() + LONG
    while threads_of_this_process() > most and time.monotonic() < end:
        time.sleep(0.01)


def thousand_steps() -> int:
    """Run a thousand steps; return the number of threads while the pipe exists."""
    others = {id(one): weakref.ref(one) for one in tensors_alive()}  # these may be freed meanwhile
    stress = Stress(0.01)
    used = []
    for number in range(STEPS):
        stress.step(number)
        stress.let_go()
        if number in (STEPS // 5, STEPS - 1):
            gc.collect()
            if used:
                wait_for_threads(used[0][1])  # threads that other tests left may also have ended
            own = sum(id(one) not in others or others[id(one)]() is not one for one in tensors_alive())
            used.append((own, threads_of_this_process(), resident_bytes()))
    assert stress.outcomes.keys() == {"right", "forward", "recomputation", "loss", "backward"}, stress.outcomes
    assert stress.outcomes["right"] > STEPS / 3
    (tensors, threads, memory), (tensors_now, threads_now, memory_now) = used
    assert tensors_now == tensors
    assert threads_now <= threads
    assert memory_now - memory <= 8 << 20
    return threads_now


@pytest.mark.slow
def test_steps_that_fail_at_random_end_rightly_and_leave_nothing() -> None:
    """1 % of the calls in forward, recomputation, loss and backward raise."""
    threads = 0

    def work() -> None:
        nonlocal threads
        threads = thousand_steps()

    gc.disable()  # a step's objects must be freed without the collector
    try:
        in_thread(work)
    finally:
        gc.enable()
    gc.collect()
    wait_for_threads(threads - (STAGES - 1))
    assert threads_of_this_process() <= threads - (STAGES - 1), "the pipe has gone, its threads have not"


@pytest.mark.parametrize("rate", [0.0, 0.02])
def test_passes_from_outside_that_fail_at_random_end_rightly(rate: float) -> None:
    """Run ``pipe(x)``, and the backward of a loss outside of the pipe."""
    stress = Stress(rate)
    pipe, faults = stress.pipe, stress.faults

    def work() -> None:
        for number in range(100):
            pipe.checkpoint = list(CHECKPOINTED)[number % 3]
            faults.longest = SLOW
            faults.step = number
            where = places(CHECKPOINTED[pipe.checkpoint])
            raised = ()
            pipe.zero_grad()
            try:
                pipe(batch()).square().mean().backward()
            except Planted as error:
                raised = error.args
            stress.judge([place for place in where if place[0] != "loss" and faults.planted(*place)], raised)
            assert faults.inside == 0
            stress.let_go()

    in_thread(work)
    assert stress.outcomes.keys() == ({"right", "forward", "recomputation", "backward"} if rate else {"right"})
