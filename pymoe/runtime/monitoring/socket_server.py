"""The socket from which ``python -m pymoe.runtime.top`` in another terminal reads the pools of this process.

``Runtime(..., monitor=True)``, or the environment variable ``PYMOE_MONITOR=1``, opens a Unix socket ``PID-N.sock`` in a
folder that only this user may write to: ``$XDG_RUNTIME_DIR/pymoe``, or ``pymoe-UID`` in the folder for temporary files.
``monitor=FOLDER``, or ``PYMOE_MONITOR=FOLDER``, uses another folder. Nothing listens on a network. Only this user (and
root) may connect: the socket has mode 0600, and the connecting user is checked where the system reports it.

The protocol: when it receives a line, whatever the line contains, the server sends one line of JSON (also for several
lines that arrive together). The JSON contains the statistics since the previous line of JSON on the same connection.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pymoe.runtime.monitoring.statistics import Pool, ServedPools, StatsReader

FORMAT = 1
"""Version of the JSON; a reader refuses other versions."""
MOST_VIEWERS = 16
VIEWER_TIMEOUT_S = 1.0
"""A viewer that does not take a report within this many seconds is disconnected; other viewers wait meanwhile."""
ACCEPT_RETRY_S = 0.2
"""Seconds until the next accept after the system refused one, for example for lack of file descriptors."""
SUFFIX = ".sock"
_numbers = itertools.count(1)


def monitor_from_environment() -> bool | str:
    """Return what ``PYMOE_MONITOR`` says: a folder, True for the default folder, or False for no monitor."""
    value = os.environ.get("PYMOE_MONITOR", "")
    return {"": False, "0": False, "1": True}.get(value, value)


def private_folder() -> Path:
    """Return the default folder of the sockets, which may not exist yet."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "pymoe" if runtime else Path(tempfile.gettempdir()) / f"pymoe-{os.getuid()}"


def make_private(folder: Path) -> None:
    """Make the folder if it does not exist, and check that only this user may write to it.

    Raises:
        PermissionError: another user owns the folder, its group or others may write to it, or it is a symbolic link.
        OSError: the folder cannot be made, for example because a file has its name.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} must be a folder of this user that nobody else may write to")


class Monitor:
    """Serves the statistics of ``pools`` on a socket in ``folder`` (None: the default folder), on a separate thread."""

    def __init__(self, pools: Iterable[Pool] | ServedPools, folder: Path | None) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("monitor: this system's Python has no Unix sockets; use runtime.stats() or top.live(runtime)")
        self._pools, self._folder = pools, folder
        self._process = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.path: Path | None = None

    def start(self) -> None:
        """Start to listen, unless the monitor listens already. Raise OSError if the socket cannot be made."""
        with self._lock:
            if self._thread is None:
                self._listen()

    def _listen(self) -> None:
        folder = private_folder() if self._folder is None else self._folder
        make_private(folder)
        self._process = os.getpid()
        path = folder / f"{self._process}-{next(_numbers)}{SUFFIX}"
        path.unlink(missing_ok=True)  # a killed process with the same ID may have left a socket
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o600)  # before listen(): until then, nobody can connect
            listener.listen(MOST_VIEWERS)
        except OSError as error:
            listener.close()
            raise OSError(f"monitor: cannot listen at {path}: {error}") from None
        self.path = path
        self._wake, waker = socket.socketpair()
        self._thread = threading.Thread(
            target=serve, args=(listener, waker, self._pools), name="pymoe-monitor", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Close all connections and remove the socket. Do nothing in a forked child: the socket is the parent's."""
        if os.getpid() != self._process:
            return
        with self._lock:
            thread, path = self._thread, self.path
            if thread is None or path is None:
                return
            self._wake.close()
        if thread is not threading.current_thread():
            thread.join()  # not under the lock, so that other threads can call stop() and wait, too
        with self._lock:
            if self._thread is thread:
                path.unlink(missing_ok=True)
                self._thread = self.path = None


def serve(listener: socket.socket, waker: socket.socket, pools: Iterable[Pool] | ServedPools) -> None:
    """Answer viewers until the other end of ``waker`` is closed."""
    began = time.monotonic()
    viewers: dict[socket.socket, StatsReader] = {}
    accepts, again = True, 0.0
    with listener, waker, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(waker, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(None if accepts else ACCEPT_RETRY_S):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is waker:
                    for viewer in viewers:
                        viewer.close()
                    return
                if one is listener:
                    try:
                        viewer, _ = listener.accept()
                    except OSError:  # no file descriptor is left, or the viewer has gone: go on with the others
                        selector.unregister(listener)
                        accepts, again = False, time.monotonic() + ACCEPT_RETRY_S
                        continue
                    if len(viewers) >= MOST_VIEWERS or not may_see(viewer):
                        viewer.close()
                        continue
                    viewer.settimeout(VIEWER_TIMEOUT_S)
                    viewers[viewer] = StatsReader(pools, recent=True)
                    selector.register(viewer, selectors.EVENT_READ)
                elif not answer(one, viewers[one], began):
                    selector.unregister(one)
                    del viewers[one]
                    one.close()
            if not accepts and time.monotonic() >= again:
                selector.register(listener, selectors.EVENT_READ)
                accepts = True


def answer(viewer: socket.socket, reader: StatsReader, began: float) -> bool:
    """Receive from the viewer, and send a report if a line has ended.

    Return False if the viewer is gone or does not read.
    """
    try:
        received = viewer.recv(4096)
        if b"\n" in received:
            viewer.sendall(json.dumps(report(reader, began)).encode() + b"\n")
    except OSError:
        return False
    return bool(received)


def report(reader: StatsReader, began: float) -> dict[str, Any]:
    """Return a report about this process to send as JSON, with the statistics since the reader's previous report."""
    return {
        "format": FORMAT,
        "pid": os.getpid(),
        "program": Path(sys.argv[0]).name if sys.argv else "",
        "seconds": time.monotonic() - began,
        "pools": [asdict(one) for one in reader.read().values()],
    }


def may_see(viewer: socket.socket) -> bool:
    """Return whether the process at the other end runs as this user or as root.

    Return True if the system does not report the user: the socket's mode also keeps other users out.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    packed = viewer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", packed)
    return user in (0, os.getuid())
