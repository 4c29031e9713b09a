"""Keys of an expert's applied backward requests, so that none is applied twice, even after the server restarts.

A request has a key, (client, seq), where seq is the client's number of the request; every attempt to send the request
has the same key. A client also sends ``ack``: it will make no more attempts with numbers below ``ack``. A key is

- **new**: the request is run. Afterwards the key is applied, or new again if the request was not applied;
- **running**: another attempt waits for the first one and gets the same answer;
- **applied**: another attempt gets the stored answer, or :class:`~pymoe.remote.errors.AppliedError` if the answer has
  been dropped;
- **forgotten**, if its number is below ``ack``: a late attempt raises AppliedError, because the outcome is unknown.

A checkpoint of a state after U updates contains the keys that were applied in updates 1 to U and are not forgotten. If
the server restarts from the checkpoint, later updates are lost together with their keys: these keys are new again.

Use all methods on one thread, that of the server's event loop.
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

AppliedKeys = dict[str, tuple[int, list[int]]]
"""For each client: the number below which all keys are forgotten, and the numbers of all other applied keys."""
MAX_OPEN = 4096
"""Maximum number of keys of a client that are running or applied, and not yet below its ``ack``."""
MAX_CLIENTS = 65536
KEEP_CLIENT_S = 3600.0
"""Seconds after a client's last request until it may be forgotten."""
KEEP_ANSWERS_BYTES = 64 << 20
IN_PART = -1
"""Used in place of an update's number if a failed request was, or may have been, applied in part."""

T = TypeVar("T")


@dataclass
class Applied:
    """The outcome of a backward request that has run."""

    update: int | None
    """Number of the first update that contains any row of the request, or :data:`IN_PART`; None if nothing was
    applied.
    """
    answer: Sequence[Tensor] | None = None
    error: BaseException | None = None


@dataclass
class _RunningRequest:
    done: asyncio.Future[Applied]
    cancel: Callable[[], Any]
    waiters: int = 0


@dataclass
class _Client:
    seen: float
    low: int = 0
    running: dict[int, _RunningRequest] = field(default_factory=dict)
    applied: dict[int, int] = field(default_factory=dict)  # seq -> the Applied.update of the request


class Journal:
    """Records, by key, which backward requests of one expert have been applied.

    Args:
        incarnation: a name that is different after each start of the server.
        now: returns the time in seconds on a monotonic clock.
    """

    def __init__(self, incarnation: str, now: Callable[[], float] = time.monotonic) -> None:
        self.incarnation = incarnation
        self._now = now
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # the client with the latest request is the last
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
        """Run a request, unless an earlier attempt was applied, and return its answer.

        Args:
            client: name of the client, the first part of the key.
            seq: the client's number of the request, the second part of the key.
            ack: the client makes no more attempts with numbers below this one.
            run: starts the request. Called only if the key is new. Returns an awaitable of the outcome, and a function
                that cancels the request if it has not begun. If all attempts stop waiting for the answer, the journal
                calls this function.
            attempt: number of earlier attempts of the request.
            incarnation: the ``incarnation`` of the journal when the server last answered a backward request of the
                client; empty before the first answer. If it is still the same and the client is unknown, the client
                has been forgotten.
            age: seconds since the first attempt. If the client is unknown and the age is at least half of
                :data:`KEEP_CLIENT_S`, the client may have been forgotten.

        Returns:
            The answer, and whether an earlier attempt was applied.

        Raises:
            AppliedError: the request has been applied, or may have been, and its answer is no longer available.
            QueueFull: too many requests of the client are not yet below its ``ack``, or there are too many clients.
            BaseException: any exception that ``run`` raises or the outcome contains. The key is then new again, unless
                some rows were, or may have been, applied.
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
            # The other attempt has failed, or was cancelled when its connection broke. If nothing was applied, this
            # attempt runs the request; otherwise the next iteration finds the request among the applied ones.

    def _know(self, name: str, ack: int, attempt: int, incarnation: str, age: float) -> _Client:
        known = self._clients.get(name)
        if known is None:
            # Compare with only half of KEEP_CLIENT_S, because the client's clock may run at another speed.
            if attempt and (incarnation == self.incarnation or not age < KEEP_CLIENT_S / 2):
                raise AppliedError(f"the client {name!r} was forgotten: its request may have been applied")
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
        """Forget clients without a running request that were silent for more than :data:`KEEP_CLIENT_S` seconds.

        Raise QueueFull if too many clients remain. These are kept, because a request of a forgotten client could be
        applied twice.
        """
        for name, one in list(self._clients.items()):
            if self._now() - one.seen <= KEEP_CLIENT_S:
                break
            if not one.running:
                for seq in self._clients.pop(name).applied:
                    self._drop_answer(name, seq)
        if len(self._clients) >= MAX_CLIENTS:
            raise QueueFull(f"{len(self._clients)} clients have sent requests within the last {KEEP_CLIENT_S:g} s")

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
        if len(known.running) + len(known.applied) >= MAX_OPEN:
            raise QueueFull(f"the client has {MAX_OPEN} requests that it has not acknowledged")
        outcome, cancel = run()
        running = known.running[seq] = _RunningRequest(asyncio.get_running_loop().create_future(), cancel)

        async def settle() -> None:  # a separate task, to record the outcome even if the client has disconnected
            try:
                found = await outcome
            except BaseException as error:
                found = Applied(None, error=error)
            self._settle(client, known, seq, found)
            running.done.set_result(found)

        task = asyncio.ensure_future(settle())
        running.done.add_done_callback(lambda _: task)  # asyncio itself keeps only weak references to tasks
        found = await self._wait(running)
        if found.error is not None:
            raise found.error
        assert found.answer is not None
        return found.answer

    async def _wait(self, running: _RunningRequest) -> Applied:
        running.waiters += 1
        try:
            return await asyncio.shield(running.done)  # cancelling one attempt must not cancel the others
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
        """Wait until all requests that are running now have ended."""
        running = [one.done for client in self._clients.values() for one in client.running.values()]
        if running:
            await asyncio.wait(running)

    def keys(self, updates: int) -> AppliedKeys:
        """Return the keys to save with a state after ``updates`` updates: those that were applied in these updates.

        First wait with :meth:`settled`: the keys of requests that are still running are not included.
        """
        return {
            name: (client.low, sorted(seq for seq, update in client.applied.items() if update <= updates))
            for name, client in self._clients.items()
        }

    def restore(self, keys: AppliedKeys) -> None:
        """Replace all keys with those of a checkpoint, and drop all answers."""
        now = self._now()
        self._answers.clear()
        self._bytes = 0
        self._clients = OrderedDict(
            (name, _Client(now, low, applied=dict.fromkeys(applied, 0))) for name, (low, applied) in keys.items()
        )
