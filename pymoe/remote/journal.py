"""Which backward requests of an expert were applied, so that none is applied twice, restarts included.

A request has a key, (client, seq). The client numbers its requests and sends the same key with every attempt; ``ack``
says below which number it will not ask again. A key is

- **new**: it runs, and settles as applied, in the update of some number, or as not applied;
- **running**: a second attempt joins the first and gets its answer;
- **applied**: a further attempt gets the kept answer, or :class:`~pymoe.remote.errors.AppliedError` where it is gone;
- **forgotten**, below ``ack``: a late attempt raises AppliedError, since nobody knows any more.

What is saved with a state that has seen U updates are the keys applied in updates up to U: both are lost together or
not at all. A key that was applied later, and lost with its update, is new again.

All methods are for one thread, the server's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from pymoe.remote.errors import AppliedError
from pymoe.runtime import QueueFull

Keys = dict[str, tuple[int, list[int]]]
"""By client: the number below which all is forgotten, and the numbers applied from there on."""
MOST_OPEN = 4096
"""Keys of one client that it has not acknowledged."""
MOST_CLIENTS = 65536
KEEP_CLIENT_S = 3600.0
"""How long a client that says nothing is remembered."""
KEEP_ANSWERS_BYTES = 64 << 20
IN_PART = -1
"""In place of an update's number: applied for some rows, and failed for others."""

T = TypeVar("T")


@dataclass
class Applied:
    """What a backward request that ran has done."""

    update: int | None
    """The number of the first update that holds any of it; None: nothing was applied; :data:`IN_PART`."""
    answer: Sequence[Tensor] | None = None
    error: BaseException | None = None


@dataclass
class _Running:
    done: asyncio.Future[Applied]
    cancel: Callable[[], Any]
    waiters: int = 0


@dataclass
class _Client:
    seen: float
    low: int = 0
    running: dict[int, _Running] = field(default_factory=dict)
    applied: dict[int, int] = field(default_factory=dict)  # seq -> number of the first update that holds any of it


class Journal:
    """The keys of one expert.

    Args:
        incarnation: a name of this life of the server.
        now: the clock, in seconds.
    """

    def __init__(self, incarnation: str, now: Callable[[], float] = time.monotonic) -> None:
        self.incarnation = incarnation
        self._now = now
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # who spoke last is last
        self._answers: OrderedDict[tuple[str, int], tuple[Sequence[Tensor], int]] = OrderedDict()
        self._bytes = 0

    async def once(
        self,
        client: str,
        seq: int,
        ack: int,
        run: Callable[[], tuple[Awaitable[Applied], Callable[[], Any]]],
        *,
        attempt: int = 0,
        incarnation: str = "",
        age: float = 0.0,
    ) -> tuple[Sequence[Tensor], bool]:
        """Return the answer to the request, which ``run`` begins if the key is new, and whether this is a repetition.

        Args:
            client: with ``seq`` the key.
            seq: the number of the request among those of its client.
            ack: the client will not ask again for keys below.
            run: begins the request; returns what it will have done, and a function that cancels it if it has not begun.
                That is called when nobody waits for the answer any more.
            attempt: how often the client has sent the request before.
            incarnation: that of the server from which the client last had the answer to a backward request; empty
                before the first. A server of this life that does not know such a client has forgotten it.
            age: seconds since the client sent it first. A client is not forgotten so soon after it spoke; if more time
                has passed, one that is not known may be one that was forgotten.

        Raises:
            AppliedError: it was applied, or may have been, and the answer is gone.
            QueueFull: the client leaves too many keys open, or there are too many clients.
            BaseException: what ``run`` raises or reports. The key is new again then, unless some rows were applied.
        """
        known = self._know(client, ack, attempt, incarnation, age)
        while True:
            if seq < known.low:
                raise AppliedError(f"the request {seq} was acknowledged before, and is not run again")
            if seq in known.applied:
                return self._kept(client, seq, known.applied[seq]), True
            running = known.running.get(seq)
            if running is None:
                return await self._run(client, known, seq, run), False
            found = await self._wait(running)
            if found.update is not None and found.answer is not None:
                return found.answer, True
            # The first attempt has failed, or was cancelled when its connection broke: nothing was applied.

    def _know(self, name: str, ack: int, attempt: int, incarnation: str, age: float) -> _Client:
        known = self._clients.get(name)
        if known is None:
            # Half of the time: the client's clock began before the message arrived, and need not run as this one does.
            if attempt and (incarnation == self.incarnation or not age < KEEP_CLIENT_S / 2):
                raise AppliedError(f"the client {name!r} was forgotten, and with it whether the request was applied")
            self._make_room()
            known = self._clients[name] = _Client(self._now())
        known.seen = self._now()
        self._clients.move_to_end(name)
        if ack > known.low:
            known.low = ack
            for seq in [seq for seq in known.applied if seq < ack]:
                del known.applied[seq]
                self._drop_answer(name, seq)
        return known

    def _make_room(self) -> None:
        """Forget who has long said nothing, and nobody else: a forgotten key could be applied twice."""
        for name, one in list(self._clients.items()):
            if self._now() - one.seen <= KEEP_CLIENT_S:
                break
            if not one.running:
                for seq in self._clients.pop(name).applied:
                    self._drop_answer(name, seq)
        if len(self._clients) >= MOST_CLIENTS:
            raise QueueFull(f"{len(self._clients)} clients have asked within the last {KEEP_CLIENT_S:g} s")

    def _kept(self, client: str, seq: int, update: int) -> Sequence[Tensor]:
        found = self._answers.get((client, seq))
        if found is None:
            how = "in part" if update == IN_PART else f"in update {update}"
            raise AppliedError(f"the request {seq} was applied {how}, and its answer is gone")
        return found[0]

    async def _run(
        self,
        client: str,
        known: _Client,
        seq: int,
        run: Callable[[], tuple[Awaitable[Applied], Callable[[], Any]]],
    ) -> Sequence[Tensor]:
        if len(known.running) + len(known.applied) >= MOST_OPEN:
            raise QueueFull(f"the client has {MOST_OPEN} requests that it has not acknowledged")
        outcome, cancel = run()
        running = known.running[seq] = _Running(asyncio.get_running_loop().create_future(), cancel)

        async def settle() -> None:  # goes on when its client has gone: what was applied must be known
            try:
                found = await outcome
            except BaseException as error:
                found = Applied(None, error=error)
            self._settle(client, known, seq, found)
            running.done.set_result(found)

        task = asyncio.ensure_future(settle())
        running.done.add_done_callback(lambda _: task)  # a task that nobody holds may be collected
        found = await self._wait(running)
        if found.error is not None:
            raise found.error
        assert found.answer is not None
        return found.answer

    async def _wait(self, running: _Running) -> Applied:
        running.waiters += 1
        try:
            return await asyncio.shield(running.done)  # who goes must not cancel it for others
        finally:
            running.waiters -= 1
            if not running.waiters and not running.done.done():
                running.cancel()

    def _settle(self, client: str, known: _Client, seq: int, found: Applied) -> None:
        del known.running[seq]
        if found.update is None or seq < known.low:
            return
        known.applied[seq] = found.update
        if found.answer is None:
            return
        size = sum(one.nbytes for one in found.answer)
        self._answers[client, seq] = (found.answer, size)
        self._bytes += size
        while self._bytes > KEEP_ANSWERS_BYTES:
            _, (_, size) = self._answers.popitem(last=False)
            self._bytes -= size

    def _drop_answer(self, client: str, seq: int) -> None:
        _, size = self._answers.pop((client, seq), ((), 0))
        self._bytes -= size

    async def settled(self) -> None:
        """Wait until what runs now has settled."""
        running = [one.done for client in self._clients.values() for one in client.running.values()]
        if running:
            await asyncio.wait(running)

    def keys(self, updates: int) -> Keys:
        """Return the keys that belong to a state that has seen ``updates`` updates.

        Of those that were applied by then none may still run: see :meth:`settled`.
        """
        return {
            name: (client.low, sorted(seq for seq, update in client.applied.items() if update <= updates))
            for name, client in self._clients.items()
        }

    def restore(self, keys: Keys) -> None:
        """Know the keys of a state that was loaded, and no others; their answers are gone."""
        now = self._now()
        self._answers.clear()
        self._bytes = 0
        self._clients = OrderedDict(
            (name, _Client(now, low, applied=dict.fromkeys(applied, 0))) for name, (low, applied) in keys.items()
        )
