"""Detects failures: when a rank dies or raises, the others stop waiting for it and report why.

A thread of every rank writes heartbeats into the store of the process group, reads the other ranks' heartbeats, and
checks there whether a rank has failed. On the same host, failures are noticed immediately: the pidfd of a process
becomes readable when the process ends, and shared memory tells what its rank was doing then. The end of a process on
another host is noticed when a connection to it breaks, or when it has been silent for ``patience`` seconds. A rank that
notices a failure reports it to the store, where only the first report counts. The thread of every rank then aborts its
rank's waits, and the step raises ``RankError`` with the cause.
"""

from __future__ import annotations

import contextlib
import copy
import math
import mmap
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from pymoe._gloo_at_exit import wait_for_gloo_at_exit
from pymoe._ranks import GroupStore, Process, abort_waits, is_about_connections

# Heartbeats: the messages by which ranks learn each other's state.

HEARTBEAT_S = 0.2  # seconds between two heartbeats
PAGE_BYTES = 128


class Position(NamedTuple):
    """Says what a rank is doing. The phase is a word such as "forward", "backward" or "loss"."""

    phase: str
    stage: int
    micro_batch: int
    """-1 stands for all micro-batches."""

    def __str__(self) -> str:
        of = "" if self.micro_batch < 0 else f" of micro-batch {self.micro_batch}"
        return f"in the {self.phase}{of} in stage {self.stage}"


class RankError(RuntimeError):
    """Another rank of a pipeline has failed, and this one cannot continue. The process group cannot be used any more.

    Attributes:
        rank: the rank of the group that failed. None: unknown.
        stage: the stage that the rank was running; None: no stage, or unknown.
        micro_batch: the micro-batch that the rank was running; -1: all; None: no stage, or unknown.
        phase: what the rank was doing, such as "forward", "backward" or "loss"; None: unknown.
        error: the error that the rank raised, with its traceback, as text; empty if the rank raised none.
    """

    def __init__(self, what: str, rank: int | None = None, at: Position | None = None, error: str = "") -> None:
        super().__init__(what + (f"\n\nOn rank {rank}:\n{error}" if error else ""))
        self.rank, self.error = rank, error
        self.phase: str | None
        self.stage: int | None
        self.micro_batch: int | None
        self.phase, self.stage, self.micro_batch = at or (None, None, None)


@dataclass
class Heartbeat:
    """The message with which a rank tells the others its state, a few times a second."""

    page: int
    """The file descriptor of the rank's :func:`new_page`; -1: the rank has none."""
    process: Process = field(default_factory=Process.own)
    count: int = 0
    """The number of heartbeats so far."""
    steps: float = 0
    """Number of finished steps; infinite once the rank knows of a failure, since no further step can succeed."""
    at: Position | None = None
    """The rank's position; None between steps."""


def new_page() -> int:
    """Return the file descriptor of memory that other processes can read even after this one is killed; -1 if the
    system has no such memory.

    Heartbeats in the store give a rank's position a few times a second. This memory gives the current position, and
    writing to it takes microseconds.
    """
    with contextlib.suppress(OSError, AttributeError):
        file = os.memfd_create("pymoe")
        os.ftruncate(file, PAGE_BYTES)
        return file
    return -1


class Peer:
    """The state of another rank, as seen by this rank. Created when the other rank's first heartbeat arrives."""

    def __init__(self, rank: int, heartbeat: Heartbeat) -> None:
        self.rank = rank
        self.silent_s = 0.0
        """Seconds without a heartbeat from the peer, counted only while this rank's own thread was running."""
        self.has_ended = False
        """True if the peer's process had ended when this was last checked."""
        self.pidfd: int | None = None
        self._heartbeat = heartbeat
        self._page: mmap.mmap | None = None
        process = heartbeat.process
        if not process.is_here():
            return
        try:
            self.pidfd = os.pidfd_open(process.id)
            with open(f"/proc/{process.id}/fd/{heartbeat.page}", "rb") as file:
                self._page = mmap.mmap(file.fileno(), PAGE_BYTES, access=mmap.ACCESS_READ)
        except (OSError, ValueError, AttributeError):
            pass  # the process has ended, or the system has no pidfds: rely on the heartbeats in the store
        self.has_ended = process.has_ended()

    @property
    def is_watched(self) -> bool:
        """Return whether the system reports the end of the peer's process; its silence is then no failure."""
        return self.pidfd is not None or self.has_ended

    @property
    def heartbeat(self) -> Heartbeat:
        """Return the peer's heartbeat. If the peer's page of shared memory is mapped, ``steps`` and ``at`` are read
        from it now, even after the peer has ended; otherwise this is the heartbeat that was last read from the store.
        """
        if self._page is not None:
            with contextlib.suppress(Exception):  # fails while the peer writes the record
                steps, *at = pickle.loads(self._page[:])
                self._heartbeat = replace(self._heartbeat, steps=steps, at=Position(*at) if at else None)
        return self._heartbeat

    def hear(self, store: GroupStore) -> bool:
        """Read the peer's heartbeat from the store, unless its page is mapped. Return False if the read fails."""
        if self._page is None:
            heard = store.read(f"rank {self.rank}")
            if heard is None:
                return False
            self.silent_s = 0.0 if heard.count != self._heartbeat.count else self.silent_s + HEARTBEAT_S
            self._heartbeat = heard
        return True

    def failure(self, patience: float) -> RankError | None:
        """Return an error if the peer's process has ended. If the system does not watch it, also return an error if the
        peer has been silent for more than ``patience`` seconds. Otherwise return None.
        """
        if self.has_ended:
            what = f"the process of {self}, has ended"
        elif not self.is_watched and self.silent_s > patience:
            what = f"nothing has been heard for {self.silent_s:.0f} s of {self}"
        else:
            return None
        return RankError(what, self.rank, self.heartbeat.at)

    def __str__(self) -> str:
        return f"rank {self.rank}, last seen {self.heartbeat.at or 'between its steps'}"


# The failure detector.

PATIENCE_S = 30.0  # silence after which a rank on another host counts as failed
SUSPICION_S = 3.0  # silence after which a rank counts as failed if a connection to it has broken
GRACE_S = 3.0  # time limit for the others' first heartbeats, and for the others to read a report of a failure
STORE_TIMEOUT_S = 30.0  # time limit of one call to the store
LEAVE_S = 60.0  # a finished rank waits this long for the others to end their steps


class FailureDetector:
    """The failure detector of one rank; :func:`watching` makes it.

    All ranks of the group run the same steps. A step that fails on any rank fails on every rank: with the original
    error on the rank that raised it, with :class:`RankError` on the others. All later steps fail, too. Stages report
    their position and their errors. Errors outside of stages, such as in a loss function or in loading data, are
    reported when they end the process or, in programs that continue after an error, when they leave a ``with`` block of
    the detector::

        with watching(group):
            schedule.step(...)
    """

    def __init__(self, group: dist.ProcessGroup, patience: float) -> None:
        self._groups = {group}
        """The groups in which waits are aborted when a rank fails."""
        self._rank, self._ranks = group.rank(), group.size()
        self._patience = patience
        self._store = GroupStore(group, "pymoe.pipe", STORE_TIMEOUT_S)
        self._peers: list[Peer] = []
        self._heartbeat = Heartbeat(new_page())
        self._page = mmap.mmap(self._heartbeat.page, PAGE_BYTES)
        self._lock, self._page_lock = threading.Lock(), threading.Lock()
        self._failure: RankError | None = None
        self._in_step = False
        self._thread: threading.Thread | None = None
        self._is_leaving = False
        self._write()
        # Not atexit, because multiprocessing's processes, and so torch's spawn, do not run it.
        Finalize(None, self._leave, exitpriority=10)
        wait_for_gloo_at_exit()

    # ------------------------------------------------------------------------------------------ the rank's own thread

    def add(self, *groups: dist.ProcessGroup) -> None:
        """Add groups in which waits are aborted when a rank fails."""
        self._groups.update(groups)

    def first(self, key: str, record: object) -> Any:
        """Write ``record`` under ``key`` unless a rank already has. Return the first record; ``record`` itself if the
        store is lost or there are no other ranks.
        """
        return self._store.write_first(key, record) if self._ranks > 1 else record

    def begin(self) -> None:
        """Begin a step unless one is running. Raise RankError if a rank failed. If there are other ranks, the first
        call starts the watchdog's thread, and sets ``sys.excepthook`` to report errors that end this process.
        """
        self._check()
        if self._ranks == 1:
            return
        if self._thread is None:
            self._wait_until(lambda: self._know_all() or self._store.lost is not None, GRACE_S)
            self._thread = threading.Thread(target=self._watch, name="pymoe.pipe.watchdog", daemon=True)
            self._thread.start()
            self._excepthook, sys.excepthook = sys.excepthook, self._uncaught
        self._in_step = True

    def at(self, phase: str, stage: int, micro_batch: int) -> None:
        """Record what this rank is about to do. Raise RankError if a rank has failed."""
        self._show(Position(phase, stage, micro_batch))
        self._check()

    def end(self) -> None:
        """End a step that succeeded on this rank. Raise RankError if another rank has failed meanwhile."""
        self._in_step = False
        self._check()
        self._show(None, steps=1)
        self._write()  # if the store is lost, the next step reports why

    def fail(self, error: BaseException) -> RankError | None:
        """Report that a step is about to fail on this rank with ``error``.

        If another rank failed first, return the error to raise instead of ``error``; else return None.
        """
        failure = self._failure
        if isinstance(error, RankError) or (failure is not None and failure.rank == self._rank):
            self._in_step = False
            return None  # this failure has been reported before
        at = self._heartbeat.at
        one_line = "".join(traceback.format_exception_only(type(error), error)).strip()
        what = f"rank {self._rank} failed {at or 'between its steps'}: {one_line}"
        if is_about_connections(error):
            # Most likely another rank's failure has caused this error; the watchdog's thread will notice that failure.
            self._patience = min(self._patience, SUSPICION_S)
            self._wait_until(lambda: self._failure is not None, SUSPICION_S + 2.0)
            if self._failure is None:
                what += f"; the others: {'; '.join(map(str, self._peers))}"
        failure = self._report(RankError(what, self._rank, at, "".join(traceback.format_exception(error)).strip()))
        self._in_step = False
        self._wait_until(self._others_are_done, GRACE_S)  # the store may be in this process, which may exit now
        abort_waits(tuple(self._groups))  # so that the threads that send stop waiting
        return None if failure.rank == self._rank else copy.copy(failure)

    def __enter__(self) -> FailureDetector:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            if self._in_step:  # else the block has already ended the step
                self.end()
        elif (other := self.fail(error)) is not None and isinstance(error, Exception):
            raise other from error

    def _uncaught(self, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        """Report an error that ends this process."""
        self.fail(error)
        self._excepthook(kind, error, tb)

    def _leave(self) -> None:
        """Wait until the other ranks are done, because the store may end with this process; then stop the thread."""
        if not self._in_step:
            self._wait_until(self._others_are_done, LEAVE_S if self._failure is None else GRACE_S)
        self._is_leaving = True
        if self._thread is not None:
            self._thread.join(5.0)

    def _check(self) -> None:
        if self._failure is not None:
            raise copy.copy(self._failure)

    def _show(self, at: Position | None, steps: float = 0) -> None:
        """Add ``steps`` to the number of finished steps, and show it and this rank's position to ranks on this host."""
        with self._page_lock:  # the rank's own thread and the watchdog thread may call this at the same time
            self._heartbeat.steps += steps
            self._heartbeat.at = at
            self._page[:] = pickle.dumps((self._heartbeat.steps, *(at or ())))[:PAGE_BYTES].ljust(PAGE_BYTES)

    def _know_all(self) -> bool:
        """Add to the peers each rank whose first heartbeat has arrived. Return whether all other ranks are peers now.

        The end of a process before its first heartbeat goes unnoticed.
        """
        for rank in set(range(self._ranks)) - {self._rank, *(peer.rank for peer in self._peers)}:
            if (heartbeat := self._store.read(f"rank {rank}")) is not None:
                self._peers.append(Peer(rank, heartbeat))
        return len(self._peers) == self._ranks - 1

    def _others_are_done(self) -> bool:
        """Return whether every other rank has finished as many steps as this one, knows of the failure, or has ended.

        A rank also counts as done if it is the one that failed, if it has never sent a heartbeat, or if it can no
        longer be heard because the store is lost.
        """
        failed = None if self._failure is None else self._failure.rank
        late = [peer for peer in self._peers if peer.rank != failed and peer.heartbeat.steps < self._heartbeat.steps]
        return not any([peer.hear(self._store) and not peer.has_ended for peer in late])

    def _wait_until(self, is_so: Callable[[], bool], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not is_so() and time.monotonic() < limit:
            self._sleep(0.02)

    def _sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until the process of a peer ends; set ``has_ended`` of such a peer."""
        running: dict[Any, Peer] = {
            peer.pidfd: peer for peer in self._peers if peer.pidfd is not None and not peer.has_ended
        }
        for pidfd in wait(running, seconds):
            running[pidfd].has_ended = True

    # ------------------------------------------------------------------------------------------ the watchdog's thread

    def _watch(self) -> None:
        while not self._is_leaving:
            if self._failure is None:
                self._look()
            elif self._in_step:
                abort_waits(tuple(self._groups))  # in every round, since the rank may have begun another wait
            self._sleep(HEARTBEAT_S)

    def _look(self) -> None:
        if self._know_all() and not self._in_step and all(peer.is_watched for peer in self._peers):
            return  # all peers are watched by the system, so they need no heartbeats between steps
        self._write()
        for peer in self._peers:
            peer.hear(self._store)
        failure = self._store.read("failure")
        if failure is None and self._in_step:
            if self._store.lost is None:
                # A rank that ended after finishing the present step has not failed.
                late = [peer for peer in self._peers if peer.heartbeat.steps <= self._heartbeat.steps]
                failure = next(filter(None, (peer.failure(self._patience) for peer in late)), None)
            else:
                failure = self._loss_of_the_store(self._store.lost)
        if failure is not None:
            self._report(failure)

    def _loss_of_the_store(self, why: str) -> RankError:
        """Return the error to raise if the store cannot be reached: the failure of a peer whose process has ended, or
        an error that names no rank if there is no such peer. A lost store is always a failure, because ranks that end
        normally first wait for the others.
        """
        if not any(peer.has_ended for peer in self._peers):
            self._sleep(1.0)
        what = "the process that has it, rank 0 or the launcher, has ended, or its host has"
        failure = RankError(f"the store of the process group cannot be reached any more: {what} ({why})")
        return next(filter(None, (peer.failure(math.inf) for peer in self._peers)), failure)

    def _write(self) -> None:
        with self._lock:
            self._heartbeat.count += 1
            self._store.write(f"rank {self._rank}", self._heartbeat)

    def _report(self, failure: RankError) -> RankError:
        """Report a failure to the store. Return the first failure reported by any rank; only that one counts."""
        first: RankError = self._store.write_first("failure", failure)
        self._failure = first = self._failure or first
        self._show(self._heartbeat.at, steps=math.inf)
        self._write()
        return first


_detectors: dict[dist.ProcessGroup, FailureDetector] = {}


def watching(group: dist.ProcessGroup | None = None, *, patience: float = PATIENCE_S) -> FailureDetector:
    """Return this process's failure detector for a group. The first call for a group makes it.

    Args:
        group: the ranks of a pipeline; None: the default group.
        patience: seconds of silence after which a rank on another host counts as failed. Only the first call for a
            group uses it.

    Raises:
        ValueError: ``torch.distributed.init_process_group`` has not been called, and ``group`` is None.
    """
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("pymoe.pipe: torch.distributed.init_process_group has not been called")
    if group not in _detectors:
        _detectors[group] = FailureDetector(group, patience)
    return _detectors[group]
