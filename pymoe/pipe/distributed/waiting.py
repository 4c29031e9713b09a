"""How a rank waits for others, and whom it tells when one of its stages fails."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist

__all__ = ["Unwatched", "Watcher", "wait", "watcher"]


class Watcher(Protocol):
    """Ends the waits of this rank when another has failed, and tells the others of a failure here."""

    def begin(self) -> None:
        """A step begins."""

    def at(self, phase: str, stage: int, micro_batch: int) -> None:
        """What this rank begins to do."""

    def end(self) -> None:
        """A step has ended well."""

    def fail(self, error: BaseException) -> BaseException | None:
        """``error`` is about to be raised. Returns what to raise in its place, if anything."""


class Unwatched:
    """Nobody is told: others wait as long as torch does."""

    def begin(self) -> None:
        """Nothing."""

    def at(self, phase: str, stage: int, micro_batch: int) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def fail(self, error: BaseException) -> BaseException | None:
        """Nothing."""
        return None


def wait(work: Any, peer: int, what: str) -> None:
    """Until a ``dist.Work`` between this rank and ``peer``, for ``what``, is done.

    Raises:
        RuntimeError: it failed.
    """
    try:
        work.wait()
    except RuntimeError as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"pymoe.pipe: while it waited for {what}; the other was rank {peer}")
        raise


def watcher(group: dist.ProcessGroup) -> Watcher:
    """Of the ranks of a group."""
    return Unwatched()
