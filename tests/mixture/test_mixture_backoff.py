"""Tests that a backend that times out repeatedly gets no requests for a while. The tests control the clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from mixtures import LONG, WIDTH, Stuck, dead, mixture, scaled

from pymoe.mixture import members
from pymoe.runtime import MixtureOfExpertBackends, Runtime

SOON = 0.02  # seconds, for timeouts that are meant to expire
ONES = torch.ones(3, WIDTH, dtype=torch.float64)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(members, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def requests(moe: MixtureOfExpertBackends, calls: int) -> list[int]:
    """Return the number of requests that ``calls`` calls send to each backend."""
    before = [stats.forward.requests for stats in moe.stats().values()]
    for _ in range(calls):
        moe(ONES)
    return [stats.forward.requests - count for stats, count in zip(moe.stats().values(), before, strict=True)]


def test_it_is_asked_now_and_then_ever_less_often_until_it_answers(clock: SimpleNamespace) -> None:
    stuck = Stuck()
    backends = scaled(None, stuck)
    moe = mixture(backends, timeout_after_k_min=SOON, rest_after=3, rest=10.0)
    with Runtime(backends, num_workers=2):
        assert requests(moe, 6) == [6, 3]
        assert torch.equal(moe(ONES), ONES)  # the expert that is asked gets all of the weight
        for span in (10, 20, 40):
            clock.now += span - 0.1
            assert requests(moe, 2) == [2, 0]
            clock.now += 0.2
            assert requests(moe, 2) == [2, 1]
        stuck.open.set()
        moe.rules = moe.rules._replace(timeout_after_k_min=None)
        clock.now += 80.1
        assert requests(moe, 3) == [3, 3]
        stuck.open.clear()
        moe.rules = moe.rules._replace(timeout_after_k_min=SOON)
        assert requests(moe, 6) == [6, 3]  # as before the timeouts
        stuck.open.set()


def test_a_backoff_has_a_longest_span(clock: SimpleNamespace) -> None:
    backoff = members.Backoff()
    for _ in range(2000):
        backoff.timed_out()
    assert backoff.seconds_left(3, 10.0) == 640.0
    assert backoff.seconds_left(5000, 10.0) == 0.0
    backoff.answered()
    assert backoff.seconds_left(3, 10.0) == 0.0


def test_all_are_asked_where_the_others_are_too_few(clock: SimpleNamespace) -> None:
    stuck = Stuck()
    backends = scaled(None, stuck, stuck)
    moe = mixture(backends, top_k=3, k_min=2, forward_timeout=SOON, rest_after=1, rest=LONG, on_too_few="fallback")
    with Runtime(backends, num_workers=3):
        assert requests(moe, 4) == [4, 4, 4]
        stuck.open.set()


def test_with_none_it_is_asked_every_time(clock: SimpleNamespace) -> None:
    stuck = Stuck()
    backends = scaled(None, stuck)
    moe = mixture(backends, timeout_after_k_min=0.0, rest_after=None)
    with Runtime(backends, num_workers=2):
        assert requests(moe, 15) == [15, 15]
        stuck.open.set()


def test_errors_come_at_once_and_start_no_backoff(clock: SimpleNamespace) -> None:
    backends = scaled(None, dead)
    moe = mixture(backends, rest_after=1, rest=LONG)
    with Runtime(backends):
        assert requests(moe, 5) == [5, 5]


def test_gradients_that_do_not_come_count_too(clock: SimpleNamespace) -> None:
    stuck = Stuck()
    backends = scaled(None, None)
    backends[1].expert.factor.register_hook(lambda grad: stuck(grad))
    moe = mixture(backends, rest_after=1, rest=LONG, backward_k_min=1, backward_timeout=1.0)
    with Runtime(backends, num_workers=2):
        moe(ONES).sum().backward()
        assert requests(moe, 2) == [2, 0]
        stuck.open.set()
