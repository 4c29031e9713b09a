"""How many bytes of messages and of their tensors a server holds. What exceeds it is refused before it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Hold room for ``size`` bytes while the block runs; raises QueueFull if there is not enough."""
        if self.used + size > self.most:
            raise QueueFull(f"requests of {self.used} bytes are under way, of at most {self.most}")
        self.used += size
        try:
            yield
        finally:
            self.used -= size
