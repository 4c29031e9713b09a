"""Where a rank is, in memory that the other processes of its host can read, also after it was killed.

Beats tell it through a store, a few times a second. A page tells it to the action, and costs its rank a microsecond.
"""

from __future__ import annotations

import mmap
import os

from pymoe.pipe.distributed.failure import Position

__all__ = ["Page"]

SIZE = 128  # bytes


class Page:
    """One rank's; made by it, and opened by others by its process and number."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._memory = mmap.mmap(file, SIZE)

    @classmethod
    def make(cls) -> Page | None:
        """A new one; None: this system has none."""
        try:
            file = os.memfd_create("pymoe")
        except (OSError, AttributeError):
            return None
        os.ftruncate(file, SIZE)
        page = cls(file)
        page.write(None)
        return page

    @classmethod
    def open(cls, process: int, number: int) -> Page | None:
        """That of another process of this host, which must be alive; None: there is none, or it cannot be read."""
        if number < 0:
            return None
        try:
            file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        except OSError:
            return None
        if os.fstat(file).st_size != SIZE:  # the process has ended, and another has its number
            os.close(file)
            return None
        return cls(file)

    @property
    def number(self) -> int:
        """By which others find it, beside the number of the process."""
        return self._file

    def write(self, at: Position | None) -> None:
        """Where the rank is by now; None: between its steps."""
        text = "" if at is None else f"{at.stage} {at.micro_batch} {at.phase}"
        self._memory[:] = text.encode()[:SIZE].ljust(SIZE)

    def read(self) -> Position | None:
        """What was written last; None, too, if the rank is writing just now, or was killed while it did."""
        text = self._memory[:].decode(errors="replace").strip()
        try:
            stage, micro_batch, phase = text.split(" ", 2)
            return Position(phase, int(stage), int(micro_batch))
        except ValueError:
            return None

    def close(self) -> None:
        """Let go of it."""
        self._memory.close()
        os.close(self._file)
