"""Ctrl-C (or SIGTERM) as a request to stop after the step in hand; a second one stops at once."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopRequest:
    def __init__(self) -> None:
        self.made = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.made:
            raise KeyboardInterrupt
        self.made = True
