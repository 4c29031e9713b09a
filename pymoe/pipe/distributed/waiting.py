"""How a rank waits for a message. Another rank that fails ends the wait (:mod:`.watch`)."""

from __future__ import annotations

from typing import Any

__all__ = ["wait"]


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
