"""Ranks that watch each other: when one dies or raises, the others stop waiting for it and say why.

Every rank has a thread that tells the others, by the store of the process group, where it is, and asks it whether
another has failed. A process that ends is noticed at once on the same host (the system tells), and on others when a
connection to it breaks or it has been silent for ``patience``. Whoever notices a failure writes it into the store, the
first one counts; then every thread ends the waits of its own rank, whose step raises ``RankError`` with the cause.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import TracebackType

import torch.distributed as dist

from pymoe.pipe.distributed.board import Board, BoardIsGoneError
from pymoe.pipe.distributed.failure import Failure, Position, RankError
from pymoe.pipe.distributed.page import Page
from pymoe.pipe.distributed.peers import Beat, Others, Peer
from pymoe.pipe.distributed.waits import end_waits, is_about_connections

__all__ = ["Watch", "watching"]

INTERVAL = 0.2  # seconds between two looks
PATIENCE = 30.0  # seconds without a beat after which a rank on another host has failed
MEETING = 1.0  # seconds that the first step waits for the others to begin theirs
LEAVE = 2.0, 60.0  # seconds that a rank which is done waits for the others to begin, and to end, their steps
SUSPICION = 3.0  # the same when a connection has broken
TOLD = 3.0  # seconds that a rank which failed waits for the others to have read why


class Watch:
    """The watch of one rank over the others of its group; :func:`watching` makes it.

    All ranks of the group make the same steps. A step that fails, on any rank, ends on every rank: on the one that
    raised by its own error, on the others by :class:`RankError`, and so do all later ones. A stage tells its watch of
    what it does and of its errors. Errors in between, of a loss function or the loading of data, are told when they end
    the process, or when they leave a ``with`` block of the watch, which is for programs that go on after an error::

        with watching(group):
            schedule.step(...)
    """

    def __init__(self, group: dist.ProcessGroup, *, patience: float = PATIENCE) -> None:
        """
        Args:
            group: the ranks of the pipeline.
            patience: seconds after which a rank on another host that is not heard of has failed.
        """
        self._group = group
        self._waits = [group]
        self._rank = group.rank()
        self._patience = patience
        self._board = Board(group)
        self._others = Others(self._rank, group.size())
        self._page = Page.make()
        self._beat = Beat(page=-1 if self._page is None else self._page.number)
        self._beat_lock = threading.Lock()
        self._failure: Failure | None = None
        self._found = threading.Event()
        self._suspects = False
        self._in_step = False
        self._is_wanted = threading.Event()  # that the thread looks
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._hook = sys.excepthook
        self._tell()
        # Not of atexit, which the processes of multiprocessing, and so of torch's spawn, do not run.
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    # ------------------------------------------------------------------------------------------ the rank's own thread

    def add(self, group: dist.ProcessGroup) -> None:
        """Waits in this group, too, are to end when a rank has failed."""
        if group not in self._waits:
            self._waits.append(group)

    def begin(self) -> None:
        """A step begins, if none has begun.

        Raises:
            RankError: a rank has failed before.
        """
        self.check()
        if self._group.size() == 1:
            return
        if self._thread is None:
            self._wait_until(self._all_are_known, MEETING)
            self._thread = threading.Thread(target=self._look, name="pymoe.pipe.watch", daemon=True)
            self._thread.start()
            self._hook, sys.excepthook = sys.excepthook, self._uncaught
        self._in_step = True
        self._is_wanted.set()

    def at(self, phase: str, stage: int, micro_batch: int) -> None:
        """What this rank begins to do.

        Raises:
            RankError: another rank has failed.
        """
        self._be_at(Position(phase, stage, micro_batch))
        self.check()

    def _be_at(self, at: Position | None) -> None:
        self._beat.at = at
        if self._page is not None:
            self._page.write(at)

    def check(self) -> None:
        """Raises RankError if another rank is known to have failed."""
        if self._failure is not None:
            raise RankError(self._failure)

    def end(self) -> None:
        """A step has ended well here.

        Raises:
            RankError: another rank has failed meanwhile.
        """
        self._in_step = False
        self.check()
        with self._beat_lock:
            self._be_at(None)
            self._beat.done += 1
        with contextlib.suppress(BoardIsGoneError):  # the next step finds out why
            self._tell()
        if self._others.all_are_seen:
            self._is_wanted.clear()  # nothing more needs to be said or read until the next step

    def fail(self, error: BaseException) -> RankError | None:
        """A step is about to end here by ``error``: tell the others.

        Returns:
            What to raise in place of ``error``: that another rank had failed before. None: ``error`` is the first.
        """
        failure = self._failure
        if isinstance(error, RankError) or (failure is not None and failure.rank == self._rank):
            self._in_step = False
            return None  # it is known
        self._is_wanted.set()
        if is_about_connections(error) and not self._found.is_set():
            # Somebody else's fault, most likely; who that was takes a moment to be seen.
            self._suspects = True
            self._found.wait(SUSPICION + 2.0)
        own = Failure.by(error, self._rank, self._beat.at)
        if self._failure is None:
            if self._suspects:
                own = self._lost_connection(own)
            self._settle(own)
        self._in_step = False
        self._wait_until(self._all_know, TOLD)  # the store may end with this process
        for group in self._waits:
            end_waits(group)  # of threads that send
        failure = self._failure
        return None if failure is None or failure.rank == self._rank else RankError(failure)

    def __enter__(self) -> Watch:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            if self._in_step:  # else what was in the block has ended it
                self.end()
        else:
            other = self.fail(error)
            if other is not None and isinstance(error, Exception):
                raise other from error

    def _uncaught(self, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        """An error ends this process."""
        if not self._is_closed:
            self.fail(error)
        self._hook(kind, error, tb)

    def close(self) -> None:
        """Stop watching, when the other ranks have ended their steps, too: the store may end with this process."""
        if self._failure is None and not self._in_step:
            # Some may be in the step, others about to begin it; those that will not begin it are not waited for.
            self._wait_until(lambda: self._others.have_done(self._beat.done, self._board), LEAVE[0])
            self._wait_until(lambda: self._others.have_done(self._beat.done, self._board, in_steps=True), LEAVE[1])
        self._is_closed = True
        self._is_wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._others.close()
        if self._page is not None:
            self._page.close()
            self._page = None
        self._at_exit.cancel()
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook
        if _watches.get(self._group) is self:
            del _watches[self._group]

    def _all_are_known(self) -> bool:
        """Whether the processes of all others are. One that ends before that ends unseen."""
        self._others.listen(self._board)
        return self._others.are_known

    def _all_know(self) -> bool:
        """Whether all others have read what failed."""
        return self._board.confirmed() >= self._group.size() - len(self._others.ended())

    def _wait_until(self, is_so: Callable[[], bool], seconds: float) -> None:
        limit = time.monotonic() + seconds
        with contextlib.suppress(BoardIsGoneError):
            while not is_so() and time.monotonic() < limit:
                time.sleep(0.02)

    def _lost_connection(self, own: Failure) -> Failure:
        silent = [str(peer) for peer in self._others if not peer.is_seen and peer.silent > SUSPICION / 2]
        who = f"; not heard of: {'; '.join(silent)}" if silent else "; all ranks are still there"
        what = own.what.replace("failed", "lost its connection to another rank", 1)
        return Failure(what + who, own.rank, own.at, own.error)

    # -------------------------------------------------------------------------------------------- the watcher's thread

    def _look(self) -> None:
        while True:
            self._is_wanted.wait()
            if self._is_closed:
                return
            if self._failure is None:
                self._look_once()
            elif self._in_step:
                for group in self._waits:
                    end_waits(group)  # again and again: it may begin to wait after this
            self._others.wait_for_an_end(INTERVAL)

    def _look_once(self) -> None:
        try:
            found = self._board.failure()
            if found is None:
                self._tell()
                self._others.listen(self._board)
                found = self._find()
                if found is not None:
                    self._settle(found)
                return
        except BoardIsGoneError as error:
            if not self._in_step:
                return
            found = self._find_without_board(error)
        self._learn(found)

    def _settle(self, found: Failure) -> None:
        """``found`` has failed, if nothing has before."""
        with contextlib.suppress(BoardIsGoneError):
            found = self._board.settle(found)
        self._learn(found)

    def _learn(self, failure: Failure) -> None:
        with self._beat_lock:
            if self._failure is not None:
                return
            self._failure = failure
        self._found.set()
        with contextlib.suppress(BoardIsGoneError):
            self._board.confirm()

    def _tell(self) -> None:
        with self._beat_lock:
            self._beat.count += 1
            self._board.tell(self._rank, self._beat)

    def _find(self) -> Failure | None:
        """Somebody who will not make this step."""
        if not self._in_step:
            return None
        peer = self._others.missing(self._beat.done, SUSPICION if self._suspects else self._patience)
        if peer is None or peer.has_ended:
            return None if peer is None else _ended(peer)
        return Failure(f"nothing has been heard for {peer.silent:.0f} s of {peer}", peer.rank, peer.at)

    def _find_without_board(self, error: BoardIsGoneError) -> Failure:
        """Who took the store along. A rank that leaves in order waits for the others to end their steps."""
        self._others.wait_for_an_end(1.0)
        ended = self._others.ended()
        if ended:
            return _ended(ended[0])
        return Failure(
            "the store of the process group cannot be reached any more: the process that has it, rank 0 or the "
            f"launcher, has ended, or its host has ({error})"
        )


def _ended(peer: Peer) -> Failure:
    return Failure(f"the process of {peer}, has ended", peer.rank, peer.at)


_watches: dict[dist.ProcessGroup, Watch] = {}


def watching(group: dist.ProcessGroup | None = None, *, patience: float = PATIENCE) -> Watch:
    """The watch of this process over a group; None: over all processes. There is one for each group."""
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("pymoe.pipe: torch.distributed.init_process_group has not been called")
    watch = _watches.get(group)
    if watch is None:
        watch = _watches[group] = Watch(group, patience=patience)
    return watch
