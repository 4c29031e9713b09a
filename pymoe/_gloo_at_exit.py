"""Waits for the threads of gloo before the interpreter is finalized.

For a moment after a collective is reported as done, a thread of gloo still refers to its tensors, and it needs the
interpreter's lock to release them. Before 3.14, CPython ends a thread that asks for this lock during finalization, and
the process aborts: "terminate called without an active exception". ``torch.distributed.destroy_process_group`` does not
help: such threads live until the group is freed, and the caches of DTensor keep it alive. See
https://github.com/pytorch/pytorch/pull/179291.
"""

from __future__ import annotations

import os
import time
from multiprocessing.util import Finalize
from pathlib import Path

__all__ = ["wait_for_gloo_at_exit"]

THREAD_NAME = "pt_gloo_runloop"
LONGEST_WAIT_S = 5.0
# checks in a row that must find all threads asleep; a single one may find a busy thread waiting for a lock
IDLE_LOOKS = 3

_waiting: set[int] = set()
"""The processes that will wait at exit: this one, and those from which it was forked."""


def wait_for_gloo_at_exit() -> None:
    """Make this process wait at exit, for at most 5 seconds, until the threads of gloo sleep. Later calls do nothing.

    Without Linux's ``/proc`` there is no wait.
    """
    if os.getpid() not in _waiting:  # multiprocessing drops a parent's functions in the children that it forks
        _waiting.add(os.getpid())
        # Runs after the pipes' failure detectors, which have higher priorities and still use their groups.
        Finalize(None, _wait, exitpriority=0)


def _wait() -> None:
    end = time.monotonic() + LONGEST_WAIT_S
    idle_looks = 0
    while idle_looks < IDLE_LOOKS and time.monotonic() < end:
        idle_looks = 0 if _is_busy() else idle_looks + 1
        time.sleep(0.001)  # also releases the interpreter's lock


def _is_busy() -> bool:
    """Return whether any thread of gloo is not asleep."""
    for thread in Path("/proc/self/task").glob("*"):
        try:
            if thread.joinpath("comm").read_text().strip() == THREAD_NAME:
                state = thread.joinpath("stat").read_text().rpartition(")")[2].split()[0]
                if state != "S":
                    return True
        except OSError:  # the thread has ended
            continue
    return False
