"""Tests of ``pymoe._runtime.parallel_for``, which calls a Python function for many numbers on workers and on the
waiting thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import signal
import threading
import time
import weakref

import pytest
from limits import LONG

from pymoe._runtime import WorkerPool, parallel_for


class Planted(Exception):
    pass


@pytest.mark.parametrize("inline_limit", [0.0, 1e-4])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_number_is_called_once(workers: int, inline_limit: float) -> None:
    with WorkerPool(workers) as pool:
        for count in (0, 1, 15):
            for _ in range(20):
                called: list[int] = []
                assert parallel_for(pool, count, called.append, inline_limit) is None
                assert sorted(called) == list(range(count))


def test_numbers_are_called_in_order() -> None:
    called: list[int] = []
    with WorkerPool(1) as pool:
        parallel_for(pool, 100, called.append, inline_limit=LONG)
    assert called == list(range(100))


def test_a_call_that_fails_touches_no_other_and_the_first_error_comes_out() -> None:
    called: list[int] = []

    def call(number: int) -> None:
        if number in (1, 3):
            raise Planted(number)
        called.append(number)

    with WorkerPool(2) as pool:
        for _ in range(20):
            with pytest.raises(Planted) as caught:
                parallel_for(pool, 5, call)
            assert caught.value.args == (1,)
            assert sorted(called) == [0, 2, 4]
            called.clear()


def test_a_stop_of_the_pool_leaves_out_what_has_not_started() -> None:
    busy, started, release = threading.Event(), threading.Event(), threading.Event()
    called: list[int] = []
    pool = WorkerPool(1)

    def block() -> bool:
        busy.set()
        return release.wait(LONG)

    def call(number: int) -> None:
        called.append(number)
        started.set()
        release.wait(LONG)

    def stop() -> None:
        started.wait(LONG)
        threading.Thread(target=let_go).start()
        pool.shutdown(drain=False)

    def let_go() -> None:
        with contextlib.suppress(RuntimeError):  # until the pool refuses calls because it was stopped
            while True:
                pool.submit(int)
                time.sleep(0.001)
        release.set()

    blocker = pool.submit(block)
    busy.wait(LONG)
    pool.submit(int)  # is cancelled by the stop, and so are the run's calls for workers
    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(concurrent.futures.CancelledError):
        parallel_for(pool, 1000, call)
    stopper.join()
    assert blocker.result(LONG)
    assert called == [0]


def test_who_waits_makes_calls() -> None:
    threads: list[int] = []
    release = threading.Event()
    with WorkerPool(1) as pool:
        blocker = pool.submit(release.wait, LONG)
        parallel_for(pool, 3, lambda _: threads.append(threading.get_ident()))
        release.set()
        blocker.result(LONG)
    assert threads == [threading.get_ident()] * 3


def test_calls_may_do_the_same() -> None:
    called: list[int] = []
    with WorkerPool(1) as pool:

        def call(_: int) -> None:
            parallel_for(pool, 4, lambda _: parallel_for(pool, 4, called.append))

        parallel_for(pool, 4, call)
    assert sorted(called) == [number for number in range(4) for _ in range(16)]


@pytest.mark.parametrize("inline_limit", [0.0, LONG])
def test_ctrl_c_in_a_call_on_the_main_thread(inline_limit: float) -> None:
    called: list[int] = []

    def call(number: int) -> None:
        if number > 0:
            called.append(number)
        else:
            press()
            time.sleep(LONG)

    release = threading.Event()
    with WorkerPool(1) as pool:
        blocker = pool.submit(release.wait, LONG)
        with pytest.raises(KeyboardInterrupt):
            parallel_for(pool, 1000, call, inline_limit)
        release.set()
        blocker.result(LONG)
    assert called == []


def press() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_ctrl_c_while_the_main_thread_waits_for_calls_that_run() -> None:
    """KeyboardInterrupt takes precedence over a call's error, and is raised after all started calls have ended."""
    ended: list[int] = []
    waits = threading.Event()

    def call(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            waits.set()
            return
        waits.wait(LONG)
        press()
        time.sleep(0.2)
        ended.append(number)
        raise Planted(number)

    with WorkerPool(1) as pool:

        def until_the_worker_gets_a_call() -> None:
            while True:
                parallel_for(pool, 2, call)

        with pytest.raises(KeyboardInterrupt):
            until_the_worker_gets_a_call()
    assert len(ended) == 1


def test_nothing_is_kept_after_the_end() -> None:
    class Function:
        def __call__(self, number: int) -> None:
            pass

    function = Function()
    with WorkerPool(2) as pool:
        parallel_for(pool, 10, function)
    alive = weakref.ref(function)
    del function
    gc.collect()
    assert alive() is None


def test_wrong_use() -> None:
    with WorkerPool(1) as pool:
        with pytest.raises(TypeError):
            parallel_for(pool, 1, 7)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="parallel_for: count must be at least 0, got -1"):
            parallel_for(pool, -1, int)
        for limit in (float("nan"), 1e12, -1.0):
            with pytest.raises(ValueError, match="parallel_for: inline_limit must be a number of seconds"):
                parallel_for(pool, 1, int, limit)
    with pytest.raises(RuntimeError, match="stopped"):
        parallel_for(pool, 1, int)
