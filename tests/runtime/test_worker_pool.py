"""The bound worker pool: outcomes, and everything where Python's threads, signals, forks and exit meet it."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
import weakref
from collections.abc import Callable

import pytest

from pymoe import _runtime
from pymoe._runtime import Future, WorkerPool

LONG = 60  # seconds: a wait that is meant to succeed at once


# The module from its file, without the package and torch, whose import would be most of a short process's time.
PRELUDE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("pymoe._runtime", {_runtime.__file__!r})
_runtime = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_runtime)
WorkerPool = _runtime.WorkerPool
"""


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "faulthandler", "-c", PRELUDE + textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * LONG)


class Blocker:
    """Occupies every worker of a pool until it is released, so that later tasks stay queued."""

    def __init__(self, pool: WorkerPool) -> None:
        self.event = threading.Event()
        started = threading.Barrier(pool.workers + 1)

        def block() -> None:
            started.wait(LONG)
            self.event.wait(LONG)

        self.futures = [pool.submit(block) for _ in range(pool.workers)]
        started.wait(LONG)

    def release(self) -> None:
        self.event.set()
        for future in self.futures:
            future.result(LONG)


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
        assert future.exception() is None


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
        assert future.exception() is error
        assert "planted_failure" in "".join(traceback.format_tb(caught.value.__traceback__))
        assert pool.submit(int).result() == 0  # the worker lives


def test_timeout() -> None:
    with WorkerPool(1) as pool:
        blocker = Blocker(pool)
        future = pool.submit(int)
        for timeout in (0, 0.01, -1):
            with pytest.raises(TimeoutError, match="has not ended"):
                future.result(timeout)
        with pytest.raises(TimeoutError):
            future.exception(timeout=0.0)
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
        with pytest.raises(concurrent.futures.CancelledError):
            future.exception()
    assert not blocker.futures[0].done()  # what runs is not interrupted
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
    """Every wait here ends only through another Python thread: one that kept the GIL would never end."""
    pool = WorkerPool(1)
    for wait in (lambda future: future.result(LONG), lambda future: future.exception(LONG), lambda _: pool.shutdown()):
        go = threading.Event()
        future = pool.submit(go.wait, LONG)
        opener = threading.Thread(target=go.set)
        opener.start()
        wait(future)
        opener.join(LONG)
        assert future.result(0) is True


def test_workers_that_are_busy_in_python_do_not_starve_others() -> None:
    """The main thread gets its turns, 20 of them through a wait, while the workers always have Python code to run."""
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


@pytest.mark.parametrize("workers", [1, 2])
def test_tasks_wait_for_tasks_of_their_own_pool(workers: int) -> None:
    with WorkerPool(workers) as pool:

        def add(depth: int) -> int:
            return depth and depth + pool.submit(add, depth - 1).result()

        futures = [pool.submit(add, 20) for _ in range(5)]
        assert [future.result(LONG) for future in futures] == [210] * 5
        threads = pool.submit(lambda: (threading.get_ident(), pool.submit(threading.get_ident).result()))
        if workers == 1:
            assert len(set(threads.result(LONG))) == 1


def test_a_wait_with_a_timeout_does_not_run_the_task() -> None:
    with WorkerPool(1) as pool:

        def wait() -> str:
            inner = pool.submit(int)
            with pytest.raises(TimeoutError):
                inner.result(0.01)
            return str(inner.done())

        assert pool.submit(wait).result(LONG) == "False"


def test_callables_and_results_are_freed() -> None:
    with WorkerPool(1) as pool:
        owned = Owned()
        alive = weakref.ref(owned)
        future: Future | None = pool.submit(lambda it: 1, owned)
        del owned
        assert future is not None
        assert future.result(LONG) == 1
        assert alive() is None  # the arguments went before the future was done

        owned = Owned()
        alive = weakref.ref(owned)
        future = pool.submit(owned)
        del owned
        future.exception(LONG)
        assert alive() is not None
        future = None
        pool.submit(int).result(LONG)  # the worker has let go of the task before
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
        future = pools[0].submit(pools.clear)  # the last reference goes on the worker
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


# --- the process ---


EXITS: dict[str, str] = {
    "queued": "futures = [pool.submit(sum, range(1000)) for _ in range(20000)]",
    "running": "pool.submit(time.sleep, 0.2); pool.submit(time.sleep, 0.2); pool.submit(time.sleep, 100)",
    "dropped": "[pool.submit(sum, range(1000)) for _ in range(20000)]; del pool",
    "exception": "pool.submit(time.sleep, 0.1); raise SystemExit(0)",
    "torch": "import torch; x = torch.ones(64, 64); [pool.submit(torch.mm, x, x) for _ in range(2000)]",
}


@pytest.mark.parametrize("live", EXITS)
@pytest.mark.parametrize("repeat", range(4))
def test_exit_with_live_work(live: str, repeat: int) -> None:
    script = f"import time\npool = WorkerPool(2)\n{EXITS[live]}"
    done = run_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_pool_in_a_late_exit_handler() -> None:
    # Handlers run last in, first out: one that is registered before the module is loaded runs after the module's own.
    script = """
    import atexit

    def late():
        try:
            _runtime.WorkerPool(1)
        except RuntimeError as error:
            print(error)

    atexit.register(late)
    """
    script = textwrap.dedent(script) + PRELUDE
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * LONG)
    assert done.returncode == 0
    assert "interpreter is exiting" in done.stdout


def in_child(check: Callable[[], None]) -> int:
    """Exit status of a forked child that runs ``check``; 14 if it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(LONG)  # a child that hangs dies of it
        status = 1
        try:
            check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_fork() -> None:
    with WorkerPool(2) as pool:
        finished = pool.submit(int, 4)
        finished.result(LONG)
        blocker = Blocker(pool)
        pending = pool.submit(int)

        def check() -> None:
            nonlocal pool
            for call in (lambda: pool.submit(int), pool.shutdown, pending.result, pending.exception):
                with pytest.raises(RuntimeError, match="before a fork"):
                    call()
            assert finished.result(0) == 4
            with WorkerPool(2) as fresh:
                assert fresh.submit(int, 5).result(LONG) == 5
            del fresh

        for _ in range(20):
            assert in_child(check) == 0
        blocker.release()
        assert pending.result(LONG) == 0


def test_a_fork_may_collect_and_exit() -> None:
    script = """
    import gc, os, sys
    pool = WorkerPool(2)
    futures = [pool.submit(sum, range(1000)) for _ in range(500)]
    child = os.fork()
    if child == 0:
        del pool, futures
        gc.collect()
        sys.exit(0)  # through the exit handlers
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    for _ in range(5):
        done = run_python(script)
        assert (done.returncode, done.stderr) == (0, "")


WAITS: dict[str, str] = {
    "result": "future.result()",
    "result with a timeout": "future.result(1000)",
    "exception": "future.exception()",
    "shutdown": "pool.shutdown()",
    "with block": "pool.__exit__(None, None, None)",
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait(wait: str) -> None:
    """The task ends only after the interrupt was seen: a wait that ignores it never ends."""
    script = f"""
    import os, signal, threading
    pool = WorkerPool(1)
    go = threading.Event()
    future = pool.submit(go.wait)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        {WAITS[wait]}
    except KeyboardInterrupt:
        print("interrupted")
    go.set()
    print(future.result())
    pool.shutdown()
    """
    done = run_python(script)
    assert (done.returncode, done.stdout.split()) == (0, ["interrupted", "True"]), done.stderr


def test_a_signal_handler_that_returns_does_not_end_a_wait() -> None:
    script = """
    import os, signal, threading
    pool = WorkerPool(1)
    go = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: go.set())
    future = pool.submit(go.wait)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    print(future.result())
    """
    done = run_python(script)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
