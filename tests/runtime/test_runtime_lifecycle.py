"""Tests of runtimes at start, shutdown, exit, fork and Ctrl-C of a process; without special care each of them hangs or
aborts.
"""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import processes
import pytest
import torch
from gate import Gate
from limits import LONG
from processes import in_child
from torch import Tensor

from pymoe.runtime import Runtime, TaskPool, TesseractRuntime

ONE = torch.ones(1)

PRELUDE = """
import gc, os, signal, sys, threading, time
from concurrent.futures import CancelledError
import torch
from pymoe.runtime import Runtime, TaskPool
ONE = torch.ones(1)
"""


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    return processes.run_python(script, PRELUDE, timeout=5 * LONG)


def pool_of(process: Callable[[Tensor], Tensor] = lambda x: x + 1, **options: object) -> TaskPool:
    return TaskPool(process, name="pool", **options)  # type: ignore[arg-type]


# --- start and shutdown ---


def test_start_and_shutdown_may_be_repeated() -> None:
    pool = pool_of()
    runtime = Runtime([pool], num_workers=2)
    assert TesseractRuntime is Runtime
    assert runtime.num_workers == 2
    runtime.shutdown()
    for _ in range(3):
        assert not runtime.running
        runtime.start()
        runtime.start()
        assert runtime.running
        assert pool(ONE) == 2
        runtime.shutdown()
        runtime.shutdown()
        with pytest.raises(RuntimeError, match="after it was closed"):
            pool.submit_task(ONE)
    with Runtime({"again": pool}) as other:
        assert pool(ONE) == 2
        assert other.stats()["pool"].completed == 4


def test_requests_wait_for_a_runtime() -> None:
    pool = pool_of()
    futures = [pool.submit_task(ONE * i) for i in range(100)]
    with Runtime([pool]):
        assert [float(future.result(LONG)) for future in futures] == [i + 1.0 for i in range(100)]


def test_shutdown_drains() -> None:
    pool = pool_of(lambda x: time.sleep(0.001) or x, max_batch_size=1)
    runtime = Runtime([pool])
    runtime.start()
    futures = [pool.submit_task(ONE) for _ in range(30)]
    runtime.shutdown()
    assert all(future.done() and future.result(0) == 1 for future in futures)


def test_shutdown_drains_what_would_have_waited_for_more() -> None:
    pool = pool_of(min_batch_size=100)
    with Runtime([pool]):
        future = pool.submit_task(ONE)
    assert future.result(0) == 2


def test_shutdown_without_drain_cancels_what_has_not_started() -> None:
    gate = Gate()
    pool = pool_of(gate, max_batch_size=1)
    runtime = Runtime([pool])
    runtime.start()
    futures = [pool.submit_task(ONE) for _ in range(10)]
    gate.begun.wait(LONG)
    stopper = threading.Thread(target=runtime.shutdown, args=(False,))
    stopper.start()
    for future in futures[1:]:
        with pytest.raises(concurrent.futures.CancelledError, match="shut down before it had started"):
            future.result(LONG)
    assert not futures[0].done()
    gate.open.set()
    stopper.join(LONG)
    assert futures[0].result(0) == 1


def test_an_exception_in_the_block_cancels() -> None:
    pool = pool_of(min_batch_size=100)
    futures = []

    def fail_inside() -> None:
        with Runtime([pool]):
            futures.append(pool.submit_task(ONE))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    with pytest.raises(concurrent.futures.CancelledError):
        futures[0].result(LONG)


def test_a_runtime_cannot_be_shut_down_by_its_own_batch() -> None:
    runtimes: list[Runtime] = []
    pool = pool_of(lambda x: runtimes[0].shutdown() or x)
    with Runtime([pool]) as runtime:
        runtimes.append(runtime)
        future = pool.submit_task(ONE)
        while not future.done():  # a worker runs it
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="cannot"):
            future.result()
        with pytest.raises(RuntimeError):  # this thread helps
            pool(ONE)


def test_a_pool_has_one_runtime() -> None:
    pool, other = pool_of(), pool_of()
    with Runtime([pool]):
        with pytest.raises(RuntimeError, match="another Runtime"):
            Runtime([other, pool]).start()
        assert pool(ONE) == 2
        with Runtime([other]):
            assert other(ONE) == 2


def test_what_is_no_pool_is_refused() -> None:
    for bad in ([3], {"a": object()}, [pool_of(), None]):
        with pytest.raises(TypeError, match="expected a pool or a backend"):
            Runtime(bad)
    with pytest.raises(ValueError, match="at least one"):
        Runtime([])
    with pytest.raises(ValueError, match="num_workers must be at least 1, got 0"):
        Runtime([pool_of()], num_workers=0)
    with pytest.raises(ValueError, match="stats_interval"):
        Runtime([pool_of()], stats_interval=0)


def test_a_dropped_runtime_cancels_what_is_queued_and_lets_the_rest_end() -> None:
    gate = Gate()
    pool = pool_of(gate, max_batch_size=1)
    runtime = Runtime([pool])
    runtime.start()
    running, queued = pool.submit_task(ONE), pool.submit_task(ONE)
    gate.begun.wait(LONG)
    del runtime
    gc.collect()
    with pytest.raises(concurrent.futures.CancelledError, match="shut down"):
        queued.result(LONG)
    gate.open.set()
    assert running.result(LONG) == 1


def test_a_runtime_in_a_cycle_is_collected() -> None:
    class Server:
        def __init__(self) -> None:
            self.pool = pool_of(self.process)
            self.runtime = Runtime([self.pool])
            self.runtime.start()

        def process(self, x: Tensor) -> Tensor:
            return x

    threads = threading.active_count()
    for _ in range(20):
        server = Server()
        assert server.pool(ONE) == 1
        del server
    gc.collect()
    assert threading.active_count() <= threads + 40
    assert not [it for it in gc.get_objects() if isinstance(it, Server)]


def test_statistics_are_logged_at_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of()
    with caplog.at_level(logging.INFO, "pymoe.runtime"), Runtime([pool], stats_interval=0.01):
        deadline = time.monotonic() + LONG
        while not caplog.records and time.monotonic() < deadline:
            pool(ONE)
    assert "pool: " in caplog.records[0].getMessage()
    assert "requests/s" in caplog.records[0].getMessage()


def test_batches_are_ranges_in_a_profile() -> None:
    go = threading.Event()
    busy = TaskPool(lambda x: go.wait(LONG) and x, name="busy")
    pool = TaskPool(lambda x: x + 1, name="expert.forward")
    with Runtime([busy, pool], num_workers=1), torch.profiler.profile() as profile:
        running = busy.submit_task(ONE)
        while not running.running():
            time.sleep(0.001)
        pool(ONE)  # a profile shows its own thread, which has to help
        go.set()
    assert "pymoe::expert.forward batch" in {event.name for event in profile.events()}


# --- interpreter exit ---

EXITS: dict[str, str] = {
    "queued": "futures = [pool.submit_task(ONE) for _ in range(5000)]",
    "running": "slow = TaskPool(lambda x: time.sleep(0.2), name='slow'); other = Runtime([slow]); other.start(); "
    "slow.submit_task(ONE); time.sleep(0.05)",
    "never started": "idle = TaskPool(len, name='idle'); idle.submit_task(ONE)",
    "runtime dropped": "[pool.submit_task(ONE) for _ in range(5000)]; del runtime",
    "everything dropped": "[pool.submit_task(ONE) for _ in range(5000)]; del runtime, pool",
    "an exception": "pool.submit_task(ONE); raise SystemExit(0)",
    "clients in threads": "[threading.Thread(target=ask, daemon=True).start() for _ in range(8)]; time.sleep(0.05)",
    "clients with results": "[threading.Thread(target=ask, daemon=True).start() for _ in range(3)]; pool(ONE)",
    "clients of an idle pool": "idle = TaskPool(len, name='idle'); "
    "[threading.Thread(target=wait_idly, args=(idle,), daemon=True).start() for _ in range(4)]; time.sleep(0.02)",
    "tensors over pooled memory": "import builtins; builtins.kept = [pool(torch.ones(100, 100)) for _ in range(50)]",
    "callbacks": "[pool.submit_task(ONE).add_done_callback(lambda f: f.done()) for _ in range(2000)]",
}

SERVER = """
TWO = torch.ones(1, 2)
pool = TaskPool(lambda x: x + 1, name="pool", max_batch_size=16)
silent = TaskPool(lambda x: None, name="silent")
runtime = Runtime([pool, silent], num_workers=2)
runtime.start()
def ask():
    # No operator of torch and no tensor of its own: torch aborts the process if a daemon thread is in one when the
    # interpreter goes. (A single element would be one: it is asked whether it is a conjugate's.)
    try:
        while True:
            silent.submit_task(TWO).result()
    except (RuntimeError, CancelledError):
        pass  # the runtime has ended
def wait_idly(idle):
    idle.submit_task(TWO).result()
"""


@pytest.mark.slow
def test_exit_with_live_work() -> None:
    """Five exits per case, in children forked before there are threads, since importing torch takes longer than all
    of them.
    """
    script = f"""
gc.freeze()  # or every child would touch, and so copy, every object of the parent's when it ends
for name, live in {EXITS!r}.items():
    for _ in range(5):
        child = os.fork()
        if child == 0:
            break
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            print(name, "ended with exit status", status, flush=True)
    if child == 0:
        break
else:
    sys.exit(0)
{SERVER}
exec(live)
"""
    command = [sys.executable, "-X", "faulthandler", "-c", PRELUDE + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * LONG)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- fork ---


def test_fork() -> None:
    go = threading.Event()
    busy = TaskPool(lambda x: go.wait(LONG) and x, name="busy", max_batch_size=1)
    pool = pool_of()
    clients_stop = threading.Event()

    def client() -> None:
        while not clients_stop.is_set():
            assert pool(torch.ones(3, 100)).sum() == 600

    with Runtime([pool, busy], num_workers=2) as runtime:
        finished, pending, queued = pool.submit_task(ONE), busy.submit_task(ONE), busy.submit_task(ONE)
        finished.result(LONG)
        clients = [threading.Thread(target=client) for _ in range(3)]
        for thread in clients:
            thread.start()

        def check() -> None:
            calls = (
                lambda: pool.submit_task(ONE),
                pending.result,
                queued.exception,
                queued.cancel,
                runtime.shutdown,
                runtime.start,
                lambda: Runtime([pool]),
            )
            for call in calls:
                with pytest.raises(RuntimeError, match="before a fork"):
                    call()
            assert finished.result(0) == 2
            fresh = pool_of()
            with Runtime([fresh]):
                assert fresh(ONE) == 2

        for _ in range(18):
            assert in_child(check) == 0
        clients_stop.set()
        for thread in clients:
            thread.join(LONG)
        go.set()
        assert pending.result(LONG) == queued.result(LONG) == 1


def test_a_fork_may_collect_and_exit() -> None:
    done = run_python(
        SERVER
        + """
futures = [pool.submit_task(ONE) for _ in range(200)]
kept = pool(torch.ones(50, 50))
for _ in range(3):
    child = os.fork()
    if child == 0:
        del pool, futures, runtime, kept
        gc.collect()
        sys.exit(0)  # through the exit handlers
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        sys.exit(status)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


class Rows(torch.utils.data.Dataset[Tensor]):
    """A data set that holds a pool, like a data set whose items an expert computes."""

    def __init__(self, pool: TaskPool) -> None:
        self.pool = pool

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), float(index))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_data_loader_forks_beside_a_runtime() -> None:
    pool = pool_of()
    with Runtime([pool]):
        loader = torch.utils.data.DataLoader(
            Rows(pool), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=LONG
        )
        total = sum(float(pool(batch).sum()) for batch in loader)
    assert total == sum(2 * (i + 1) for i in range(16))


# --- Ctrl-C ---

# Each waits for an event after the interrupt, so a wait that ignores the interrupt never ends.
WAITS: dict[str, str] = {
    "result": "busy.submit_task(ONE).result()",
    "result with a timeout": "busy.submit_task(ONE).result(1000)",
    "exception": "busy.submit_task(ONE).exception()",
    "a call": "busy(ONE)",
    "a full pool": "[full.submit_task(ONE) for _ in range(3)]",
    "shutdown": "runtime.shutdown()",
    "with block": "runtime.__exit__(None, None, None)",
}


def test_ctrl_c_ends_every_wait() -> None:
    waits = "\n".join(f"    ({name!r}, lambda: {code})," for name, code in WAITS.items())
    script = f"""
import faulthandler
faulthandler.dump_traceback_later(120, exit=True)  # who hangs says where
go = threading.Event()
busy = TaskPool(lambda x: go.wait() and x, name="busy", max_batch_size=1)
waits = [
{waits}
]
for name, wait in waits:
    for repeat in range(3):
        go.clear()
        full = TaskPool(lambda x: x, name="full", capacity=2)
        runtime = Runtime([busy])
        runtime.start()
        running = busy.submit_task(ONE)
        while not running.running():
            time.sleep(0.001)
        try:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            wait()
            print(name, "was not interrupted")
        except KeyboardInterrupt:
            print("interrupted")
        go.set()
        runtime.shutdown()
        assert running.result() == 1
"""
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["interrupted"] * 3 * len(WAITS) + [""], done.stdout + done.stderr


def test_an_interrupted_helper_gives_the_batch_back() -> None:
    script = """
runs = []
def process(x):
    runs.append(threading.current_thread() is threading.main_thread())
    if runs[-1]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(100)
    return x + 1
pool = TaskPool(process, name="pool", min_batch_size=3)
others = []
def client():
    others.append(pool.submit_task(ONE).result())
caught = 0
with Runtime([pool]):
    for _ in range(20):
        threads = [threading.Thread(target=client) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            pool(ONE)
        except KeyboardInterrupt:
            caught += 1
        for thread in threads:
            thread.join()
print(len(others), all(it == 2 for it in others), caught, sum(runs), pool._statistics()["failed"])
"""
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    count, right, caught, helped, failed = done.stdout.split()
    assert (count, right, failed) == ("40", "True", "0")
    assert caught == helped


def test_a_signal_handler_that_returns_does_not_end_a_wait() -> None:
    script = """
go = threading.Event()
pool = TaskPool(lambda x: go.wait() and x, name="pool")
signal.signal(signal.SIGUSR1, lambda *_: go.set())
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
with Runtime([pool]):
    print(pool(ONE))
"""
    done = run_python(script)
    assert (done.returncode, done.stdout.strip()) == (0, "tensor([1.])"), done.stderr
