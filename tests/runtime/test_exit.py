"""Interpreter exit while daemon threads run: the exit code is 0, and nothing catches the threads' unwinding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import run_python

CSRC = Path(__file__).parents[2] / "csrc"

# Endless loops of daemon threads; they sleep only in Python, because torch aborts if its own functions are cut off.
LOOPS = {
    "maps": "pymoe.map_with_parallel_backward(slowly, *[(torch.ones(2, requires_grad=True),)] * 8)",
    "maps without gradients": "pymoe.map_with_parallel_backward(slowly, *[(1,)] * 8)",
    "maps in maps": "pymoe.map_with_parallel_backward("
    "lambda a: pymoe.map_with_parallel_backward(slowly, (a,), (a,)), *[(1,)] * 3)",
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_a_program_may_end_while_daemon_threads_make_maps(loop: str) -> None:
    """Exit code -6: CPython unwound the threads through destructors and a catch (...) that wanted the GIL."""
    script = f"""
    import threading, time
    import torch, pymoe

    def slowly(a):
        time.sleep(0.005)
        return a * 2

    def work():
        while True:
            {LOOPS[loop]}

    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.2)
    print("end")
    """
    for _ in range(3):
        done = run_python(script)
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_program_may_end_while_daemon_threads_wait_for_requests() -> None:
    script = """
    import contextlib, threading, time
    import torch, pymoe

    def slowly(x):
        time.sleep(0.005)
        return [len(x)] * len(x)

    pools = [pymoe.TaskPool(slowly, name=str(i), max_batch_size=1) for i in range(2)]
    pymoe.Runtime(pools, num_workers=2).start()
    x = torch.ones(1)

    def work(pool):
        with contextlib.suppress(BaseException):
            while True:
                future = pool.submit_task(x)
                future.add_done_callback(lambda future: time.sleep(0.005))
                future.result()

    for pool in pools * 2:
        threading.Thread(target=work, args=(pool,), daemon=True).start()
    time.sleep(0.2)
    """
    for _ in range(3):
        done = run_python(script)
        assert (done.returncode, done.stderr) == (0, "")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((CSRC / folder).rglob("*")) if path.suffix in (".h", ".cpp")]


def without_comments(path: Path) -> str:
    return re.sub(r"//.*", "", path.read_text())


def test_the_gil_is_taken_and_let_go_of_in_one_file() -> None:
    """The GIL is taken and released only in with_gil() and WithoutGil, which a thread never leaves if its
    interpreter is gone.
    """
    own = re.compile(r"PyGILState_(Ensure|Release)|PyEval_\w*Thread\b|Py_(BEGIN|END)_ALLOW|gil_scoped|\bGilTaken\b")
    found = {path.name for path in sources("bindings", "runtime") if own.search(without_comments(path))}
    assert found == {"gil.h", "gil.cpp"}


def test_whoever_catches_everything_around_python_stops_unwinding_first() -> None:
    """A catch (...) must not see how CPython unwinds a thread: the unwinding would end there, and abort the process."""
    harmless = re.compile(r"or_stay\(|std::rethrow_exception\(")  # rethrow_exception only inspects a caught exception
    for path in sources("bindings"):
        if path.name == "gil.cpp":  # around two C functions
            continue
        before, *catches = re.split(r"catch \(\.\.\.\)", without_comments(path))
        for after in catches:
            block = before[before.rindex("try {") :]
            assert harmless.search(block), f"{path.name}: a catch (...) without or_stay():\n{block}"
            before = after if "try {" in after else before + after
