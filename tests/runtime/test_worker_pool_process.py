"""The native worker pool and the process: exit, forks and signals."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from bare_runtime import LONG, PRELUDE, Blocker, run_python
from processes import in_child

from pymoe._runtime import WorkerPool

EXITS: dict[str, str] = {
    "queued": "futures = [pool.submit(sum, range(1000)) for _ in range(20000)]",
    "running": "pool.submit(time.sleep, 0.2); pool.submit(time.sleep, 0.2); pool.submit(time.sleep, 100)",
    "dropped": "[pool.submit(sum, range(1000)) for _ in range(20000)]; del pool",
    "exception": "pool.submit(time.sleep, 0.1); raise SystemExit(0)",
    "torch": "import torch; x = torch.ones(64, 64); [pool.submit(torch.mm, x, x) for _ in range(2000)]",
}


@pytest.mark.thinned(usual=5)
@pytest.mark.parametrize("live", EXITS)
@pytest.mark.parametrize("repeat", range(4))
def test_exit_with_live_work(live: str, repeat: int) -> None:
    script = f"import time\npool = WorkerPool(2)\n{EXITS[live]}"
    done = run_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("make", ["WorkerPool(1)", "Executor(1, []).start([])"])
def test_no_pool_in_a_late_exit_handler(make: str) -> None:
    """Its workers were once joined under the GIL, for which they waited, so the process never ended."""
    # Handlers run last in, first out, so one that is registered before the module is loaded runs after the module's
    # own.
    script = """
    import atexit

    def late():
        try:
            _runtime.MAKE
        except RuntimeError as error:
            print(error)

    atexit.register(late)
    """
    script = textwrap.dedent(script).replace("MAKE", make) + PRELUDE
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * LONG)
    assert done.returncode == 0
    assert "interpreter is exiting" in done.stdout


def test_fork() -> None:
    with WorkerPool(2) as pool:
        finished = pool.submit(int, 4)
        finished.result(LONG)
        blocker = Blocker(pool)
        pending = pool.submit(int)

        def check() -> None:
            nonlocal pool
            for call in (lambda: pool.submit(int), pool.shutdown, pending.result):
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
    "shutdown": "pool.shutdown()",
    "with block": "pool.__exit__(None, None, None)",
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait(wait: str) -> None:
    """The task ends only after the interrupt was noticed, so a wait that ignores it never ends."""
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
