"""Runs a plan on threads: each worker gets its actions in order, each when it can start."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from any_schedule import examples, schedules
from hypothesis import given
from hypothesis import strategies as st
from limits import LONG
from processes import in_child, run_python

from pymoe.pipe.execution import plan
from pymoe.pipe.execution.plan import ActionPlan, PlanRun
from pymoe.pipe.schedules import build
from pymoe.pipe.schedules.schedule import Action, Kind, Schedule


def run_of(schedule: Schedule, kinds: frozenset[Kind] = frozenset(Kind)) -> PlanRun:
    nothing: Any = SimpleNamespace(perform=None)
    return PlanRun(ActionPlan(schedule, kinds), nothing)


def in_workers(run: PlanRun, schedule: Schedule, kinds: frozenset[Kind] = frozenset(Kind)) -> list[list[Action]]:
    """Run every worker to its end on a separate thread; check that no action starts before its dependencies have
    ended.
    """
    ran: list[list[Action]] = [[] for _ in schedule.orders]
    ended: set[Action] = set(run._done)
    wrong: list[Action] = []

    def worker_thread(worker: int) -> None:
        for action in run.actions_of(worker):
            needed = [one for one in schedule.dependencies(action) if one.kind in kinds]
            if not ended.issuperset(needed):
                wrong.append(action)
            time.sleep(0)  # others' turn
            ran[worker].append(action)
            ended.add(action)

    threads = [threading.Thread(target=worker_thread, args=(each,), daemon=True) for each in range(schedule.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert not wrong
    return ran


def blocked() -> PlanRun:
    """Return a run of two workers, in which worker 1 begins with an action that waits for worker 0."""
    run = run_of(build("gpipe", 2, 1))
    run.begin_threads()
    return run


def wait_inside(run: PlanRun, worker: int, found: list[object]) -> threading.Thread:
    """Start a thread that waits for a worker's next action, and puts it into ``found``."""
    thread = threading.Thread(target=lambda: found.append(next(run.actions_of(worker), None)), daemon=True)
    thread.start()
    end = time.monotonic() + LONG
    while not waits(thread):
        assert found == []
        assert time.monotonic() < end
        time.sleep(0.001)
    return thread


def waits(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is plan._pass.__code__


@given(schedule=schedules(), kinds=st.sampled_from([frozenset(Kind), frozenset({Kind.FORWARD})]), at=st.integers(0, 20))
@examples(60)
def test_every_run_of_a_plan_keeps_to_orders_and_dependencies(
    schedule: Schedule, kinds: frozenset[Kind], at: int
) -> None:
    """The order also holds if the first actions were performed inline."""
    run = run_of(schedule, kinds)
    done = run._done = frozenset(ActionPlan(schedule, kinds).in_order[:at])
    run.begin_threads()
    wanted = [[action for action in order if action.kind in kinds and action not in done] for order in schedule.orders]
    assert in_workers(run, schedule, kinds) == wanted


def test_an_end_wakes_who_waits_and_nobody_else_starts_before() -> None:
    run = blocked()
    found: list[object] = []
    thread = wait_inside(run, 1, found)  # the thread needs the GIL
    first = run.actions_of(0)
    action = next(first)
    time.sleep(0.02)
    assert found == []
    ender = threading.Thread(target=next, args=(first, None), daemon=True)  # ends the action, then waits
    ender.start()
    thread.join(LONG)
    assert (action, found) == (Action(0, 0, Kind.FORWARD), [Action(1, 0, Kind.FORWARD)])


def test_an_action_that_can_start_keeps_the_gil() -> None:
    """The action starts immediately even if it depends on another worker's action that has ended."""
    schedule = build("gpipe", 2, 5_000)
    turns = 0
    stop = threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0)

    thread = threading.Thread(target=take_turns, daemon=True)
    run = run_of(schedule)
    run.begin_threads()
    first = run.actions_of(0)
    while (action := next(first)) != Action(0, 4_999, Kind.FORWARD):
        pass
    threading.Thread(target=next, args=(first, None), daemon=True).start()  # waits for the first backward pass
    second = run.actions_of(1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(LONG)  # from now on, threads get the GIL only when it is released
    try:
        thread.start()
        while turns == 0:
            time.sleep(0.01)
        before = turns
        for action in second:
            if action == Action(1, 4_999, Kind.FORWARD):
                break
        assert turns == before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join(LONG)


def test_stopping_wakes_who_waits_and_starts_nothing() -> None:
    run = run_of(build("1f1b", 3, 4))
    stop = run.begin_threads()
    first = run.actions_of(0)
    next(first)
    found: list[object] = []
    threads = [wait_inside(run, worker, found) for worker in (1, 2)]
    stop()
    stop()
    for thread in threads:
        thread.join(LONG)
    assert found == [None, None]
    assert list(first) == list(run.actions_of(0)) == []


def test_no_ctrl_c_comes_before_everybody_is_told_to_stop() -> None:
    run = run_of(build("1f1b", 3, 4))
    stop = run.begin_threads()
    called: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: called.append(event))
    try:
        stop()
    finally:
        sys.setprofile(before)
    assert "call" not in called, "Python has run"
    assert all(not gate.empty() for gate in run._gates.values())


def test_a_failure_stops_the_run() -> None:
    run = blocked()
    found: list[object] = []
    thread = wait_inside(run, 1, found)
    run.fail(ValueError("planted"), None)
    thread.join(LONG)
    assert found == [None]
    with pytest.raises(ValueError, match="planted"):
        run.outcome()


def test_ctrl_c_ends_a_wait_of_the_main_thread() -> None:
    run = blocked()
    main = threading.main_thread().ident
    assert main is not None
    presser = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        next(run.actions_of(1))
    presser.join(LONG)


def test_an_interrupt_that_no_system_call_sees_ends_a_wait_of_the_main_thread() -> None:
    """Such an interrupt comes just before the wait, or from another Python thread."""
    run = blocked()
    ended: list[bool] = []

    def end_the_wait() -> None:
        ended.append(True)
        next(run.actions_of(0))
        run.fail(ValueError("nothing has ended the wait"), None)

    guard = threading.Timer(LONG, end_the_wait)
    guard.start()
    presser = threading.Timer(0.1, _thread.interrupt_main)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        next(run.actions_of(1))
    guard.cancel()
    presser.join(LONG)
    assert not ended


def test_a_signal_handler_that_does_not_raise_does_not_end_a_wait() -> None:
    run = blocked()
    main = threading.main_thread().ident
    assert main is not None
    handled = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handled.set())

    def go_on() -> None:
        signal.pthread_kill(main, signal.SIGUSR1)
        handled.wait(LONG)
        list(run.actions_of(0))

    thread = threading.Thread(target=go_on)
    try:
        thread.start()
        assert [str(action) for action in run.actions_of(1)] == ["1F0", "1B0"]
        assert handled.is_set()
    finally:
        thread.join(LONG)
        signal.signal(signal.SIGUSR1, before)


def test_a_run_is_of_use_in_its_own_process_alone() -> None:
    schedule = build("gpipe", 2, 2)
    run = run_of(schedule)
    stop = run.begin_threads()
    begun = run.actions_of(0)
    next(begun)
    found: list[object] = []
    thread = wait_inside(run, 1, found)

    def check() -> None:
        for actions in (begun, run.actions_of(0), run.actions_of(1)):
            with pytest.raises(RuntimeError, match="its workers exist only in the parent process"):
                next(actions)
        new = run_of(schedule)
        new.begin_threads()
        in_workers(new, schedule)

    assert in_child(check) == 0
    stop()
    thread.join(LONG)


def test_the_interpreter_ends_while_threads_wait_in_workers() -> None:
    result = run_python("""
        import threading, time, types
        from pymoe.pipe.execution.plan import ActionPlan, PlanRun
        from pymoe.pipe.schedules import build
        plan = ActionPlan(build("gpipe", 2, 1))
        runs = [PlanRun(plan, types.SimpleNamespace(perform=None)) for _ in range(4)]
        stops = [run.begin_threads() for run in runs]
        for run in runs:
            threading.Thread(target=list, args=(run.actions_of(1),), daemon=True).start()
        time.sleep(0.1)
        stops[0]()  # this one may come back at any moment of the end
        print("ended")
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "ended\n", "")
