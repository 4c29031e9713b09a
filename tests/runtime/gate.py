"""A batch that begins, and does not end until it is allowed to."""

from __future__ import annotations

import threading

from limits import LONG
from torch import Tensor


class Gate:
    """A batch function that waits until it is opened."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()

    def __call__(self, x: Tensor) -> Tensor:
        self.begun.set()
        assert self.open.wait(LONG)
        return x
