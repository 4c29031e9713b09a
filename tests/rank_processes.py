"""Runs the ranks of a group in processes on this machine, and lets them fail. Each group serves one test."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from limits import LONG
from rank_groups import function_at, place_of

__all__ = ["Ranks", "are_told", "ranks"]

LIMIT = LONG // 2  # seconds: half the timeout of a group
_context = multiprocessing.get_context("forkserver")
# Otherwise importing these takes seconds in each process.
_context.set_forkserver_preload(["pytest", "pymoe.pipe.distributed", "pymoe.ep"])


def free_address() -> str:
    """Return a free address for a process group."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


class Ranks:
    """The processes of a group, and their reports: pairs of a word and a value.

    Each process reports through its own pipe. If a rank were killed while it used a shared queue, the queue would stay
    locked for all.
    """

    def __init__(self, body: Callable[..., None], count: int, **options: Any) -> None:
        self.processes = []
        self._pipes: dict[Connection, int] = {}
        address = free_address()
        for rank in range(count):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(target=_run, args=(place_of(body), rank, address, there, options), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._pipes[here] = rank

    def wait_for(self, word: str, count: int) -> dict[int, tuple[str, Any]]:
        """Wait until ``count`` ranks have reported ``word``; return the first such report of each."""
        return self._collect(count, lambda what: what == word)

    def ends(self, count: int) -> dict[int, tuple[str, Any]]:
        """Wait until ``count`` ranks have ended; return their reports, the first ones other than "step"."""
        return self._collect(count, lambda what: what != "step")

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def _collect(self, count: int, counts: Callable[[str], bool]) -> dict[int, tuple[str, Any]]:
        found: dict[int, tuple[str, Any]] = {}
        limit = time.monotonic() + LIMIT
        while len(found) < count:
            ready = wait(list(self._pipes), max(0.0, limit - time.monotonic()))
            assert ready, f"after {LIMIT:.0f} s, or with all ranks gone, only {found} was reported"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    what, value = pipe.recv()
                except EOFError:
                    del self._pipes[pipe]
                    continue
                if counts(what):
                    found.setdefault(self._pipes[pipe], (what, value))
        return found


def _run(place: tuple[str, str, str], rank: int, address: str, connection: Connection, options: dict[str, Any]) -> None:
    function_at(*place)(rank, address, connection, **options)


@contextlib.contextmanager
def ranks(body: Callable[..., None], count: int, **options: Any) -> Iterator[Ranks]:
    """Start processes that run ``body(rank, address, connection, **options)``, and end them afterwards."""
    started = Ranks(body, count, **options)
    try:
        yield started
    finally:
        for process in started.processes:
            process.kill()
        for process in started.processes:
            process.join()


def are_told(ends: dict[int, tuple[str, Any]], victim: int) -> list[Any]:
    """Check that all ranks except ``victim`` ended because it failed; return the failures that they reported."""
    assert {what for what, _ in ends.values()} == {"told"}, ends
    assert set(ends) == set(range(len(ends) + 1)) - {victim}
    assert {told[0] for _, told in ends.values()} == {victim}, ends
    return [told for _, told in ends.values()]
