"""Sends many requests together, and waits for as many answers as the rows need.

The wait ends when every request is done; ``forward_timeout`` or ``backward_timeout`` seconds after it began; or
``timeout_after_k_min`` seconds after every row had the answers that it needs, or could not get them any more. Requests
that are still pending then are cancelled if they have not begun, and ignored if they have.

A mixture that is called inside a batch (by an expert) runs its requests in its own thread, because the runtime may have
no other worker. Then ``timeout_after_k_min`` has no effect, and the other timeouts end the wait only between batches.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pymoe import _runtime
from pymoe._errors import describe_error
from pymoe.mixture.members import Member, MemberPass
from pymoe.mixture.options import Rules
from pymoe.mixture.routing import Group
from pymoe.runtime.future import Future, tell
from pymoe.runtime.gradients import all_finite
from pymoe.runtime.room import Place
from pymoe.runtime.timers import deadline_after, seconds_left

IDLE_CHECK_PERIOD_S = 2.0  # interval at which a wait checks that a runtime serves the pools
SAME_DEADLINE_S = 0.05  # a request that times out at most this long before the deadline counts as given up


class GivenUp(TimeoutError):
    """Reports that the answer of a backend did not come in time."""


class AnomalyError(FloatingPointError):
    """Reports that the answer of a backend contains NaN or infinity."""


class TooFewAnswersError(RuntimeError):
    """Raised if rows of a mixture got fewer answers, or fewer gradients, than they need.

    Attributes:
        rows: the indices of these rows.
        failures: the reasons for missing answers, by the backend's name. If there are any, one of these reasons is the
            ``__cause__`` of this error.
    """

    def __init__(self, name: str, what: str, k_min: int, few: Tensor, failures: Mapping[str, BaseException]) -> None:
        self.rows: list[int] = few.nonzero().flatten().tolist()
        self.failures = dict(failures)
        reasons = "; ".join(f"{backend}: {describe_error(why)}" for backend, why in failures.items())
        super().__init__(
            f"{name}: {len(self.rows)} of {len(few)} rows got fewer than {k_min} {what} "
            f"({reasons or 'there is no backend to ask'})"
        )
        # Prefer an expert's own exception, which says more than a timeout.
        causes = sorted(failures.values(), key=lambda why: isinstance(why, TimeoutError))
        self.__cause__ = causes[0] if causes else None


class ExpertRequest(NamedTuple):
    """A request to an expert for rows ``tokens`` of the mixture's input; ``tensors`` contain the data of these rows."""

    group: Group
    to: MemberPass
    tensors: Sequence[Tensor]
    tokens: Tensor

    @property
    def member(self) -> Member:
        return self.group.member


class Answers:
    """The outcomes of requests.

    Attributes:
        results: the answer to each request, as a tuple of tensors; None if no answer came in time or it was rejected.
        failures: the reasons for missing answers, by the backend's name.
        came: (T,) the number of answers that each row has.
        possible: (T,) the number of answers that each row has or can still get.
    """

    def __init__(self, requests: Sequence[ExpertRequest], rows: int) -> None:
        self.requests = requests
        self.results: list[tuple[Any, ...] | None] = [None] * len(requests)
        self.failures: dict[str, BaseException] = {}
        self.came = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self.possible = torch.zeros(rows, dtype=torch.int64, device="cpu")
        for request in requests:
            self.possible[request.tokens] += 1

    def add(self, index: int, result: tuple[Any, ...]) -> None:
        self.results[index] = result
        self.came[self.requests[index].tokens] += 1

    def fail(self, index: int, why: BaseException) -> None:
        request = self.requests[index]
        self.failures[request.member.name] = why
        self.possible[request.tokens] -= 1
        request.member.log.no_answer(request.to.name, why)

    def settled(self, needed: Tensor) -> bool:
        """Return whether every row has the answers that it needs, or cannot get them any more."""
        return bool(((self.came >= needed) | (self.possible < needed)).all())


class Pending:
    """Requests that were sent; :meth:`get` returns them in the order in which they end.

    Requests whose results come after :meth:`close` are counted as late.
    """

    def __init__(self, limited: bool) -> None:
        self._run_inline = _runtime.must_help(limited)
        self._lock = threading.Lock()
        self._open = True
        self._ended: queue.SimpleQueue[tuple[int, Future | BaseException, float]] = queue.SimpleQueue()
        self._futures: list[Future] = []
        self._places: list[Place] = []

    def send(self, index: int, request: ExpertRequest, deadline: float | None) -> None:
        """Send ``request`` immediately or, if its pool is full, as soon as there is room.

        Only inside a batch does this method itself wait for room. :meth:`get` will return the outcome together with
        ``index``.

        Raises:
            Exception: the pool refused the request with this exception.
        """
        pool = request.to.pool

        def submit() -> Future | None:
            return pool._try_submit(*request.tensors, timeout=seconds_left(deadline))

        future = pool.submit_task(*request.tensors, timeout=seconds_left(deadline)) if self._run_inline else submit()
        if future is not None:
            return self._sent(index, request.to.count, future)
        place = pool._line.join(submit)
        self._places.append(place)
        place.add_done_callback(functools.partial(self._left_line, index, request.to.count))
        return None

    def _left_line(self, index: int, count: Callable[[str], None], place: Any) -> None:
        if place.cancelled():
            return
        if (error := place.exception()) is not None:
            self._ended.put((index, error, time.perf_counter()))
        else:
            self._sent(index, count, place.result())

    def _sent(self, index: int, count: Callable[[str], None], future: Future) -> None:

        def ended(future: Future) -> None:
            with self._lock:
                if self._open:
                    self._ended.put((index, future, time.perf_counter()))
                    return
            if not future.cancelled() and future.exception() is None:
                count("late")

        self._futures.append(future)
        tell(future, ended)

    def run_inline(self, deadline: float | None) -> None:
        """Run the requests in this thread if this thread is running a batch, as there may be no other free worker.

        This is done by waiting for their futures: in such a thread, the wait runs the request itself.
        """
        for future in self._futures if self._run_inline else ():
            with suppress(TimeoutError, CancelledError):
                future.exception(seconds_left(deadline))

    def get(self, timeout: float) -> tuple[int, Future | BaseException, float]:
        """Return index, outcome and time of the next request that ends.

        Raises:
            queue.Empty: no request has ended within ``timeout`` seconds.
        """
        return self._ended.get(timeout=timeout)

    def close(self) -> None:
        """Stop waiting, and cancel the requests that have not begun. Those that wait for room are never sent."""
        with self._lock:
            self._open = False
        for place in self._places:
            place.cancel()
        for future in self._futures:
            future.cancel()


def ask(
    mixture: str, rules: Rules, requests: Sequence[ExpertRequest], needed_T: Tensor, *, backward: bool = False
) -> tuple[Answers, Tensor]:
    """Send all ``requests``, each to a different backend, and wait for answers, as the module docstring describes.

    Returns:
        The answers, and a (T,) mask on the CPU of the rows that got fewer answers than ``needed_T`` says.

    Raises:
        TooFewAnswersError: rows got too few answers, and ``rules.raises`` is true.
        ValueError, TypeError: a pool does not accept the tensors of its request, which is a mistake of the caller, not
            of the backend. In this case, and if the wait is interrupted, requests that have not begun are cancelled.
    """
    deadline = deadline_after(rules.backward_timeout if backward else rules.forward_timeout)
    answers = Answers(requests, len(needed_T))
    pending = Pending(limited=deadline is not None or rules.timeout_after_k_min is not None)
    sent: dict[int, float] = {}
    try:
        for index, request in enumerate(requests):
            request.to.count("requests", rows=len(request.tokens))
            sent[index] = time.perf_counter()
            try:
                pending.send(index, request, deadline)
            except (ValueError, TypeError):
                raise
            except Exception as error:  # the pool refuses the request: it is full or closed, or its server is gone
                del sent[index]
                request.to.count("failed")
                answers.fail(index, error.with_traceback(None))  # the traceback would keep this frame's tensors alive
        pending.run_inline(deadline)
        _collect(answers, pending, sent, needed_T, deadline, rules)
    finally:
        pending.close()
        for index in sent:
            requests[index].to.count("given_up")
    for index, begin in sent.items():
        requests[index].member.backoff.timed_out()
        answers.fail(index, _given_up(requests[index], time.perf_counter() - begin))
    few_T = answers.came < needed_T
    if rules.raises and bool(few_T.any()):
        what, k_min = ("gradients", rules.backward_k_min) if backward else ("answers", rules.k_min)
        raise TooFewAnswersError(mixture, what, k_min, few_T, answers.failures)
    return answers, few_T


def _collect(
    answers: Answers, pending: Pending, sent: dict[int, float], needed_T: Tensor, deadline: float | None, rules: Rules
) -> None:
    """Move requests from ``sent`` to ``answers`` as they end, until the wait is over."""
    enough = False
    while sent:
        if not enough and answers.settled(needed_T):
            enough = True
            grace = deadline_after(rules.timeout_after_k_min)
            if grace is not None:
                deadline = grace if deadline is None else min(deadline, grace)
        left = seconds_left(deadline)
        try:
            index, ended, when = pending.get(IDLE_CHECK_PERIOD_S if left is None else min(IDLE_CHECK_PERIOD_S, left))
            left = seconds_left(deadline)
        except queue.Empty:
            if seconds_left(deadline) == 0:
                return
            for request in [answers.requests[index] for index in sent]:
                if not request.to.pool.served:
                    request.member.log.idle(request.to.pool)
            continue
        request = answers.requests[index]
        why, result = outcome_of(ended)
        if why is None:
            if rules.detect_anomalies and not all_finite([one for one in result if isinstance(one, Tensor)]):
                request.to.count("anomalous")
                answers.fail(index, AnomalyError("the answer holds NaN or infinity"))
            else:
                request.to.count("answered", latency=when - sent[index])
                answers.add(index, result)
        elif isinstance(why, TimeoutError) and seconds_left(deadline) == 0:
            return  # the request expired in its pool as the wait ends: `ask` counts it as given up
        elif isinstance(why, TimeoutError) and left is not None and left <= SAME_DEADLINE_S:
            begin = sent.pop(index)
            request.to.count("given_up")
            request.member.backoff.timed_out()
            answers.fail(index, _given_up(request, when - begin))
            continue
        else:
            request.to.count("failed")
            answers.fail(index, why)
        request.member.backoff.answered()
        del sent[index]


def _given_up(request: ExpertRequest, seconds: float) -> GivenUp:
    """Return the error for a missing answer to ``request``, ``seconds`` after it was sent."""
    pool = request.to.pool
    return GivenUp(f"no answer within {seconds:.3g} s" + ("" if pool.served else f"; {pool.why_unserved}"))


def outcome_of(ended: Future | BaseException) -> tuple[BaseException | None, tuple[Any, ...]]:
    """Return ``(error, ())`` for a request that has failed, and ``(None, result)`` for one with a result."""
    if isinstance(ended, BaseException):
        return ended, ()
    try:
        why = ended.exception()
    except CancelledError as error:  # the runtime has cancelled the request
        return error, ()  # not assigned to `why`: the error's traceback keeps this frame, and so the future
    return why, () if why is not None else tuple(ended.result())
