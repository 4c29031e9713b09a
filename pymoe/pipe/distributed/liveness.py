"""What the ranks of a group know of each other: heartbeats and the first failure, in the store of the process group.

On the same host the system tells more than heartbeats do, and at once: the pidfd of a process becomes readable when it
ends, and shared memory says where its rank was then.
"""

from __future__ import annotations

import json
import mmap
import os
import select
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = ["Failure", "Heartbeat", "HeartbeatStore", "Peer", "Position", "PositionPage", "RankError", "StoreLostError"]

PAGE_BYTES = 128


class Position(NamedTuple):
    """What a rank is doing. The phase is "forward", "backward", "loss", or any other word for it."""

    phase: str
    stage: int
    micro_batch: int
    """-1 stands for all of them."""

    def __str__(self) -> str:
        of = "" if self.micro_batch < 0 else f" of micro-batch {self.micro_batch}"
        return f"in the {self.phase}{of} in stage {self.stage}"


@dataclass(frozen=True)
class Failure:
    """Who failed, where, and how."""

    what: str
    """A sentence without its full stop."""
    rank: int | None = None
    at: Position | None = None
    error: str = ""
    """The traceback."""


class RankError(RuntimeError):
    """Another rank of a pipeline has failed, and this one cannot go on. The process group is of no further use.

    Attributes:
        rank: the rank of the group that failed. None: unknown.
        stage: where that rank was; None: outside of a stage, or unknown.
        micro_batch: as ``stage``.
        phase: "forward", "backward", "loss", or as the rank calls it; None: as ``stage``.
        error: what it raised, with its traceback; empty if its process has ended.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.what + (f"\n\nOn rank {failure.rank}:\n{failure.error}" if failure.error else ""))
        self.rank, self.error = failure.rank, failure.error
        at = failure.at
        self.phase = None if at is None else at.phase
        self.stage = None if at is None else at.stage
        self.micro_batch = None if at is None else at.micro_batch


def this_host() -> str:
    """Return a text equal in processes that see each other's process ids; empty where that cannot be known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass
class Heartbeat:
    """What a rank tells the others of itself a few times a second."""

    page: int
    """The file descriptor of its :class:`PositionPage`; -1: it has none."""
    host: str = field(default_factory=this_host)
    process: int = field(default_factory=os.getpid)
    count: int = 0
    """Of heartbeats so far."""
    steps: int = 0
    """That have ended."""
    at: Position | None = None
    """None: between its steps."""


class StoreLostError(RuntimeError):
    """The store cannot be reached any more: its process, or its host, has ended."""


class HeartbeatStore:
    """Heartbeats and the first failure of a group, in its store. For several threads.

    Every method raises :class:`StoreLostError` once the store is lost.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._shared = group.get_group_store()  # the store's server ends with the last reference to it
        # A connection of its own: a wait of another thread may block the shared one.
        self._store = dist.PrefixStore("pymoe.pipe", self._shared.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=30))
        self._lost: str | None = None

    def write(self, rank: int, heartbeat: Heartbeat) -> None:
        """Write the heartbeat of a rank. It is there when this returns."""
        self._call("set", f"rank {rank}", json.dumps(vars(heartbeat)))
        self._call("check", [f"rank {rank}"])  # setting does not wait for the store

    def read(self, rank: int) -> Heartbeat | None:
        """Return the newest heartbeat of a rank; None: there is none yet."""
        return self._record(f"rank {rank}", Heartbeat)

    def report(self, failure: Failure) -> Failure:
        """Write a failure unless there is one already. Return the first one."""
        self._call("compare_set", "failure", "", json.dumps(vars(failure)))
        return self._record("failure", Failure)

    def failure(self) -> Failure | None:
        """Return the first failure; None: no rank has failed."""
        return self._record("failure", Failure)

    def acknowledge(self, ranks: int) -> int:
        """Add to the number of ranks that know of the failure. Return it."""
        return self._call("add", "acknowledged", ranks)

    def _record(self, key: str, kind: type[Any]) -> Any:
        if not self._call("check", [key]):
            return None
        found = json.loads(self._call("get", key))
        return kind(**found | {"at": found["at"] and Position(*found["at"])})

    def _call(self, method: str, *args: Any) -> Any:
        if self._lost is None:
            try:
                return getattr(self._store, method)(*args)
            except RuntimeError as error:
                self._lost = str(error)
        raise StoreLostError(self._lost)  # for any further call torch would print a page of warnings


class PositionPage:
    """Shared memory with the position of a rank, which others can read also after its process was killed.

    Heartbeats tell the position a few times a second; here it is exact, and writing it takes microseconds.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        self._memory = mmap.mmap(file, PAGE_BYTES)

    @classmethod
    def create(cls) -> PositionPage | None:
        """Make the page of this process; None: the system does not offer such memory."""
        try:
            file = os.memfd_create("pymoe")
        except (OSError, AttributeError):
            return None
        os.ftruncate(file, PAGE_BYTES)
        return cls(file)

    @classmethod
    def open(cls, process: int, file: int) -> PositionPage | None:
        """Open that of another process, by its file descriptor there; None: it cannot be read (any more)."""
        try:
            return cls(os.open(f"/proc/{process}/fd/{file}", os.O_RDWR))
        except (OSError, ValueError):
            return None

    def write(self, at: Position | None) -> None:
        """Write where the rank is by now; None: between its steps."""
        self._memory[:] = json.dumps(at).encode()[:PAGE_BYTES].ljust(PAGE_BYTES)

    def read(self) -> Position | None:
        """Return what was written last; None also if the rank is writing, or was killed while it was."""
        try:
            return Position(*json.loads(self._memory[:]))
        except (ValueError, TypeError):
            return None

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self.file)


class Peer:
    """Another rank, from its first heartbeat on."""

    def __init__(self, rank: int, heartbeat: Heartbeat) -> None:
        self.rank = rank
        self.heartbeat = heartbeat
        self.silent_s = 0.0
        """Seconds without a heartbeat while this rank had its own."""
        self.has_ended = False
        """Whether its process had ended when it was last looked at."""
        self.pidfd: int | None = None
        self._page: PositionPage | None = None
        if heartbeat.host and heartbeat.host == this_host():
            self._page = PositionPage.open(heartbeat.process, heartbeat.page)
            try:
                self.pidfd = os.pidfd_open(heartbeat.process)
            except ProcessLookupError:
                self.has_ended = True
            except (OSError, AttributeError):
                pass  # not offered by this system: heartbeats have to do

    @property
    def is_watched(self) -> bool:
        """Whether the system tells when its process ends, so that its silence means nothing."""
        return self.pidfd is not None or self.has_ended

    def look(self) -> bool:
        """Return whether its process has ended, as far as the system tells."""
        wait_for_end([self], 0.0)
        return self.has_ended

    def failure(self, patience: float) -> Failure | None:
        """Return how it has failed: its process has ended, or has been silent for longer than ``patience`` seconds."""
        if self.has_ended:
            return Failure(f"the process of {self}, has ended", self.rank, self.at)
        if not self.is_watched and self.silent_s > patience:
            return Failure(f"nothing has been heard for {self.silent_s:.0f} s of {self}", self.rank, self.at)
        return None

    def hear(self, heartbeat: Heartbeat | None) -> bool:
        """Take its newest heartbeat. Return whether there is one since the last time."""
        before = self.heartbeat.count
        self.heartbeat = heartbeat or self.heartbeat
        return self.heartbeat.count != before

    @property
    def at(self) -> Position | None:
        """Where it is, or was when it ended; None: between its steps. On another host: where it was a heartbeat ago."""
        return self.heartbeat.at if self._page is None else self._page.read()

    def __str__(self) -> str:
        return f"rank {self.rank}, last seen {self.at or 'between its steps'}"

    def close(self) -> None:
        """Release the process and its page."""
        if self._page is not None:
            self._page.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
        self._page = self.pidfd = None


def wait_for_end(peers: Iterable[Peer], seconds: float) -> None:
    """Wait until the process of a peer ends that had not before, or the time is over."""
    running = {peer.pidfd: peer for peer in peers if peer.pidfd is not None and not peer.has_ended}
    poll = select.poll()
    for pidfd in running:
        poll.register(pidfd, select.POLLIN)
    for pidfd, _ in poll.poll(round(seconds * 1000)):
        running[pidfd].has_ended = True
