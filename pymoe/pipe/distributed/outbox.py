"""What a rank has sent and what has not arrived yet.

Groups whose works tell that they are done are asked; gloo's do not, so a thread waits for them.
"""

from __future__ import annotations

import queue
import threading
from typing import Any, NamedTuple

import torch

from pymoe.pipe.distributed.waiting import wait

__all__ = ["Polled", "Posted", "Waited"]


class Posted(NamedTuple):
    work: Any
    tensor: torch.Tensor
    peer: int
    what: str


class Polled:
    """Sends that are asked whether they are done."""

    def __init__(self) -> None:
        self._under_way: list[Posted] = []

    def add(self, sent: Posted) -> None:
        self._under_way = [sent for sent in self._under_way if not sent.work.is_completed()]
        self._under_way.append(sent)

    def flush(self) -> None:
        under_way, self._under_way = self._under_way, []
        for sent in under_way:
            wait(sent.work, sent.peer, f"the arrival of {sent.what}")


class Waited:
    """Sends that a thread waits for, one after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Posted | threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, sent: Posted) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_all, name="pymoe-pipe-sends", daemon=True)
            self._thread.start()
        self._queue.put(sent)

    def flush(self) -> None:
        if self._thread is not None:
            all_done = threading.Event()
            self._queue.put(all_done)
            all_done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait_for_all(self) -> None:
        while True:
            next_one = self._queue.get()
            if isinstance(next_one, threading.Event):
                next_one.set()
                continue
            try:
                wait(next_one.work, next_one.peer, f"the arrival of {next_one.what}")
            except BaseException as error:
                self._error = self._error or error
            del next_one
