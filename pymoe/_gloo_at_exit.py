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
# The number of successive checks that must all find the threads asleep. A single check is not enough, because a thread
# that waits for a lock during its work looks asleep, too.
IDLE_LOOKS = 3

_waiting: set[int] = set()
"""IDs of the processes that have registered the wait: this one, and those from which it was forked."""


def wait_for_gloo_at_exit() -> None:
    """Make this process wait at exit, for at most 5 seconds, until the threads of gloo sleep. Later calls do nothing.

    Without Linux's ``/proc`` it waits only for 3 milliseconds.
    """
    # A forked child must register again, because a Finalize does nothing except in the process that created it.
    if os.getpid() not in _waiting:
        _waiting.add(os.getpid())
        # This runs after the failure detectors of pipes, which have higher priorities and still use their process
        # groups.
        Finalize(None, _wait, exitpriority=0)


def _wait() -> None:
    end = time.monotonic() + LONGEST_WAIT_S
    idle_looks = 0
    while idle_looks < IDLE_LOOKS and time.monotonic() < end:
        idle_looks = 0 if _is_busy() else idle_looks + 1
        # Sleeping also releases the interpreter's lock, which the threads of gloo need.
        time.sleep(0.001)


def _is_busy() -> bool:
    """Return whether any thread of gloo is not asleep."""
    for thread in Path("/proc/self/task").glob("*"):
        try:
            if thread.joinpath("comm").read_text().strip() == THREAD_NAME:
                state = thread.joinpath("stat").read_text().rpartition(")")[2].split()[0]
                if state != "S":
                    return True
        # The thread may end while its files are read.
        except OSError:
            continue
    return False
