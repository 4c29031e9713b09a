"""Lists the systems to measure, with their versions and their descriptions for the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runtime import hivemind_peer
from benchmarks.runtime.batcher import BatcherServer
from benchmarks.runtime.bounds import Direct
from benchmarks.runtime.ours import BackendServer, PoolServer
from benchmarks.runtime.scenario import Expert
from benchmarks.runtime.serving import Contender, InProcess, Server, check


@dataclass(frozen=True)
class System:
    """A system, which is one column of the tables."""

    name: str
    about: str
    open: Callable[[str], Contender]
    """Starts the system for the expert of a name."""
    check: Callable[[], str]
    """Returns the first fault of the system's answers; empty if they are right."""
    kinds: tuple[str, ...] = ("threads", "asyncio")
    version: Callable[[], str] = lambda: ""


PYMOE, POOL, HIVEMIND, BATCHER, DIRECT, READY = (
    "pymoe",
    "pymoe pool",
    "hivemind",
    "batcher",
    "direct",
    "ready batch",
)


def all_systems(hivemind_python: Path) -> dict[str, System]:
    """Return all systems by name."""

    def served(name: str, about: str, server: Callable[[Expert], Server]) -> System:
        def open_(expert: str) -> Contender:
            one = Expert(expert)
            return InProcess(server(one), one, time.process_time)

        return System(name, about, open_, lambda: check(server))

    def bound(name: str, about: str, ready_batch: bool) -> System:
        # A bound has no clients, so one kind suffices. The other systems' answers are checked against its answers.
        return System(name, about, lambda expert: Direct(Expert(expert), ready_batch), lambda: "", ("threads",))

    def check_hivemind() -> str:
        worker = hivemind_peer.HivemindProcess("small", hivemind_python)
        try:
            return worker.check()
        finally:
            worker.close()

    everyone = [
        served(PYMOE, "pymoe.runtime: ExpertBackend.forward_pool and backward_pool", BackendServer),
        served(POOL, "pymoe.runtime: TaskPool over the batcher's own functions", PoolServer),
        System(
            HIVEMIND,
            "ModuleBackend's pools and Runtime, in a process and an environment of their own",
            lambda expert: hivemind_peer.HivemindProcess(expert, hivemind_python),
            check_hivemind,
            version=lambda: hivemind_peer.version(hivemind_python),
        ),
        served(BATCHER, "queue.Queue and a thread in Python, takes what waits", BatcherServer),
        bound(DIRECT, "bound: a direct call for each request, in a plain loop", False),
        bound(READY, "bound: a direct call on the ready batch of all clients' rows", True),
    ]
    return {one.name: one for one in everyone}
