"""Runs Python scripts and forked children of tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable

from limits import LONG


def run_python(script: str, prelude: str = "", timeout: float = 2 * LONG) -> subprocess.CompletedProcess[str]:
    """Run ``prelude`` and the dedented ``script`` in a new process; return the finished process with its output.

    The warning is off that Python gives from 3.12 on about every fork of a process with threads.
    """
    quiet = "ignore:This process:DeprecationWarning"
    command = [sys.executable, "-X", "faulthandler", "-W", quiet, "-c", prelude + textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def in_child(check: Callable[[], None]) -> int:
    """Run ``check`` in a forked child; return its exit status: 0, 1 if ``check`` raised, -14 if it hung."""
    child = os.fork()
    if child == 0:
        signal.alarm(LONG)
        status = 1
        try:
            check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
