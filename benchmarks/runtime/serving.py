"""What takes requests (a server), and what can be measured (a contender): the two interfaces of this benchmark.

A peer's own process reads this file too: it needs torch and the standard library alone.
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
    """Answers many clients' requests for one expert."""

    def ask(self, direction: str) -> Ask:
        """Return a function that sends one request, waits, and returns its answer."""

    def close(self) -> None:
        """End what was started."""


@runtime_checkable
class AsyncServer(Server, Protocol):
    """One that coroutines can ask, too."""

    def ask_async(self, direction: str) -> AskAsync:
        """Return what ``ask`` does, for coroutines."""


class Contender(Protocol):
    """What is measured: a server with clients, or a bound without."""

    def measure(self, cell: Cell, effort: Effort) -> Sample:
        """Return one window of the cell's load."""

    def close(self) -> None:
        """End what was started."""


class InProcess:
    """A server and its clients in this process."""

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
    """Return one window of a cell's load, by clients of its kind."""
    if cell.kind == "threads":
        return with_threads(server.ask(cell.direction), asked, effort, cpu)
    if not isinstance(server, AsyncServer):
        raise TypeError(f"{cell}: expected a server that coroutines can ask, got {type(server).__name__}")
    return with_coroutines(server.ask_async(cell.direction), asked, effort, cpu)


def check(serve: Callable[[Expert], Server], patience: float = 30.0) -> str:
    """Return what is wrong with a server's answers; empty if nothing is.

    Clients of different sizes at once must each get their own rows' answer, forward and backward; and a lonely
    client's backward requests must train the expert exactly as a plain loop does, a step for each. ``patience`` is how
    many seconds an answer may take.
    """
    expert = Expert("small")
    server = serve(expert)
    for direction in DIRECTIONS:
        if fault := concurrent_answers(server, direction, patience):
            return fault  # left open: closing what does not answer could take forever
    server.close()
    return training(serve)


def concurrent_answers(server: Server, direction: str, patience: float, clients: int = 4) -> str:
    """Return what is wrong when clients of 1, 2 and 5 rows a request ask at once."""
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
    """Return what is wrong with gradients and parameters when a lonely client asks for backward."""
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
