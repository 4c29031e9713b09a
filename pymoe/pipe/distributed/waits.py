"""Ends the waits for other ranks that a process is in, from another of its threads."""

from __future__ import annotations

import contextlib
import re
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["end_waits", "is_about_connections"]

TAG = 2**30  # of messages that nobody sends


def end_waits(group: dist.ProcessGroup) -> None:
    """Let all that waits for messages of ``group`` in this process raise, now. The group is of no use afterwards.

    A wait in gloo cannot be ended from Python, but gloo closes all connections of a context when one of its waits takes
    longer than it may: so wait for a moment for a message that nobody sends. NCCL's operations are aborted; those raise
    nothing, what a stream waits for is done with then.
    """
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # what TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it
        if backend.name() != "gloo":
            with contextlib.suppress(RuntimeError):
                backend.abort()
            continue
        # A context for every network device; tags choose one. A connection that is broken already raises at once, and
        # leaves the others alone: so try every peer.
        contexts = max(1, len(getattr(backend.options, "_devices", ())))
        for peer in range(group.size()):
            for context in range(contexts if peer != group.rank() else 0):
                with contextlib.suppress(RuntimeError):
                    backend.recv([torch.empty(1)], peer, TAG + context).wait(timedelta(milliseconds=1))


def is_about_connections(error: BaseException) -> bool:
    """Whether an error says that a message could not be sent or received, which is seldom its own fault."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(
        re.search(r"gloo|nccl|pair closure|connection (was )?(closed|reset|refused|lost)|socket", str(error), re.I)
    )
