"""Many requests at once, and the wait for as many answers as are needed.

The wait ends when every request has ended; ``timeout`` seconds after it began; or ``timeout_after`` seconds after
every row had the answers that it needs, or could not get them any more. What is under way then is cancelled if it has
not begun, and ignored if it has. Inside a batch, whose runtime may have no other worker, a thread runs what it asks for
itself: there only ``timeout`` ends the wait, and only between batches.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pymoe import _runtime
from pymoe.mixture.choice import Group
from pymoe.mixture.slots import Member, Pass
from pymoe.runtime.future import Future, deadline_after, seconds_left

PATIENCE = 2.0  # seconds after which a wait looks whether anybody serves the pools
ROOM_PERIOD = 0.002  # seconds between two looks whether a full pool has room


class GivenUp(TimeoutError):
    """Why a backend's answer is missing: it was not there in time."""


class AnomalyError(FloatingPointError):
    """Why a backend's answer is missing: it holds NaN or infinity."""


class ExpertRequest(NamedTuple):
    """A request to come: the rows of a group, or those of them at ``tokens``."""

    group: Group
    to: Pass
    tensors: Sequence[Tensor]
    tokens: Tensor

    @property
    def member(self) -> Member:
        return self.group.member


class Answers:
    """What came: ``results`` of the requests (None where nothing came in time), and why nothing did, by backend."""

    def __init__(self, requests: Sequence[ExpertRequest], rows: int) -> None:
        self.requests = requests
        self.results: list[tuple[Any, ...] | None] = [None] * len(requests)
        self.failures: dict[str, BaseException] = {}
        self.came = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self.may_come = torch.zeros(rows, dtype=torch.int64, device="cpu")
        for request in requests:
            self.may_come[request.tokens] += 1

    def add(self, place: int, result: tuple[Any, ...]) -> None:
        self.results[place] = result
        self.came[self.requests[place].tokens] += 1

    def fail(self, place: int, why: BaseException) -> None:
        request = self.requests[place]
        self.failures[request.member.name] = why
        self.may_come[request.tokens] -= 1
        request.member.log.no_answer(request.to.name, why)

    def settled(self, needed: Tensor) -> bool:
        """Whether every row has what it needs, or cannot get it any more."""
        return bool(((self.came >= needed) | (self.may_come < needed)).all())


class Arrivals:
    """Requests as they end. What ends after :meth:`close` is counted as late."""

    def __init__(self, limited: bool) -> None:
        self._must_help = _runtime.must_help(limited)
        self._lock = threading.Lock()
        self._open = True
        self._ended: queue.SimpleQueue[tuple[int, Future | BaseException, float]] = queue.SimpleQueue()
        self._futures: list[Future] = []
        self._without_room: list[tuple[int, ExpertRequest, float | None]] = []

    def send(self, place: int, request: ExpertRequest, deadline: float | None) -> None:
        """Send a request; where the pool is full, as soon as :meth:`get` finds room.

        Raises:
            Exception: whatever the pool raises, in the usual case.
        """
        timeout = seconds_left(deadline)
        submit = request.to.pool.submit_task if self._must_help else request.to.pool._try_submit
        future = submit(*request.tensors, timeout=timeout)
        if future is not None:
            self._follow(place, request, future)
        else:
            self._without_room.append((place, request, deadline))

    def _look_for_room(self) -> None:
        waiting, self._without_room = self._without_room, []
        for place, request, deadline in waiting:
            try:
                self.send(place, request, deadline)
            except Exception as error:
                self._ended.put((place, error.with_traceback(None), time.perf_counter()))

    def _follow(self, place: int, request: ExpertRequest, future: Future) -> None:
        counts = request.to.counts

        def ended(future: Future) -> None:
            with self._lock:
                if self._open:
                    self._ended.put((place, future, time.perf_counter()))
                    return
            if not future.cancelled() and future.exception() is None:
                counts.add("late")

        self._futures.append(future)
        future.add_done_callback(ended)

    def help(self, deadline: float | None) -> None:
        """Run what was sent where nobody else may be able to: a wait for one request does, one for many does not."""
        for future in self._futures if self._must_help else ():
            with suppress(TimeoutError, CancelledError):
                future.exception(seconds_left(deadline))

    def get(self, timeout: float) -> tuple[int, Future | BaseException, float]:
        """The next one; ``queue.Empty`` if none came in time."""
        until = time.monotonic() + timeout
        while self._without_room:
            # The caller looks again and again: a thread that waits for room stays as long as its expert hangs.
            with suppress(queue.Empty):
                return self._ended.get(timeout=min(ROOM_PERIOD, max(0.0, until - time.monotonic())))
            if time.monotonic() >= until:
                raise queue.Empty
            self._look_for_room()
        return self._ended.get(timeout=max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Nobody waits any more: cancel what has not begun."""
        with self._lock:
            self._open = False
        for future in self._futures:
            future.cancel()


def gather_answers(
    requests: Sequence[ExpertRequest],
    needed: Tensor,
    *,
    timeout: float | None,
    timeout_after: float | None,
    acceptable: Callable[[tuple[Any, ...]], bool],
) -> Answers:
    """Send all ``requests``, and wait for the answers.

    Args:
        requests: each to another backend; a row is in some of them.
        needed: (T,) on the CPU: how many answers each row must have.
        timeout: seconds from now; None: as long as it takes.
        timeout_after: seconds from when every row has the answers that it needs; None: no other limit.
        acceptable: whether an answer counts.

    Raises:
        ValueError, TypeError: a pool does not take such tensors: the caller's mistake and not the backend's. Nothing is
            left under way then, nor when the wait is interrupted.
    """
    answers = Answers(requests, len(needed))
    deadline = deadline_after(timeout)
    arrivals = Arrivals(timeout is not None or timeout_after is not None)
    sent: dict[int, float] = {}
    try:
        for place, request in enumerate(requests):
            request.to.counts.add("requests", rows=len(request.tokens))
            sent[place] = time.perf_counter()
            try:
                arrivals.send(place, request, deadline)
            except (ValueError, TypeError):
                raise
            except Exception as error:  # full, closed, or gone
                del sent[place]
                request.to.counts.add("failed")
                answers.fail(place, error.with_traceback(None))  # which holds this frame, with all tensors
        arrivals.help(deadline)
        collect(answers, arrivals, sent, needed, deadline, timeout_after, acceptable)
    finally:
        arrivals.close()
        for place in sent:
            requests[place].to.counts.add("given_up")
    for place, begin in sent.items():
        requests[place].member.rest.given_up()
        answers.fail(place, GivenUp(f"no answer within {time.perf_counter() - begin:.3g} s"))
    return answers


def collect(
    answers: Answers,
    arrivals: Arrivals,
    sent: dict[int, float],
    needed: Tensor,
    deadline: float | None,
    timeout_after: float | None,
    acceptable: Callable[[tuple[Any, ...]], bool],
) -> None:
    """Take out of ``sent`` what ends in time."""
    enough = False
    while sent:
        if not enough and answers.settled(needed):
            enough = True
            grace = deadline_after(timeout_after)
            if grace is not None:
                deadline = grace if deadline is None else min(deadline, grace)
        left = seconds_left(deadline)
        try:
            place, ended, when = arrivals.get(PATIENCE if left is None else min(PATIENCE, left))
        except queue.Empty:
            if seconds_left(deadline) == 0:
                return
            for request in [answers.requests[place] for place in sent]:
                if not request.to.pool.served:
                    request.member.log.idle(request.to.pool.name)
            continue
        request = answers.requests[place]
        begin = sent[place]
        why = why_not(ended)
        if why is None:
            assert not isinstance(ended, BaseException)
            result = tuple(ended.result())
            if acceptable(result):
                request.to.counts.add("answered", latency=when - begin)
                answers.add(place, result)
            else:
                request.to.counts.add("anomalous")
                answers.fail(place, AnomalyError("the answer holds NaN or infinity"))
        elif isinstance(why, TimeoutError) and seconds_left(deadline) == 0:
            return  # the pool has given it up, as we are about to
        else:
            request.to.counts.add("failed")
            answers.fail(place, why)
        request.member.rest.answered()
        del sent[place]


def why_not(ended: Future | BaseException) -> BaseException | None:
    """Why there is no result, if there is none."""
    if isinstance(ended, BaseException):
        return ended
    try:
        return ended.exception()
    except CancelledError as error:  # by its runtime
        return error
