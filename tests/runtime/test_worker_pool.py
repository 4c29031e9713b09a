"""The native worker pool: outcomes, stopping, and its interplay with Python's threads and objects."""

from __future__ import annotations

import concurrent.futures
import gc
import threading
import traceback
import weakref

import pytest
from bare_runtime import LONG, Blocker, run_python

from pymoe._runtime import Future, WorkerPool

# --- outcomes ---


def test_values_and_arguments() -> None:
    with WorkerPool(2) as pool:
        assert pool.workers == 2
        assert pool.submit(pow, 3, 4).result() == 81
        assert pool.submit(lambda *args, **kwargs: (args, kwargs), 1, self=2, function=3, arg0=4).result() == (
            (1,),
            {"self": 2, "function": 3, "arg0": 4},
        )
        marker = object()
        future = pool.submit(lambda: marker)
        assert future.result() is marker
        assert future.result(0) is marker
        assert future.done()


def test_tasks_run_on_other_threads_in_order() -> None:
    seen: list[int] = []
    with WorkerPool(1) as pool:
        ids = {pool.submit(threading.get_ident).result() for _ in range(5)}
        for i in range(100):
            pool.submit(seen.append, i)
    assert len(ids) == 1
    assert threading.get_ident() not in ids
    assert seen == list(range(100))


def test_thread_local_data_outlives_a_task() -> None:
    local = threading.local()
    with WorkerPool(1) as pool:
        pool.submit(setattr, local, "value", 7).result()
        assert pool.submit(getattr, local, "value").result() == 7


@pytest.mark.parametrize(
    "error", [ValueError("planted"), KeyError("k"), SystemExit(3), KeyboardInterrupt(), OSError(2, "no")]
)
def test_exceptions_keep_identity_type_and_traceback(error: BaseException) -> None:
    def planted_failure() -> None:
        raise error

    with WorkerPool(2) as pool:
        future = pool.submit(planted_failure)
        with pytest.raises(type(error)) as caught:
            future.result()
        assert caught.value is error
        assert "planted_failure" in "".join(traceback.format_tb(caught.value.__traceback__))
        assert pool.submit(int).result() == 0  # the worker lives


def test_timeout() -> None:
    with WorkerPool(1) as pool:
        blocker = Blocker(pool)
        future = pool.submit(int)
        for timeout in (0, 0.01, -1):
            with pytest.raises(TimeoutError, match="has not ended"):
                future.result(timeout)
        assert not future.done()
        blocker.release()
        assert future.result(LONG) == 0


@pytest.mark.parametrize("workers", [0, -3])
def test_fewer_than_one_worker(workers: int) -> None:
    with pytest.raises(ValueError, match=rf"workers must be at least 1, got {workers}"):
        WorkerPool(workers)


def test_misuse_is_refused() -> None:
    with pytest.raises(TypeError):
        WorkerPool("two")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Future()
    with WorkerPool(1) as pool:
        with pytest.raises(TypeError, match="must be callable, got int"):
            pool.submit(3)
        with pytest.raises(TypeError):
            pool.submit()  # type: ignore[call-arg]


# --- stopping ---


def test_shutdown_drains_and_may_be_repeated() -> None:
    pool = WorkerPool(2)
    futures = [pool.submit(int, i) for i in range(200)]
    pool.shutdown()
    assert [future.result(0) for future in futures] == list(range(200))
    pool.shutdown()
    pool.shutdown(drain=False)
    with pytest.raises(RuntimeError, match="after the pool was stopped"):
        pool.submit(int)


def test_shutdown_without_drain_cancels_what_is_queued() -> None:
    pool = WorkerPool(1)
    blocker = Blocker(pool)
    futures = [pool.submit(pytest.fail, "ran") for _ in range(50)]
    stopper = threading.Thread(target=pool.shutdown, args=(False,))
    stopper.start()
    for future in futures:
        with pytest.raises(concurrent.futures.CancelledError, match="before it had started"):
            future.result(LONG)
    assert not blocker.futures[0].done()  # running tasks are not interrupted
    blocker.release()
    stopper.join(LONG)
    assert not stopper.is_alive()


def test_an_exception_in_the_block_cancels() -> None:
    queued: list[Future] = []

    def fail_inside() -> None:
        with WorkerPool(1) as pool:
            blocker = Blocker(pool)
            queued.append(pool.submit(int))
            threading.Timer(0.05, blocker.event.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    with pytest.raises(concurrent.futures.CancelledError):
        queued[0].result(LONG)


def test_a_worker_cannot_shut_down_its_own_pool() -> None:
    with WorkerPool(1) as pool:
        with pytest.raises(RuntimeError, match="a worker cannot wait"):
            pool.submit(pool.shutdown).result(LONG)
        assert pool.submit(int).result(LONG) == 0


# --- the GIL ---


def test_waiting_lets_other_threads_run() -> None:
    """Every wait here ends only through another Python thread, so a wait that kept the GIL would never end."""
    pool = WorkerPool(1)
    for wait in (lambda future: future.result(LONG), lambda _: pool.shutdown()):
        go = threading.Event()
        future = pool.submit(go.wait, LONG)
        opener = threading.Thread(target=go.set)
        opener.start()
        wait(future)
        opener.join(LONG)
        assert future.result(0) is True


def test_workers_that_are_busy_in_python_do_not_starve_others() -> None:
    """The main thread gets 20 turns during a wait while the workers always have Python code to run."""
    stop = threading.Event()

    def busy() -> int:
        turns = 0
        while not stop.is_set():
            turns += 1
        return turns

    with WorkerPool(2) as pool:
        futures = [pool.submit(busy) for _ in range(2)]
        for _ in range(20):
            assert not any(future.done() for future in futures)
            with pytest.raises(TimeoutError):
                futures[0].result(0.001)
        stop.set()
        assert all(future.result(LONG) > 0 for future in futures)


def test_many_threads_submit_and_wait() -> None:
    with WorkerPool(3) as pool:
        totals: list[int] = []

        def client() -> None:
            totals.append(sum(pool.submit(int, i).result(LONG) for i in range(300)))

        clients = [threading.Thread(target=client) for _ in range(8)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(LONG)
    assert totals == [sum(range(300))] * 8


def test_tasks_submit_tasks() -> None:
    with WorkerPool(2) as pool:
        assert pool.submit(lambda: pool.submit(int, 5)).result(LONG).result(LONG) == 5


# --- objects ---


class Owned:
    def __call__(self) -> Owned:
        return self


def test_callables_and_results_are_freed() -> None:
    with WorkerPool(1) as pool:
        owned = Owned()
        alive = weakref.ref(owned)
        future: Future | None = pool.submit(lambda it: 1, owned)
        del owned
        assert future is not None
        assert future.result(LONG) == 1
        assert alive() is None  # the arguments were freed before the future was done

        owned = Owned()
        alive = weakref.ref(owned)
        future = pool.submit(owned)
        del owned
        future.result(LONG)
        assert alive() is not None
        future = None
        pool.submit(int).result(LONG)  # the worker has released the earlier task
        assert alive() is None


def test_finalisers_may_run_anything_on_a_worker() -> None:
    ran: list[str] = []
    with WorkerPool(1) as pool:

        class Final:
            def __call__(self) -> None:
                pass

            def __del__(self) -> None:
                gc.collect(0)
                ran.append(threading.current_thread().name)

        for _ in range(20):
            pool.submit(Final())
        pool.submit(int).result(LONG)
    assert len(ran) == 20


def test_cancelled_callables_are_freed() -> None:
    pool = WorkerPool(1)
    blocker = Blocker(pool)
    owned = Owned()
    alive = weakref.ref(owned)
    pool.submit(owned)
    del owned
    stopper = threading.Thread(target=pool.shutdown, args=(False,))
    stopper.start()
    blocker.release()
    stopper.join(LONG)
    assert alive() is None


def test_a_dropped_pool_runs_what_is_queued() -> None:
    pool = WorkerPool(1)
    blocker = Blocker(pool)
    future = pool.submit(int, 3)
    del pool
    gc.collect()
    blocker.release()
    assert future.result(LONG) == 3


def test_a_pool_may_be_dropped_by_its_own_task() -> None:
    for _ in range(50):
        pools = [WorkerPool(1)]
        future = pools[0].submit(pools.clear)  # the last reference is dropped on the worker
        assert future.result(LONG) is None
        assert not pools


def test_threads_of_dropped_pools_end() -> None:
    script = """
    import os, time
    count = lambda: len(os.listdir("/proc/self/task"))
    WorkerPool(1).shutdown()
    before = count()
    for _ in range(100):
        WorkerPool(3).submit(int)
    deadline = time.monotonic() + 50
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    print(count() - before)
    """
    done = run_python(script)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr
