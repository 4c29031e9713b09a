"""How many bytes of messages and of their tensors a server holds. What exceeds it is refused before it is read."""

from __future__ import annotations

from typing import Any

from pymoe.remote.wire import MOST_BYTES
from pymoe.runtime import QueueFull

SIZE_KEY = "pymoe-bytes"
"""Metadata in which a client says how long its message is; who does not say gets room for the longest."""
MOST_IN_FLIGHT = 1 << 30


def said_size(metadata: Any) -> int:
    """Return the bytes that a request will have, by what its metadata say: from 0 to :data:`MOST_BYTES`."""
    for key, value in metadata or ():
        if key == SIZE_KEY and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
            return min(int(value), MOST_BYTES)
    return MOST_BYTES


class Room:
    """Bytes of messages that are being read or answered. For one thread."""

    def __init__(self, most: int = MOST_IN_FLIGHT) -> None:
        self.most = most
        self.used = 0

    def take(self, size: int) -> Place:
        """Return a context that holds room for ``size`` bytes; to enter it raises QueueFull if there is not enough."""
        return Place(self, size)


class Place:
    """Room that one message takes while the context is entered. (A generator would take several times as long.)"""

    __slots__ = ("_room", "_size")

    def __init__(self, room: Room, size: int) -> None:
        self._room, self._size = room, size

    def __enter__(self) -> None:
        room = self._room
        if room.used + self._size > room.most:
            raise QueueFull(f"requests of {room.used} bytes are under way, of at most {room.most}")
        room.used += self._size

    def __exit__(self, *exception: object) -> None:
        self._room.used -= self._size
