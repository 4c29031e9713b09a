"""A pipe's threads under Ctrl-C, forks, and the end of the pipe or the interpreter."""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from flaky import CHUNKS, STAGES, Faults, Flaky, batch, expected_grads, grads_of, loss_of, model, run_step
from limits import LONG
from processes import in_child, run_python
from torch import nn

from pymoe.pipe import Pipe
from pymoe.pipe.execution import plan

SLOW = 6e-4  # most seconds that a call takes


@pytest.fixture(autouse=True)
def own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all stages but the first on their own threads, however short their actions are."""
    monkeypatch.setattr(plan, "ALWAYS_THREADS", True)


@pytest.fixture(autouse=True)
def no_callbacks_of_the_garbage_collector() -> Iterator[None]:
    """Remove callbacks of the garbage collector (Hypothesis has one): an interrupt in one of them is printed and
    lost.
    """
    before = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = before


def assert_works(pipe: Pipe, faults: Faults) -> None:
    run_step(pipe, faults)
    for found, wanted in zip(grads_of(pipe), expected_grads(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def in_time(work: Callable[[], object]) -> None:
    """Run ``work`` on its own thread, which must not hang."""
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(LONG)
    assert done == [None]


def threads_of_this_process() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def press_ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


# --- Ctrl-C ---


# An interrupt in a destructor is lost as well.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_time_ends_a_step_as_a_whole() -> None:
    """Running actions are waited for, and either all gradients are added or none."""
    faults = Faults(3, longest=SLOW)
    pipe = Pipe(model(faults), CHUNKS)
    interrupted = 0
    for number in range(150):
        pipe.zero_grad()  # before Ctrl-C can come, which would leave some old gradients
        presser = threading.Timer(random.random() * 0.02, press_ctrl_c)
        try:
            presser.start()
            pipe.step(batch(), loss_fn=loss_of(faults), schedule=("1f1b", "zero-bubble")[number % 2])
            presser.join()
            time.sleep(0.001)  # wait for a late Ctrl-C
        except KeyboardInterrupt:
            interrupted += 1
            assert faults.inside == 0
        presser.join()
        assert len({grad is None for grad in grads_of(pipe)}) == 1
    assert interrupted > 100
    assert_works(pipe, faults)


def test_ctrl_c_in_the_one_stage_that_waits_for_it() -> None:
    faults = Faults(3)
    pressed = threading.Event()

    class Waiting(nn.Module):
        def forward(self, x):
            if not pressed.is_set():
                pressed.set()
                press_ctrl_c()
                time.sleep(0.1)
            return x

    pipe = Pipe(nn.Sequential(model(faults), Waiting()), CHUNKS)
    with pytest.raises(KeyboardInterrupt):
        run_step(pipe, faults)
    assert_works(pipe, faults)


@pytest.mark.parametrize("where", ["perform_actions", "fail"])
def test_ctrl_c_between_two_lines_of_the_pipe_keeps_no_thread_waiting(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C came before the caller's part had begun, or while an error was recorded: the other threads, and every
    later step, waited for that part for ever.
    """
    faults = Faults(3, rate=1.0 if where == "fail" else 0.0)
    pipe = Pipe(model(faults), CHUNKS)
    original = getattr(plan.PlanRun, where)
    times = 0

    def interrupted_here(*args: object) -> None:
        nonlocal times
        if threading.current_thread() is threading.main_thread():
            times += 1
            if times == 1:
                raise KeyboardInterrupt
        original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(plan.PlanRun, where, interrupted_here)
        patched.setattr(plan.PlanRun, "run_inline", lambda *args, **options: False)
        with pytest.raises(KeyboardInterrupt):
            run_step(pipe, faults)
    faults.rate = 0.0
    in_time(lambda: assert_works(pipe, faults))


# --- forks ---


def test_the_child_of_a_fork_has_threads_of_its_own() -> None:
    faults = Faults(3)
    pipe = Pipe(model(faults), CHUNKS)
    assert_works(pipe, faults)
    assert in_child(lambda: assert_works(pipe, faults)) == 0
    assert_works(pipe, faults)


def test_a_fork_in_the_middle_of_a_step() -> None:
    """The child gets new weights, because in the child, torch may hold locks of the old weights for ever, with or
    without a pipe.
    """
    faults = Faults(3, longest=SLOW)
    pipe = Pipe(model(faults), CHUNKS)
    stop = threading.Event()

    def step_on_and_on() -> None:
        while not stop.is_set():
            run_step(pipe, faults)

    def check() -> None:
        faults.forget_threads()
        faults.longest = 0.0
        new = model(faults)
        for old, layer in zip((each for each in pipe.modules() if isinstance(each, Flaky)), new, strict=True):
            old.linear = layer.linear
        assert_works(pipe, faults)

    thread = threading.Thread(target=step_on_and_on)
    thread.start()
    try:
        wait_for(lambda: faults.inside > 0)
        for _ in range(5):
            assert in_child(check) == 0
            time.sleep(random.random() * 0.01)
    finally:
        stop.set()
        thread.join(LONG)
    assert_works(pipe, faults)


# --- ends ---


@pytest.mark.parametrize("in_cycle", [False, True])
def test_the_threads_of_a_pipe_end_with_it(in_cycle: bool) -> None:
    faults = Faults(3)
    assert_works(Pipe(model(faults), CHUNKS), faults)  # torch's own threads have started
    before = threads_of_this_process()  # some may be about to end
    pipe = Pipe(model(faults), CHUNKS)
    assert threads_of_this_process() <= before, "threads start with the first run"
    assert_works(pipe, faults)
    copied = copy.deepcopy(pipe)
    assert_works(copied, faults)
    own = threads_of_this_process() - before
    assert len(own) == 2 * (STAGES - 1)
    if in_cycle:
        pipe.itself = [pipe]
    del pipe, copied
    gc.collect()
    wait_for(lambda: not threads_of_this_process() & own)


PIPE_AT_EXIT = """
    import sys, threading, time
    sys.path.insert(0, {folder!r})
    from flaky import CHUNKS, Faults, model, run_step
    from pymoe.pipe import Pipe
    from pymoe.pipe.execution import plan
    plan.ALWAYS_THREADS = True
    faults = Faults(3, longest=1e-3)
    pipe = Pipe(model(faults), CHUNKS)
    run_step(pipe, faults)
    def on_and_on():
        while True:
            run_step(pipe, faults)
    if {busy}:
        threading.Thread(target=on_and_on, daemon=True).start()
        time.sleep(0.05)
    print("ended", flush=True)  # a thread that aborts may do so before the interpreter flushes
"""


def run_to_the_end(busy: bool) -> subprocess.CompletedProcess[str]:
    return run_python(PIPE_AT_EXIT.format(folder=str(Path(__file__).parent), busy=busy))


def test_the_interpreter_ends_with_a_pipe_alive() -> None:
    result = run_to_the_end(busy=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "ended\n", "")


def test_the_interpreter_ends_while_a_daemon_thread_is_in_a_step() -> None:
    """Before 3.14, CPython unwinds such a thread through torch's C++, which sometimes aborts, even without a pipe."""
    result = run_to_the_end(busy=True)
    assert result.stdout == "ended\n"
    assert result.returncode in (0, -signal.SIGABRT), result.stderr


# --- pipes in pipes ---


class Calls(nn.Module):
    """Runs a pipe within a pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Pipe] = []  # no submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called[0](x)


@pytest.mark.parametrize("around", [1, 2])
def test_a_pipe_that_would_wait_for_itself_is_told(around: int) -> None:
    """A stage calls its own pipe, directly or through another pipe."""
    faults = Faults(3)
    pipes = [Pipe(nn.Sequential(model(faults), Calls(), nn.Identity()), CHUNKS) for _ in range(around)]
    for number, pipe in enumerate(pipes):
        pipe[1][0].called.append(pipes[(number + 1) % around])

    def check() -> None:
        with pytest.raises(RuntimeError, match="a stage of a pipe cannot run the pipe itself"):
            run_step(pipes[0], faults)

    in_time(check)


def test_a_pipe_in_a_pipe() -> None:
    faults = Faults(3)
    inner = Pipe(model(faults), 2)
    outer = Pipe(nn.Sequential(nn.Identity(), Calls()), CHUNKS)
    outer[1][0].called.append(inner)
    losses = outer.step(batch(), loss_fn=loss_of(Faults(0)))
    assert losses.shape == (CHUNKS,)
    for found, wanted in zip(grads_of(inner), expected_grads(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)
