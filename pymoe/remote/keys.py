"""Numbers of backward requests, by which a server tells a new one from another attempt."""

from __future__ import annotations

import threading


class Keys:
    """The numbers of one expert's backward requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()

    def new(self) -> int:
        """Return the next number, which stays open until it is :meth:`closed <close>`."""
        with self._lock:
            key, self._next = self._next, self._next + 1
            self._open.add(key)
            return key

    def close(self, key: int) -> None:
        """Note that no attempt under this number will follow."""
        with self._lock:
            self._open.discard(key)

    def ack(self) -> int:
        """Return the lowest number that is open: no attempt under those below will follow."""
        with self._lock:
            return min(self._open, default=self._next)
