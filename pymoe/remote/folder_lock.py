"""A folder that one server has to itself: two would each go on from a state that the other does not know."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import weakref
from pathlib import Path

logger = logging.getLogger("pymoe.remote")

_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """A lock on a folder, which is made if it is not there. It ends with :meth:`release`, the object, or the process.

    Where the file system has no locks, as some that are shared by machines, a line in the log says so, and nothing
    keeps others out.

    Raises:
        OSError: another server, of this process or another one, holds it; or the folder cannot be made or opened.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                os.close(descriptor)
                reason = "another server, which has not drained, has its checkpoints there"
                raise BlockingIOError(error.errno, reason, str(folder)) from None
            logger.warning("%s cannot be locked (%s): see that no two servers use it", folder, error.strerror)
        self._descriptor = descriptor
        self._release = weakref.finalize(self, _unlock, descriptor)
        _held.add(self)

    def release(self) -> None:
        """Let others have the folder."""
        self._release()


def _unlock(descriptor: int) -> None:
    try:
        with contextlib.suppress(OSError):  # of a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also if a fork has not yet closed its own
    finally:
        os.close(descriptor)


def _leave_to_parent() -> None:
    """Close a fork's descriptors, so that the locks end with the parent."""
    for one in list(_held):
        if one._release.detach() is not None:
            os.close(one._descriptor)


os.register_at_fork(after_in_child=_leave_to_parent)
