"""Runs a backward pass wholly on the thread that starts it.

Autograd has a thread for each GPU. Unless told otherwise, it runs there all nodes whose gradients are on the GPU,
whichever thread has started the pass. So a node that waits for another pass on the same GPU, as a client's node waits
for its expert, would wait forever: the other pass needs the thread on which the node waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pymoe._torch_private import is_multithreading_enabled, set_multithreading_enabled

Result = TypeVar("Result")


def on_this_thread(run: Callable[..., Result], *args: object, **kwargs: object) -> Result:
    """Call ``run``, which runs a backward pass, and return its result; no other thread runs nodes of the pass."""
    if not is_multithreading_enabled():
        return run(*args, **kwargs)
    set_multithreading_enabled(False)
    try:
        return run(*args, **kwargs)
    finally:
        set_multithreading_enabled(True)
