"""A failure detector: when a rank dies or raises, the others stop waiting for it and say why.

A thread of every rank writes heartbeats into the store of the process group, reads those of the others, and asks it
whether a rank has failed. The end of a process is noticed at once on the same host; on another, when a connection to it
breaks or it has been silent for ``patience``. Whoever notices a failure reports it to the store, where the first report
counts; every thread then aborts the waits of its own rank, whose step raises ``RankError`` with the cause.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from pymoe.pipe.distributed.liveness import (
    Failure,
    Heartbeat,
    HeartbeatStore,
    Peer,
    Position,
    PositionPage,
    RankError,
    StoreLostError,
    wait_for_end,
)

__all__ = ["FailureDetector", "watching"]

HEARTBEAT_S = 0.2  # between two heartbeats
PATIENCE_S = 30.0  # silence after which a rank on another host has failed
SUSPICION_S = 3.0  # the same when a connection has broken
GRACE_S = 3.0  # to wait for the others' first heartbeats, and, for a rank that failed, until they have read why
LEAVE_S = 60.0  # to wait, for a rank that is done, until the others have ended their steps
ABORT_TAG = 2**30  # of messages that are never sent


class FailureDetector:
    """The failure detector of one rank; :func:`watching` makes it.

    All ranks of the group make the same steps. A step that fails on any rank ends on every rank: on the one that
    raised by its own error, on the others by :class:`RankError`, and so do all later ones. Stages tell their position
    and their errors. Errors in between, of a loss function or the loading of data, are reported when they end the
    process, or when they leave a ``with`` block of the detector, for programs that go on after an error::

        with watching(group):
            schedule.step(...)
    """

    def __init__(self, group: dist.ProcessGroup, *, patience: float = PATIENCE_S) -> None:
        """
        Args:
            group: the ranks of the pipeline.
            patience: seconds of silence after which a rank on another host has failed.
        """
        self._groups = [group]
        self._rank, self._ranks = group.rank(), group.size()
        self._patience = patience
        self._store = HeartbeatStore(group)
        self._peers: dict[int, Peer] = {}
        self._page = PositionPage.create()
        self._heartbeat = Heartbeat(-1 if self._page is None else self._page.file)
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._knows_failure = threading.Event()
        self._in_step = False
        self._thread: threading.Thread | None = None
        self._is_needed = threading.Event()  # the thread
        self._is_closed = False
        self._excepthook = sys.excepthook
        self._write()
        # Not atexit, which the processes of multiprocessing, and so of torch's spawn, do not run.
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    # ------------------------------------------------------------------------------------------ the rank's own thread

    def add(self, group: dist.ProcessGroup) -> None:
        """Have waits in this group, too, end when a rank fails."""
        if group not in self._groups:
            self._groups.append(group)

    def begin(self) -> None:
        """Begin a step, if none has begun. Raise RankError if a rank has failed before."""
        self.check()
        if self._ranks == 1:
            return
        if self._thread is None:
            self._wait_until(self._know_all, GRACE_S)
            self._thread = threading.Thread(target=self._watch, name="pymoe.pipe.watchdog", daemon=True)
            self._thread.start()
            self._excepthook, sys.excepthook = sys.excepthook, self._uncaught
        self._in_step = True
        self._is_needed.set()

    def at(self, phase: str, stage: int, micro_batch: int) -> None:
        """Note what this rank begins to do. Raise RankError if another has failed."""
        self._move_to(Position(phase, stage, micro_batch))
        self.check()

    def check(self) -> None:
        """Raise RankError if a rank is known to have failed."""
        if self._failure is not None:
            raise RankError(self._failure)

    def end(self) -> None:
        """End a step that went well here. Raise RankError if another rank has failed meanwhile."""
        self._in_step = False
        self.check()
        with self._lock:
            self._move_to(None)
            self._heartbeat.steps += 1
        with contextlib.suppress(StoreLostError):  # the next step finds out why
            self._write()
        if len(self._peers) == self._ranks - 1 and all(peer.is_watched for peer in self._peers.values()):
            self._is_needed.clear()  # until the next step there is nothing to say or to read

    def fail(self, error: BaseException) -> RankError | None:
        """Report that a step is about to end here by ``error``.

        Returns:
            What to raise in place of ``error``: that another rank had failed before. None: ``error`` is the first.
        """
        failure = self._failure
        if isinstance(error, RankError) or (failure is not None and failure.rank == self._rank):
            self._in_step = False
            return None  # it is known
        self._is_needed.set()
        at = self._heartbeat.at
        one_line = "".join(traceback.format_exception_only(type(error), error)).strip()
        what = f"rank {self._rank} failed {at or 'between its steps'}: {one_line}"
        if is_about_connections(error):
            # Most likely the fault of another rank; it takes a moment to be found.
            self._patience = min(self._patience, SUSPICION_S)
            if not self._knows_failure.wait(SUSPICION_S + 2.0):
                what += f"; the others: {'; '.join(str(peer) for peer in self._peers.values())}"
        self._report(Failure(what, self._rank, at, "".join(traceback.format_exception(error)).strip()))
        self._in_step = False
        self._wait_until(self._all_know, GRACE_S)  # the store may end with this process
        self._abort_waits()  # of threads that send
        failure = self._failure
        return None if failure is None or failure.rank == self._rank else RankError(failure)

    def __enter__(self) -> FailureDetector:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            if self._in_step:  # else the block has ended it
                self.end()
        else:
            other = self.fail(error)
            if other is not None and isinstance(error, Exception):
                raise other from error

    def _uncaught(self, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        """Report an error that ends this process."""
        if not self._is_closed:
            self.fail(error)
        self._excepthook(kind, error, tb)

    def close(self) -> None:
        """Stop watching when the other ranks have ended their steps, too: the store may end with this process."""
        if not self._in_step:
            self._wait_until(self._all_are_done, LEAVE_S)
        self._is_closed = True
        self._is_needed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        for peer in self._peers.values():
            peer.close()
        if self._page is not None:
            self._page.close()
            self._page = None
        self._at_exit.cancel()
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._excepthook
        if _detectors.get(self._groups[0]) is self:
            del _detectors[self._groups[0]]

    def _move_to(self, at: Position | None) -> None:
        self._heartbeat.at = at
        if self._page is not None:
            self._page.write(at)

    def _know_all(self) -> bool:
        """Return whether all others have been heard of. A process that ends before that ends unseen."""
        for rank in set(range(self._ranks)) - {self._rank, *self._peers}:
            if (heartbeat := self._store.read(rank)) is not None:
                self._peers = {**self._peers, rank: Peer(rank, heartbeat)}  # the other thread may be iterating
        return len(self._peers) == self._ranks - 1

    def _all_know(self) -> bool:
        """Return whether all others have read of the failure, or have ended."""
        return self._store.acknowledge(0) + sum(peer.look() for peer in self._peers.values()) >= self._ranks

    def _all_are_done(self) -> bool:
        """Return whether all others have made as many steps as this rank, or have ended, or one has failed."""
        if self._failure is not None:
            return True
        for peer in self._peers.values():
            if not peer.look() and peer.heartbeat.steps < self._heartbeat.steps:
                peer.hear(self._store.read(peer.rank))
        return all(peer.has_ended or peer.heartbeat.steps >= self._heartbeat.steps for peer in self._peers.values())

    def _wait_until(self, is_so: Callable[[], bool], seconds: float) -> None:
        limit = time.monotonic() + seconds
        with contextlib.suppress(StoreLostError):
            while not is_so() and time.monotonic() < limit:
                time.sleep(0.02)

    # ------------------------------------------------------------------------------------------ the watchdog's thread

    def _watch(self) -> None:
        while self._is_needed.wait() and not self._is_closed:
            if self._failure is None:
                self._look()
            elif self._in_step:
                self._abort_waits()  # again and again: the rank may begin another wait after this
            wait_for_end(self._peers.values(), HEARTBEAT_S)

    def _look(self) -> None:
        try:
            self._write()
            self._know_all()
            for peer in self._peers.values():
                if not peer.is_watched or peer.look():
                    peer.silent_s = 0.0 if peer.hear(self._store.read(peer.rank)) else peer.silent_s + HEARTBEAT_S
            failure = self._store.failure()
            if failure is None and self._in_step:
                failure = self._find_failed(self._heartbeat.steps)
        except StoreLostError as error:
            if not self._in_step:
                return
            # Somebody took it along. A rank that leaves in order waits until the others have ended their steps.
            if not any(peer.has_ended for peer in self._peers.values()):
                wait_for_end(self._peers.values(), 1.0)
            ended = [peer.heartbeat.steps for peer in self._peers.values() if peer.has_ended]
            what = "the process that has it, rank 0 or the launcher, has ended, or its host has"
            failure = self._find_failed(max(ended, default=-1)) or Failure(
                f"the store of the process group cannot be reached any more: {what} ({error})"
            )
        if failure is not None:
            self._report(failure)

    def _find_failed(self, steps: int) -> Failure | None:
        """Return the failure of a rank that has made no more than so many steps, and will not make the next one."""
        late = [peer for peer in self._peers.values() if peer.heartbeat.steps <= steps]
        return next(filter(None, (peer.failure(self._patience) for peer in late)), None)

    def _write(self) -> None:
        with self._lock:
            self._heartbeat.count += 1
            self._store.write(self._rank, self._heartbeat)

    def _report(self, failure: Failure) -> None:
        """Report a failure to the store. What counts from now on is the first that any rank has reported."""
        with contextlib.suppress(StoreLostError):
            failure = self._store.report(failure)
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
        self._knows_failure.set()
        with contextlib.suppress(StoreLostError):
            self._store.acknowledge(1)

    def _abort_waits(self) -> None:
        for group in self._groups:
            abort_waits(group)


def abort_waits(group: dist.ProcessGroup) -> None:
    """Let all that waits for messages of ``group`` in this process raise, now. The group is of no further use.

    gloo cannot abort a wait, but closes all connections of a context when one of its waits exceeds its timeout: so wait
    a millisecond for a message that is never sent. NCCL's operations are aborted; they raise nothing, but what a stream
    waits for is then done.
    """
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # of TORCH_DISTRIBUTED_DEBUG=DETAIL
        if backend.name() != "gloo":
            with contextlib.suppress(RuntimeError):
                backend.abort()
            continue
        # A context for every network device; tags choose one. A connection that is broken already raises at once, and
        # leaves the others alone: so try every peer.
        contexts = max(1, len(getattr(backend.options, "_devices", ())))
        for peer in range(group.size()):
            for context in range(contexts if peer != group.rank() else 0):
                with contextlib.suppress(RuntimeError):
                    backend.recv([torch.empty(1)], peer, ABORT_TAG + context).wait(timedelta(milliseconds=1))


def is_about_connections(error: BaseException) -> bool:
    """Return whether an error says that a message could not be sent or received."""
    pattern = r"gloo|nccl|pair closure|connection (was )?(closed|reset|refused|lost)|socket"
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search(pattern, str(error), re.I) is not None
    )


_detectors: dict[dist.ProcessGroup, FailureDetector] = {}


def watching(group: dist.ProcessGroup | None = None, *, patience: float = PATIENCE_S) -> FailureDetector:
    """Return this process's failure detector of a group; None: of all processes. There is one for each group.

    Args:
        group: the ranks of a pipeline.
        patience: seconds of silence after which a rank on another host has failed.
    """
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("pymoe.pipe: torch.distributed.init_process_group has not been called")
    if group not in _detectors:
        _detectors[group] = FailureDetector(group, patience=patience)
    return _detectors[group]
