"""The bound run of a pipeline: a plan of nodes, each run by the thread of its worker."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest
from limits import LONG
from processes import in_child, run_python

from pymoe._runtime import PipelinePlan, PipelineRun


def in_workers(run: PipelineRun, workers: int, work: Callable[[int, int], object]) -> None:
    """Run every worker of a run to its end on a thread of its own."""

    def worker_thread(worker: int) -> None:
        node = run.next(worker)
        while node is not None:
            work(worker, node)
            node = run.next(worker, node)

    threads = [threading.Thread(target=worker_thread, args=(worker,), daemon=True) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()


def chain(workers: int, steps: int) -> PipelinePlan:
    """Nodes of which each waits for the one before, in the workers by turns."""
    plan = PipelinePlan(workers)
    for number in range(workers * steps):
        node = plan.add(number % workers)
        if node > 0:
            plan.add_edge(node - 1, node)
    return plan


def blocked() -> PipelineRun:
    """A run whose worker 1 waits for worker 0."""
    return chain(2, 1).run()


def wait_inside(run: PipelineRun, worker: int, found: list[object]) -> threading.Thread:
    """A thread that is inside of ``run.next(worker)`` and puts its answer into ``found``."""

    def ask() -> None:
        found.append(run.next(worker))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        with pytest.raises(RuntimeError) as caught:
            run.next(worker, finished=0)
        if "another thread waits for worker" in str(caught.value):
            return thread
    raise AssertionError("nobody waits in the worker")


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_run_of_a_plan_keeps_to_its_edges(workers: int) -> None:
    plan = chain(workers, 20)
    for _ in range(5):
        run = plan.run()
        ran: list[int] = []
        in_workers(run, workers, lambda worker, node, ran=ran: ran.append(node))
        assert ran == list(range(workers * 20))
        assert run.done()
        assert not run.cancelled()


def test_runs_of_one_plan_at_once() -> None:
    plan = chain(2, 50)
    ran: list[list[int]] = [[], [], []]
    threads = [
        threading.Thread(target=lambda seen=seen: in_workers(plan.run(), 2, lambda worker, node: seen.append(node)))
        for seen in ran
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert ran == [list(range(100))] * 3


def test_waiting_lets_others_run_python_and_an_answer_wakes() -> None:
    run = blocked()
    found: list[object] = []
    thread = wait_inside(run, 1, found)  # which needs the GIL
    assert run.next(0) == 0
    assert found == []
    assert run.next(0, 0) is None
    thread.join(LONG)
    assert found == [1]


def test_an_answer_that_is_there_keeps_the_gil() -> None:
    plan = PipelinePlan(1)
    for _ in range(100_000):
        plan.add(0)
    turns = 0
    stop = threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0)

    thread = threading.Thread(target=take_turns, daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(LONG)  # from now on the other thread gets the GIL only from who lets go of it
    try:
        thread.start()
        while turns == 0:
            time.sleep(0.01)
        run = plan.run()
        node = run.next(0)
        before = turns
        while node is not None:
            node = run.next(0, node)
        assert turns == before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join(LONG)


def test_cancelling_wakes_who_waits() -> None:
    run = blocked()
    found: list[object] = []
    thread = wait_inside(run, 1, found)
    assert not run.cancelled()
    run.cancel()
    thread.join(LONG)
    assert found == [None]
    assert run.cancelled()
    assert run.next(0) is None
    assert not run.done()


def test_ctrl_c_ends_a_wait_of_the_main_thread_and_not_the_run() -> None:
    run = blocked()
    main = threading.main_thread().ident
    assert main is not None
    presser = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        run.next(1)
    presser.join(LONG)
    assert not run.cancelled()
    assert run.next(0) == 0
    assert run.next(0, 0) is None
    assert run.next(1) == 1  # the worker may be asked again
    assert run.next(1, 1) is None
    assert run.done()


def test_a_signal_handler_that_does_not_raise_does_not_end_a_wait() -> None:
    run = blocked()
    main = threading.main_thread().ident
    assert main is not None
    handled = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handled.set())

    def go_on() -> None:
        signal.pthread_kill(main, signal.SIGUSR1)
        handled.wait(LONG)
        node = run.next(0)
        run.next(0, node)

    thread = threading.Thread(target=go_on)
    try:
        thread.start()
        assert run.next(1) == 1
        assert handled.is_set()
    finally:
        thread.join(LONG)
        signal.signal(signal.SIGUSR1, before)


def test_a_run_is_of_use_in_its_own_process_alone() -> None:
    plan = chain(2, 1)
    run = plan.run()
    found: list[object] = []
    thread = wait_inside(run, 1, found)

    def check() -> None:
        nonlocal run
        for use in (lambda: run.next(0), run.cancel, run.cancelled, run.done):
            with pytest.raises(RuntimeError, match="created before a fork"):
                use()
        run = plan.run()  # the old one goes
        gc.collect()
        assert [run.next(0), run.next(0, 0), run.next(1), run.next(1, 1)] == [0, None, 1, None]

    assert in_child(check) == 0
    run.cancel()
    thread.join(LONG)


def test_the_interpreter_ends_while_threads_wait_in_workers() -> None:
    result = run_python("""
        import threading, time
        from pymoe._runtime import PipelinePlan
        plan = PipelinePlan(2)
        plan.add_edge(plan.add(0), plan.add(1))
        runs = [plan.run() for _ in range(4)]
        for run in runs:
            threading.Thread(target=run.next, args=(1,), daemon=True).start()
        time.sleep(0.1)
        runs[0].cancel()  # this one may come back at any moment of the end
        print("ended")
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "ended\n", "")


def test_plans_and_runs_hold_nothing_alive_and_a_run_outlives_its_plan() -> None:
    class Kept(PipelinePlan):  # one that can be in a cycle
        run_of: PipelineRun

    plan = Kept(1)
    plan.add(0)
    run = plan.run_of = plan.run()
    gone = weakref.ref(plan)
    plan.itself = plan  # type: ignore[attr-defined]
    del plan
    gc.collect()
    assert gone() is None
    assert run.next(0) == 0
    assert run.next(0, 0) is None


def test_a_cycle_is_refused_by_its_nodes() -> None:
    plan = PipelinePlan(2)
    first, second = plan.add(0), plan.add(0)
    other = plan.add(1)
    plan.add_edge(second, other)
    plan.run()
    plan.add_edge(other, first)  # against the order of worker 0
    with pytest.raises(ValueError, match=r"cycle: node 0 \(worker 0\) -> node 1 .* -> node 2 \(worker 1\) -> node 0"):
        plan.run()


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="workers must be a positive integer, got 0"):
        PipelinePlan(0)
    plan = PipelinePlan(2)
    plan.add(0)
    with pytest.raises(IndexError, match="expected a worker from 0 to 1, got 2"):
        plan.add(2)
    with pytest.raises(IndexError, match="expected a worker from 0 to 1, got -1"):
        plan.add(-1)
    with pytest.raises(IndexError, match="expected one of 1 nodes, got node 1"):
        plan.add_edge(0, 1)
    run = plan.run()
    with pytest.raises(IndexError, match="expected a worker from 0 to 1, got 2"):
        run.next(2)
    for number in (-1, 1):
        with pytest.raises(IndexError, match=f"got node {number}"):
            run.next(0, number)
    with pytest.raises(RuntimeError, match="worker 0 runs nothing, but is reported to have finished node 0"):
        run.next(0, 0)
    assert run.next(0) == 0
    with pytest.raises(RuntimeError, match="worker 0 runs node 0, but is reported to have finished nothing"):
        run.next(0)
    with pytest.raises(TypeError):
        PipelineRun()
