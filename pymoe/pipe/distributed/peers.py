"""The other processes of a group, and whether they are still there."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from pymoe.pipe.distributed.failure import Position
from pymoe.pipe.distributed.page import Page

__all__ = ["Beat", "Beats", "Others", "Peer"]


def here() -> str:
    """Equal for processes that can see each other's process ids; empty if that cannot be known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass
class Beat:
    """What a rank tells the others every now and then."""

    where: str = field(default_factory=here)
    process: int = field(default_factory=os.getpid)
    count: int = 0
    """Of beats so far."""
    done: int = 0
    """Of steps so far."""
    at: Position | None = None
    page: int = -1
    """The number of the rank's page; less than 0: it has none."""

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        """From the store."""
        found = json.loads(text)
        at = found.pop("at")
        return cls(at=None if at is None else Position(*at), **found)


class Peer:
    """Another rank, from its first beat on.

    On the same host the system tells when its process ends, in any way and at once. On another, that it is there can
    be seen from its beats alone.
    """

    def __init__(self, rank: int, beat: Beat) -> None:
        self.rank = rank
        self.beat = beat
        self.silent = 0.0
        """For how many seconds it has not been heard of, while it was listened to."""
        self._listened = time.monotonic()
        self.is_same_process = (beat.where, beat.process) == (here(), os.getpid())
        self.process: int | None = None  # a file that can be read when the process has ended
        self.has_ended = False
        """That its process has ended, when it was last looked at."""
        self._page: Page | None = None
        if beat.where and beat.where == here() and not self.is_same_process:
            self._page = Page.open(beat.process, beat.page)
            try:
                self.process = os.pidfd_open(beat.process)
            except ProcessLookupError:
                self.has_ended = True
            except (OSError, AttributeError):
                return  # the system does not offer it: beats have to do

    @property
    def is_seen(self) -> bool:
        """Whether the end of its process is seen, so that beats are not needed."""
        return self.is_same_process or self.process is not None or self.has_ended

    def look(self) -> bool:
        """Whether its process is known to have ended, which is kept in ``has_ended``."""
        if not self.has_ended and self.process is not None:
            self.has_ended = _one_has_ended([self.process], 0)
        return self.has_ended

    def hear(self, beat: Beat) -> None:
        """The newest beat."""
        now = time.monotonic()
        # A process that was stopped for a while has not listened: of the time since it last did, little counts.
        self.silent = 0.0 if beat.count != self.beat.count else self.silent + min(now - self._listened, 1.0)
        self._listened = now
        self.beat = beat

    @property
    def at(self) -> Position | None:
        """Where it is, or was when it ended; None: between its steps. From another host: where it was a beat ago."""
        return self.beat.at if self._page is None else self._page.read()

    def __str__(self) -> str:
        at = self.at
        return f"rank {self.rank}, last seen {'between its steps' if at is None else f'in the {at}'}"

    def close(self) -> None:
        """Let go of the process."""
        if self._page is not None:
            self._page.close()
            self._page = None
        if self.process is not None:
            os.close(self.process)
            self.process = None


class Beats(Protocol):
    """Where ranks write their beats."""

    def beat(self, rank: int) -> Beat | None:
        """The newest of a rank, if there is one."""


class Others:
    """All peers of a rank that have been heard of."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._peers: dict[int, Peer] = {}
        self._expected = [other for other in range(ranks) if other != rank]

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def listen(self, beats: Beats) -> None:
        """Read the beats of those whose processes are not seen, or have ended."""
        for rank in self._expected:
            peer = self._peers.get(rank)
            if peer is not None and peer.is_seen and not peer.look():
                continue
            beat = beats.beat(rank)
            if peer is not None and beat is not None:
                peer.hear(beat)
            elif beat is not None:
                self._peers[rank] = Peer(rank, beat)

    def missing(self, done: int, patience: float) -> Peer | None:
        """One that has ended, or was silent for longer than ``patience`` seconds, with no more than ``done`` steps."""
        for peer in self:
            if peer.beat.done <= done and (peer.has_ended or (not peer.is_seen and peer.silent > patience)):
                return peer
        return None

    def have_done(self, done: int, beats: Beats, in_steps: bool = False) -> bool:
        """Whether all, or all that are in a step, have ended ``done`` steps, or have ended."""
        for peer in self:
            if not peer.look() and peer.beat.done < done:
                peer.hear(beats.beat(peer.rank) or peer.beat)
        late = [peer for peer in self if not peer.has_ended and peer.beat.done < done]
        return not any(peer.beat.at is not None for peer in late) if in_steps else not late

    @property
    def are_known(self) -> bool:
        """Whether all have been heard of."""
        return len(self._peers) == len(self._expected)

    @property
    def all_are_seen(self) -> bool:
        """Whether there will be no need for beats."""
        return self.are_known and all(peer.is_seen for peer in self)

    def ended(self) -> list[Peer]:
        """Those whose processes are known to have ended."""
        return [peer for peer in self if peer.look()]

    def wait_for_an_end(self, seconds: float) -> None:
        """Until a process ends that had not before, or the time is over."""
        _one_has_ended([peer.process for peer in self if peer.process is not None and not peer.has_ended], seconds)

    def close(self) -> None:
        """Let go of all processes."""
        for peer in self:
            peer.close()


def _one_has_ended(processes: Sequence[int], seconds: float) -> bool:
    """Whether one of the processes, by their files, has ended, now or before the time is over."""
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    return bool(poll.poll(round(seconds * 1000)))
