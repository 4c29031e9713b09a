"""Defines this benchmark's two interfaces: servers, which answer requests, and contenders, which can be measured.

Peers' processes import this file too, so it imports only torch and the standard library.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from benchmarks.runtime.clients import (
    Ask,
    AskAsync,
    Clock,
    Effort,
    Log,
    Sample,
    Window,
    summary,
    with_coroutines,
    with_threads,
)
from benchmarks.runtime.scenario import (
    DIRECTIONS,
    TOLERANCE,
    Cell,
    Expert,
    Request,
    answers,
    is_right,
    prepared,
    requests,
    trajectory,
)


class Server(Protocol):
    """Answers requests of many clients for one expert."""

    def ask(self, direction: str) -> Ask:
        """Return a function that sends one request, waits, and returns its answer."""

    def close(self) -> None:
        """Stop all threads and processes of the server."""


@runtime_checkable
class AsyncServer(Server, Protocol):
    """A server that answers coroutines, too."""

    def ask_async(self, direction: str) -> AskAsync:
        """Return a coroutine function that sends one request and returns its answer."""


class Contender(Protocol):
    """Something to measure: a server with its clients, or a bound that has no clients."""

    def measure(self, cell: Cell, effort: Effort) -> Sample:
        """Measure one window of the cell's load."""

    def close(self) -> None:
        """Stop all threads and processes of the contender."""


class InProcess:
    """Measures a server whose clients run in this process."""

    def __init__(self, server: Server, expert: Expert, cpu: Clock) -> None:
        self.server, self.expert, self.cpu = server, expert, cpu

    def measure(self, cell: Cell, effort: Effort) -> Sample:
        asked, expected = prepared(cell)
        return summary(*load(self.server, cell, asked, effort, self.cpu), expected)

    def close(self) -> None:
        self.server.close()


def load(
    server: Server, cell: Cell, asked: list[list[Request]], effort: Effort, cpu: Clock
) -> tuple[Window, list[Log]]:
    """Run a cell's load with clients of its kind; return the window and the clients' logs."""
    if cell.kind == "threads":
        return with_threads(server.ask(cell.direction), asked, effort, cpu)
    if not isinstance(server, AsyncServer):
        raise TypeError(f"{cell}: expected a server that coroutines can ask, got {type(server).__name__}")
    return with_coroutines(server.ask_async(cell.direction), asked, effort, cpu)


def check(serve: Callable[[Expert], Server], patience: float = 30.0) -> str:
    """Return the first fault of a server's answers; empty if they are right.

    Concurrent clients with requests of different sizes must each get the answer to their own rows, forward and
    backward. Backward requests of a single client must train the expert exactly as a plain loop does, with one step
    per request. An answer may take ``patience`` seconds.
    """
    expert = Expert("small")
    server = serve(expert)
    for direction in DIRECTIONS:
        if fault := concurrent_answers(server, direction, patience):
            return fault  # does not close the server, which may hang
    server.close()
    return training(serve)


def concurrent_answers(server: Server, direction: str, patience: float, clients: int = 4) -> str:
    """Return the first fault seen by concurrent clients with 1, 2 and 5 rows per request; empty if there is none."""
    asked = [one for rows in (1, 2, 5) for one in requests(Cell("small", direction, rows, clients, "threads"))]
    expected = answers(Expert("small"), asked)
    ask = server.ask(direction)
    faults: list[str] = []

    def client(own: list[Request], right: list[Tensor]) -> None:
        for request, wanted in [*zip(own, right, strict=True)] * 3:
            try:
                got = ask(*request)
            except Exception as error:
                faults.append(f"{direction}: {type(error).__name__}: {error}")
                return
            if not is_right(got, wanted):
                faults.append(f"{direction}: a wrong answer to a request of {len(wanted)} rows")

    threads = [threading.Thread(target=client, args=pair, daemon=True) for pair in zip(asked, expected, strict=True)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            return f"{direction}: a request was not answered within {patience:g} s"
    return faults[0] if faults else ""


def training(serve: Callable[[Expert], Server], learning_rate: float = 0.05) -> str:
    """Return the first fault in gradients and parameters when one client sends backward requests; empty if none."""
    expert = Expert("small", learning_rate)
    server = serve(expert)
    try:
        ask = server.ask("backward")
        for step, (request, wanted, parameters) in enumerate(trajectory(learning_rate)):
            if not is_right(ask(*request), wanted):
                return f"training: the gradient of step {step} is wrong"
            for mine, theirs in zip(expert.parameters(), parameters, strict=True):
                if not torch.allclose(mine, theirs, rtol=0, atol=TOLERANCE * float(theirs.abs().max())):
                    return f"training: the parameters after step {step} are wrong"
    finally:
        server.close()
    return ""
