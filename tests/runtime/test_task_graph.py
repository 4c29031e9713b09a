"""The bound task graph: Python functions as nodes, on a pool of workers."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
import time

import pytest
from limits import LONG

from pymoe._runtime import TaskGraph, WorkerPool


class Planted(Exception):
    pass


def fail(number: int) -> None:
    raise Planted(number)


@pytest.mark.parametrize("patience", [0.0, 1e-4])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_nodes_run_after_those_that_they_depend_on(workers: int, patience: float) -> None:
    graph = TaskGraph()
    ran: list[int] = []
    for layer in range(5):
        for place in range(3):
            node = graph.add(lambda number=layer * 3 + place: ran.append(number))
            for before in range((layer - 1) * 3, layer * 3):
                if layer > 0:
                    graph.add_edge(before, node)
    assert len(graph) == 15
    with WorkerPool(workers) as pool:
        for _ in range(20):
            ran.clear()
            run = graph.run(pool, patience)
            run.result()
            assert run.done()
            assert not run.cancelled()
            assert [number // 3 for number in ran] == sorted(number // 3 for number in ran)
            assert sorted(ran) == list(range(15))


def test_greater_head_starts_go_first() -> None:
    graph = TaskGraph()
    ran: list[int] = []
    for number, head_start in enumerate([0.0, 3.0, -1.0, 3.0]):
        graph.add(lambda number=number: ran.append(number), head_start=head_start)
    with WorkerPool(1) as pool:
        graph.run(pool, patience=LONG).wait()
    assert ran == [1, 3, 0, 2]


def test_failures_skip_what_depends_on_them_alone() -> None:
    graph = TaskGraph()
    ran: list[str] = []
    graph.add(lambda: ran.append("first"))
    one = graph.add(lambda: fail(1), name="one")
    graph.add_edge(one, graph.add(lambda: ran.append("never")))
    graph.add(lambda: fail(3))
    graph.add(lambda: ran.append("last"))
    with WorkerPool(2) as pool:
        run = graph.run(pool)
        run.wait()
        with pytest.raises(Planted) as caught:
            run.result()
    assert caught.value.args == (1,)
    assert [(node, type(error), error.args) for node, error in run.failures()] == [
        (1, Planted, (1,)),
        (3, Planted, (3,)),
    ]
    assert sorted(ran) == ["first", "last"]


def test_cancelling() -> None:
    graph = TaskGraph()
    release = threading.Event()
    ran: list[int] = []
    first = graph.add(lambda: release.wait(LONG))
    graph.add_edge(first, graph.add(lambda: ran.append(1)))
    with WorkerPool(1) as pool:
        run = graph.run(pool)
        with pytest.raises(RuntimeError, match="has not ended"):
            run.failures()
        run.cancel()
        release.set()
        with pytest.raises(concurrent.futures.CancelledError):
            run.result()
        assert run.cancelled()
    assert ran == []


def test_who_waits_runs_nodes() -> None:
    graph = TaskGraph()
    threads: list[int] = []
    graph.add(lambda: threads.append(threading.get_ident()))
    release = threading.Event()
    with WorkerPool(1) as pool:
        blocker = pool.submit(release.wait, LONG)
        graph.run(pool).wait()
        release.set()
        blocker.result(LONG)
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize("patience", [0.0, LONG])
def test_ctrl_c_in_a_node_on_the_main_thread(patience: float) -> None:
    graph = TaskGraph()
    ran: list[int] = []

    def press() -> None:
        if threading.current_thread() is threading.main_thread():
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(LONG)

    release = threading.Event()
    graph.add(press)
    for number in range(1000):
        graph.add(lambda number=number: ran.append(number))
    with WorkerPool(1) as pool:
        blocker = pool.submit(release.wait, LONG)
        run = graph.run(pool, patience)
        with pytest.raises(KeyboardInterrupt):
            run.wait()
        assert run.done()
        release.set()
        blocker.result(LONG)
    assert ran == []


def test_wrong_use() -> None:
    graph = TaskGraph()
    with pytest.raises(TypeError):
        graph.add(7)  # type: ignore[arg-type]
    for number in (float("nan"), 1e12):
        with pytest.raises(ValueError, match="head_start must be a number of seconds"):
            graph.add(int, head_start=number)
    graph.add(int, name="a")
    graph.add(int, name="b")
    with pytest.raises(IndexError, match="there is no node 2"):
        graph.add_edge(0, 2)
    with WorkerPool(1) as pool:
        with pytest.raises(ValueError, match="patience must be a number of seconds"):
            graph.run(pool, patience=float("nan"))
        graph.add_edge(0, 1)
        graph.add_edge(1, 0)
        with pytest.raises(ValueError, match=r"cycle: node \d \(.\) -> node"):
            graph.run(pool)
    other = TaskGraph()
    other.add(int)
    with pytest.raises(RuntimeError, match="stopped"):
        other.run(pool)
