"""What the ranks of a group know of each other: heartbeats, and where each one was when it failed.

Heartbeats are in the store of the process group. On the same host the system tells more than they do, and at once: the
pidfd of a process becomes readable when it ends, and shared memory says where its rank was then.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

HEARTBEAT_S = 0.2  # between two heartbeats
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


class RankError(RuntimeError):
    """Another rank of a pipeline has failed, and this one cannot go on. The process group is of no further use.

    Attributes:
        rank: the rank of the group that failed. None: unknown.
        stage: where that rank was; None: outside of a stage, or unknown.
        micro_batch: as ``stage``.
        phase: "forward", "backward", "loss", or as the rank calls it; None: as ``stage``.
        error: what it raised, with its traceback; empty if its process has ended.
    """

    def __init__(self, what: str, rank: int | None = None, at: Position | None = None, error: str = "") -> None:
        super().__init__(what + (f"\n\nOn rank {rank}:\n{error}" if error else ""))
        self.rank, self.error = rank, error
        self.phase: str | None
        self.stage: int | None
        self.micro_batch: int | None
        self.phase, self.stage, self.micro_batch = at or (None, None, None)


def this_host() -> str:
    """Return a text equal in processes that see each other's process ids; empty where that cannot be known."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


class GroupStore:
    """Records that all ranks of a group read and write, in its store. For several threads.

    Once the store is lost, nothing is written any more, and no records are found.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._shared = group.get_group_store()  # the store's server ends with the last reference to it
        # A connection of its own: a wait of another thread may block the shared one.
        self._store = dist.PrefixStore("pymoe.pipe", self._shared.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=30))
        self.lost: str | None = None
        """Why the store cannot be reached any more: its process, or its host, has ended. None: it can be reached."""

    def write(self, key: str, record: object) -> None:
        """Write a record. It is there when this returns."""
        self._call("set", key, pickle.dumps(record))
        self._call("check", [key])  # setting does not wait for the store

    def write_first(self, key: str, record: object) -> Any:
        """Write a record unless there is one already. Return the one that is there then."""
        found = self._call("compare_set", key, "", pickle.dumps(record))
        return record if found is None else pickle.loads(found)

    def read(self, key: str) -> Any:
        """Return a record; None: there is none yet."""
        found = self._call("get", key) if self._call("check", [key]) else None
        return None if found is None else pickle.loads(found)

    def _call(self, method: str, *args: Any) -> Any:
        if self.lost is None:  # for any further call torch would print a page of warnings
            try:
                return getattr(self._store, method)(*args)
            except RuntimeError as error:
                self.lost = str(error)
        return None


@dataclass
class Heartbeat:
    """What a rank tells the others of itself a few times a second."""

    page: int
    """The file descriptor of its :func:`new_page`; -1: it has none."""
    host: str = field(default_factory=this_host)
    process: int = field(default_factory=os.getpid)
    count: int = 0
    """Of heartbeats so far."""
    steps: float = 0
    """That have ended; infinite once the rank knows of a failure, since it makes no more."""
    at: Position | None = None
    """None: between its steps."""


def new_page() -> int:
    """Return a file descriptor of memory that others can read also after this process was killed; -1: there is none.

    The heartbeats in the store tell where a rank is a few times a second. Here it is exact, and costs microseconds.
    """
    with contextlib.suppress(OSError, AttributeError):
        file = os.memfd_create("pymoe")
        os.ftruncate(file, PAGE_BYTES)
        return file
    return -1


class Peer:
    """Another rank, from its first heartbeat on."""

    def __init__(self, rank: int, heartbeat: Heartbeat) -> None:
        self.rank = rank
        self.silent_s = 0.0
        """Seconds without a heartbeat while this rank had its own."""
        self.has_ended = False
        """Whether its process had ended when it was last looked at."""
        self.pidfd: int | None = None
        self._heartbeat = heartbeat
        self._page: mmap.mmap | None = None
        if not heartbeat.host or heartbeat.host != this_host():
            return
        try:
            self.pidfd = os.pidfd_open(heartbeat.process)
            with open(f"/proc/{heartbeat.process}/fd/{heartbeat.page}", "rb") as file:
                self._page = mmap.mmap(file.fileno(), PAGE_BYTES, access=mmap.ACCESS_READ)
        except ProcessLookupError:
            self.has_ended = True
        except (OSError, ValueError, AttributeError):
            pass  # not offered by this system: the store has to do

    @property
    def is_watched(self) -> bool:
        """Whether the system tells when its process ends, so that its silence means nothing."""
        return self.pidfd is not None or self.has_ended

    @property
    def heartbeat(self) -> Heartbeat:
        """On the same host that of the moment, or of its end; else the last that was heard."""
        if self._page is not None:
            with contextlib.suppress(Exception):  # whatever half a record raises
                steps, *at = pickle.loads(self._page[:])
                self._heartbeat = replace(self._heartbeat, steps=steps, at=Position(*at) if at else None)
        return self._heartbeat

    def hear(self, store: GroupStore) -> bool:
        """Take its newest heartbeat from the store, if it is nowhere else. Return whether there is one to be had."""
        if self._page is None:
            heard = store.read(f"rank {self.rank}")
            if heard is None:
                return False
            self.silent_s = 0.0 if heard.count != self._heartbeat.count else self.silent_s + HEARTBEAT_S
            self._heartbeat = heard
        return True

    def failure(self, patience: float) -> RankError | None:
        """Return how it has failed: its process has ended, or has been silent for longer than ``patience`` seconds."""
        if self.has_ended:
            what = f"the process of {self}, has ended"
        elif not self.is_watched and self.silent_s > patience:
            what = f"nothing has been heard for {self.silent_s:.0f} s of {self}"
        else:
            return None
        return RankError(what, self.rank, self.heartbeat.at)

    def __str__(self) -> str:
        return f"rank {self.rank}, last seen {self.heartbeat.at or 'between its steps'}"
