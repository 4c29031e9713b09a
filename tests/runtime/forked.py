"""Children of a fork."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

LONG = 60  # seconds until a child that hangs dies of it


def in_child(check: Callable[[], None]) -> int:
    """Exit status of a forked child that runs ``check``: 1 if that raised, -14 if it hung."""
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
