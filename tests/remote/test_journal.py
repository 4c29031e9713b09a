"""An applied request is never applied again, whatever fails, and none is lost except in a kill."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import pytest
import torch
from limits import LONG, rounds

from pymoe.remote import journal as journal_module
from pymoe.remote.errors import AppliedError
from pymoe.remote.journal import IN_PART, Applied, AppliedKeys, Journal
from pymoe.remote.requests import RequestNumbers
from pymoe.runtime import QueueFull

ANSWER = [torch.ones(2)]


class Request:
    """A request that a journal runs, and that ends when a test ends it."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Applied] = asyncio.get_running_loop().create_future()
        self.begun, self.cancelled = 0, False

    def run(self) -> tuple[Awaitable[Applied], Callable[[], Any]]:
        self.begun += 1
        return self.outcome, self.cancel

    def cancel(self) -> None:
        self.cancelled = True
        self.end(Applied(None, error=asyncio.CancelledError()))

    def end(self, found: Applied) -> None:
        if not self.outcome.done():
            self.outcome.set_result(found)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), LONG))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def soon() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def applied(journal: Journal, seq: int, update: int = 1, ack: int = 0) -> None:
    """Run and settle a request in an update."""
    request = Request()
    request.end(Applied(update, ANSWER))
    await journal.once("c", seq, ack, request.run)


@in_loop
async def test_a_second_attempt_joins_the_first_and_a_third_gets_the_kept_answer() -> None:
    journal, request = Journal("life"), Request()
    first = asyncio.ensure_future(journal.once("c", 0, 0, request.run))
    await soon()
    second = asyncio.ensure_future(journal.once("c", 0, 0, request.run, attempt=1))
    await soon()
    request.end(Applied(1, ANSWER))
    assert await first == (ANSWER, False)
    assert await second == (ANSWER, True)
    assert await journal.once("c", 0, 0, request.run, attempt=2) == (ANSWER, True)
    assert request.begun == 1


@in_loop
async def test_the_same_number_of_another_client_is_another_request() -> None:
    journal = Journal("life")
    for client in "cd":
        request = Request()
        request.end(Applied(1, ANSWER))
        await journal.once(client, 0, 0, request.run)
        assert request.begun == 1


@in_loop
async def test_one_that_failed_runs_again() -> None:
    journal, failing = Journal("life"), Request()
    failing.end(Applied(None, error=ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        await journal.once("c", 0, 0, failing.run)
    await applied(journal, 0)


@in_loop
async def test_one_that_failed_in_part_does_not_run_again() -> None:
    journal, failing = Journal("life"), Request()
    failing.end(Applied(IN_PART, error=ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        await journal.once("c", 0, 0, failing.run)
    with pytest.raises(AppliedError, match="applied in part"):
        await journal.once("c", 0, 0, failing.run, attempt=1)
    assert journal.keys(updates=7) == {"c": (0, [0])}


@in_loop
async def test_a_request_is_cancelled_when_the_last_who_waits_has_gone_and_then_runs_again() -> None:
    journal, request = Journal("life"), Request()
    tasks = [asyncio.ensure_future(journal.once("c", 0, 0, request.run)) for _ in range(2)]
    await soon()
    tasks[0].cancel()
    await soon()
    assert not request.cancelled
    tasks[1].cancel()
    await soon()
    assert request.cancelled
    await applied(journal, 0)


@in_loop
async def test_who_joined_a_request_that_was_cancelled_runs_it() -> None:
    journal, first, second = Journal("life"), Request(), Request()
    second.end(Applied(1, ANSWER))
    gone = asyncio.ensure_future(journal.once("c", 0, 0, first.run))
    await soon()
    joined = asyncio.ensure_future(journal.once("c", 0, 0, second.run, attempt=1))
    await soon()
    gone.cancel()
    first.cancel()  # as after a broken connection
    assert await joined == (ANSWER, False)


@in_loop
async def test_a_request_that_has_begun_settles_without_its_client() -> None:
    journal, request = Journal("life"), Request()
    request.cancel = lambda: None  # type: ignore[method-assign]  # it runs already
    gone = asyncio.ensure_future(journal.once("c", 0, 0, request.run))
    await soon()
    gone.cancel()
    await soon()
    request.end(Applied(3, ANSWER))
    await soon()
    assert journal.keys(3) == {"c": (0, [0])}
    assert await journal.once("c", 0, 0, request.run, attempt=1) == (ANSWER, True)


@in_loop
async def test_keys_below_ack_are_forgotten_and_late_attempts_of_them_refused() -> None:
    journal = Journal("life")
    for seq in range(3):
        await applied(journal, seq, update=seq + 1)
    await applied(journal, 3, update=4, ack=2)
    assert journal.keys(4) == {"c": (2, [2, 3])}
    with pytest.raises(AppliedError, match="acknowledged"):
        await applied(journal, 1)
    assert (await journal.once("c", 2, 2, Request().run))[1], "the number of ack itself is still open"


@in_loop
async def test_a_snapshot_holds_the_keys_of_its_updates_alone() -> None:
    journal = Journal("life")
    for seq in range(4):
        await applied(journal, seq, update=seq + 1)
    assert journal.keys(2) == {"c": (0, [0, 1])}


@in_loop
async def test_after_a_restart_applied_keys_are_refused_and_lost_ones_run() -> None:
    journal = Journal("second life")
    journal.restore({"c": (2, [3])})
    with pytest.raises(AppliedError, match="applied in update 0, and its answer is gone"):
        await journal.once("c", 3, 0, Request().run, attempt=1, incarnation="first life")
    await applied(journal, 2)
    with pytest.raises(AppliedError, match="acknowledged"):
        await applied(journal, 1)


@in_loop
async def test_answers_are_kept_up_to_a_size_and_then_said_to_be_gone() -> None:
    journal = Journal("life")
    journal_module_keep, journal_module.KEEP_ANSWERS_BYTES = journal_module.KEEP_ANSWERS_BYTES, 20
    try:
        for seq in range(4):
            await applied(journal, seq)
    finally:
        journal_module.KEEP_ANSWERS_BYTES = journal_module_keep
    assert (await journal.once("c", 3, 0, Request().run, attempt=1))[1]
    with pytest.raises(AppliedError, match="answer is gone"):
        await journal.once("c", 0, 0, Request().run, attempt=1)


@in_loop
async def test_a_client_that_said_nothing_for_long_is_forgotten_and_told_so() -> None:
    now = [0.0]
    journal = Journal("life", now=lambda: now[0])
    await applied(journal, 0)
    now[0] = journal_module.KEEP_CLIENT_S + 1
    await journal.once("d", 0, 0, (lambda request: (request.end(Applied(2, ANSWER)), request.run)[1])(Request()))
    assert set(journal.keys(9)) == {"d"}
    with pytest.raises(AppliedError, match="forgotten"):
        await journal.once("c", 0, 0, Request().run, attempt=1, incarnation="life")
    new = Request()
    new.end(Applied(3, ANSWER))
    await journal.once("e", 0, 0, new.run, attempt=1, incarnation="")  # its first attempt did not arrive
    assert new.begun == 1


@in_loop
async def test_a_client_that_was_forgotten_before_its_first_answer_is_told_so() -> None:
    """The client has had no answer from any run of the server. Shortly after its first attempt it counts as new; much
    later it may have been forgotten, so it is refused.
    """
    for age, refused in ((0.0, False), (journal_module.KEEP_CLIENT_S / 3, False), (journal_module.KEEP_CLIENT_S, True)):
        request = Request()
        request.end(Applied(1, ANSWER))
        asked = Journal("life").once("c", 0, 0, request.run, attempt=1, incarnation="", age=age)
        if refused:
            with pytest.raises(AppliedError, match="was forgotten"):
                await asked
        else:
            await asked
        assert request.begun == (not refused)
    with pytest.raises(AppliedError):
        await Journal("life").once("c", 0, 0, request.run, attempt=1, age=float("nan"))


@in_loop
async def test_what_is_remembered_has_an_end() -> None:
    most, journal_module.MAX_OPEN, clients, journal_module.MAX_CLIENTS = (
        journal_module.MAX_OPEN,
        2,
        journal_module.MAX_CLIENTS,
        2,
    )
    try:
        journal = Journal("life")
        await applied(journal, 0)
        await applied(journal, 1)
        with pytest.raises(QueueFull, match="not acknowledged"):
            await applied(journal, 2)
        await applied(journal, 2, ack=1)
        request = Request()
        request.end(Applied(1, ANSWER))
        await journal.once("d", 0, 0, request.run)
        with pytest.raises(QueueFull, match="2 clients"):
            await journal.once("e", 0, 0, request.run)
    finally:
        journal_module.MAX_OPEN, journal_module.MAX_CLIENTS = most, clients


def test_ack_is_the_lowest_number_that_is_open() -> None:
    numbers = RequestNumbers()
    assert numbers.ack() == 0
    assert [numbers.new() for _ in range(4)] == [0, 1, 2, 3]
    numbers.close(0)
    numbers.close(2)
    assert numbers.ack() == 1
    numbers.close(1)
    assert numbers.ack() == 3
    numbers.close(3)
    assert numbers.ack() == 4


# --- random histories against an exact model ---


class Saved(NamedTuple):
    state: dict[int, int]
    updates: int
    keys: AppliedKeys


class World:
    """A client whose attempts overlap and lose answers, and a server that is killed and restarted. ``state`` stands for
    the parameters: how often each key was applied. A kill loses changes since the last checkpoint.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.life = self.kills = self.updates = 0
        self.state: dict[int, int] = {}
        self.saved = Saved({}, 0, {})
        self.journal = Journal("0")
        self.numbers = RequestNumbers()
        self.attempts: dict[int, int] = {}  # number of attempts, by open key
        self.tasks: list[tuple[int, asyncio.Task[Any]]] = []
        self.running: list[tuple[int, Request]] = []
        self.answered: list[int] = []
        self.known = ""
        self.saving: asyncio.Task[None] | None = None

    def send(self, key: int) -> None:
        def run() -> tuple[Awaitable[Applied], Callable[[], Any]]:
            request = Request()
            self.running.append((key, request))

            def cancel() -> None:
                if (key, request) in self.running:
                    self.running.remove((key, request))
                    request.cancel()

            return request.outcome, cancel

        ask = self.journal.once("c", key, self.numbers.ack(), run, attempt=self.attempts[key], incarnation=self.known)
        self.attempts[key] += 1
        self.tasks.append((key, asyncio.ensure_future(ask)))

    def new(self) -> None:
        key = self.numbers.new()
        self.attempts[key] = 0
        self.send(key)

    def again(self) -> None:
        if self.attempts:
            self.send(self.chance.choice(list(self.attempts)))

    def apply(self) -> None:
        """Apply one batch with some of the running requests; their results come later."""
        batch = [one for one in self.running if self.chance.random() < 0.6]
        self.running = [one for one in self.running if one not in batch]
        if batch:
            self.updates += 1
        for key, request in batch:
            self.state[key] = self.state.get(key, 0) + 1
            found, life = Applied(self.updates, ANSWER), self.life
            asyncio.get_running_loop().call_later(
                self.chance.random() * 1e-3, lambda r=request, f=found, of=life: of == self.life and r.end(f)
            )

    def cut(self) -> None:
        if self.tasks:
            self.tasks.pop(self.chance.randrange(len(self.tasks)))[1].cancel()

    def save(self) -> None:
        if self.saving is None or self.saving.done():
            self.saving = asyncio.ensure_future(self.write())

    async def write(self) -> None:
        journal, state, updates = self.journal, dict(self.state), self.updates
        await journal.settled()
        if journal is self.journal:
            self.saved = Saved(state, updates, journal.keys(updates))

    def kill(self) -> None:
        self.life, self.kills = self.life + 1, self.kills + 1
        for _, task in self.tasks:
            task.cancel()
        if self.saving:
            self.saving.cancel()
        self.tasks, self.running = [], []
        self.state, self.updates = dict(self.saved.state), self.saved.updates
        self.journal = Journal(str(self.life))
        self.journal.restore(self.saved.keys)

    def look(self) -> None:
        """Check the answers that the client sees, and the invariants."""
        for key, task in [one for one in self.tasks if one[1].done()]:
            self.tasks.remove((key, task))
            if not task.cancelled() and key in self.attempts:
                if task.exception() is None:
                    self.answered.append(key)
                    self.known = str(self.life)
                elif not isinstance(task.exception(), AppliedError):
                    continue
                del self.attempts[key]
                self.numbers.close(key)
        assert max(self.state.values(), default=0) <= 1, "a request was applied twice"

    async def live(self, kills: bool) -> None:
        steps = [self.new] * 6 + [self.again] * 5 + [self.apply] * 5 + [self.cut] * 3 + [self.save] * 2
        steps += [self.kill] if kills else []
        for _ in range(80):
            self.chance.choice(steps)()
            await asyncio.sleep(self.chance.choice([0, 0, 1e-4, 1e-3]))
            self.look()
        for _ in range(5000):  # at the end, repeat all requests until they are answered
            if not self.attempts:
                break
            self.again()
            self.apply()
            await asyncio.sleep(1e-3)
            self.look()
        assert not self.attempts, "a request is never answered"
        for _, task in self.tasks:
            task.cancel()
        if self.saving:
            await asyncio.wait([self.saving], timeout=0.1)


@pytest.mark.parametrize("kills", [False, True])
def test_random_histories_apply_nothing_twice_and_lose_nothing_without_a_kill(kills: bool) -> None:
    async def run() -> int:
        worlds = [World(seed) for seed in range(rounds(150, 5000))]
        for begin in range(0, len(worlds), 50):  # many at a time: they mostly sleep
            await asyncio.gather(*(world.live(kills) for world in worlds[begin : begin + 50]))
        for world in worlds:
            if not world.kills:
                lost = [key for key in world.answered if world.state.get(key) != 1]
                assert not lost, "an answered request is not in the parameters"
        return sum(world.kills for world in worlds)

    found = asyncio.run(run())
    assert (found > 50) is kills
