"""The GIL: code that waits does not hold it, and code that holds a lock does not ask for it."""

from __future__ import annotations

import gc
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from limits import LONG
from torch import Tensor

from pymoe import _runtime
from pymoe.runtime import Runtime, TaskPool

ONE = torch.ones(1)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Make threads switch as often as CPython allows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_waiting_lets_other_threads_run() -> None:
    """Every wait here ends only through another Python thread, so a wait that kept the GIL would never end."""
    pool = TaskPool(lambda x: x, name="pool", min_batch_size=2)
    full = TaskPool(lambda x: x, name="full", capacity=1)
    with Runtime([pool]):
        for wait in (lambda f: f.result(), lambda f: f.result(LONG), lambda f: f.exception()):
            future = pool.submit_task(ONE)
            other = threading.Thread(target=pool.submit_task, args=(ONE,))
            other.start()
            wait(future)
            other.join(LONG)
    first = full.submit_task(ONE)
    other = threading.Timer(0.01, first.cancel)
    other.start()
    second = full.submit_task(ONE)
    other.join(LONG)
    assert first.cancelled()
    go = threading.Event()
    slow = TaskPool(lambda x: go.wait(LONG) and x, name="slow")
    runtime = Runtime([slow, full])
    runtime.start()
    slow.submit_task(ONE)
    threading.Timer(0.01, go.set).start()
    runtime.shutdown()
    assert second.result() == 1


@pytest.mark.usefixtures("quick_switches")
def test_everything_at_once_ends() -> None:
    """Clients wait, drop, cancel and add callbacks while the collector runs: no lock is held while waiting for the
    GIL.
    """
    pool = TaskPool(lambda x: x + 1, name="pool", max_batch_size=8, capacity=16)
    ended: list[int] = []

    class Cycle:
        def __init__(self, future: object) -> None:
            self.me, self.future = self, future

    def client(number: int) -> None:
        seen: list[Tensor] = []
        for _ in range(100):
            assert pool.submit_task(ONE).result() == 2
            pool.submit_task(ONE)
            pool.submit_task(ONE).cancel()
            pool.submit_task(ONE).add_done_callback(lambda it: seen.append(it.cancelled()))
            Cycle(pool.submit_task(ONE, timeout=0))
            if number == 0:
                gc.collect(0)
        ended.append(number)

    with Runtime([pool], num_workers=2):
        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
    assert sorted(ended) == list(range(8))
    numbers = pool._statistics()
    outcomes = sum(numbers[name] for name in ("completed", "cancelled", "expired", "failed"))
    assert numbers["submitted"] == outcomes
    assert numbers["queued"] == numbers["running"] == 0


def test_a_heart_beats_during_many_batches() -> None:
    """Python code of another thread gets its turns while batches run."""
    pool = TaskPool(lambda x: x + 1, name="pool")
    beats = 0
    stop = threading.Event()

    def beat() -> None:
        nonlocal beats
        while not stop.is_set():
            beats += 1
            time.sleep(0)

    heart = threading.Thread(target=beat)
    heart.start()
    give_up = time.monotonic() + LONG
    with ExitStack() as stack:
        stack.callback(heart.join, LONG)
        stack.callback(stop.set)
        stack.enter_context(Runtime([pool]))
        for _ in range(20):
            before = beats
            for _ in range(100):
                pool(ONE)
            while beats == before and time.monotonic() < give_up:
                pool(ONE)
            assert beats > before
    assert not heart.is_alive()


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python always has its GIL")
def test_the_runtime_switches_the_gil_on() -> None:
    """A free-threaded Python must take its GIL for the bindings, which have no other lock (docs/design.md)."""
    load = f"""
import importlib.util, sys
assert not sys._is_gil_enabled()
spec = importlib.util.spec_from_file_location("pymoe._runtime", {_runtime.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert sys._is_gil_enabled()
"""
    done = subprocess.run([sys.executable, "-E", "-c", load], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "(GIL) has been enabled" in done.stderr, "Python's warning"
