"""Tests of the limits on a mixture's waits, and of the experts that it does not ask.

Nothing here depends on how fast the machine is: a wait that must end runs on a thread while an expert is held for as
long as the wait may last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixtures import LONG, WIDTH, Logits, Scaled, Stuck, backend, dead, mixture, mlp, scaled
from torch import Tensor

from pymoe.runtime import MixtureOfExpertBackends, Runtime, TooFewAnswersError

SOON = 0.05  # seconds, for timeouts that are meant to expire
ONES = torch.ones(3, WIDTH, dtype=torch.float64)


def ends(call: Callable[[], Any]) -> list[Any]:
    """Return a list with the result of ``call``; the list is empty if the call did not end."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(LONG / 4)
    return found


def test_the_seconds_after_k_min_do_not_go_past_the_limit_of_the_whole_pass() -> None:
    stuck = Stuck()
    backends = scaled(None, stuck)
    moe = mixture(backends, k_min=1, forward_timeout=1.0, timeout_after_k_min=LONG)  # e0 answers within this time
    with Runtime(backends, num_workers=2):
        found = ends(lambda: moe(ONES))
        stuck.open.set()
    assert len(found) == 1
    assert torch.equal(found[0], ONES)
    assert moe.stats()["e1"].forward.given_up == 1


def test_the_last_seconds_begin_where_a_failure_leaves_too_few_that_may_answer() -> None:
    stuck = Stuck()
    backends = scaled(dead, stuck)
    moe = mixture(backends, k_min=2, forward_timeout=None, timeout_after_k_min=SOON, on_too_few="fallback")
    with Runtime(backends, num_workers=2):
        found = ends(lambda: moe(ONES))
        stuck.open.set()
    assert len(found) == 1
    assert torch.equal(found[0], torch.zeros_like(ONES))


def test_an_expert_that_does_not_train_is_asked_for_gradients_only_if_the_inputs_need_them() -> None:
    backends = [backend("trains", Scaled(1.0)), backend("frozen", Scaled(2.0), lr=None)]
    moe = mixture(backends)

    def asked_backward() -> dict[str, int]:
        return {name: stats.backward.requests for name, stats in moe.stats().items()}

    def step(x: Tensor) -> None:
        moe(x).sum().backward()

    with Runtime(backends):
        step(ONES)
        assert asked_backward() == {"trains": 1, "frozen": 0}
        step(ONES.clone().requires_grad_())
        assert asked_backward() == {"trains": 2, "frozen": 1}


def test_a_mixture_that_nobody_serves_says_so() -> None:
    """The error names the cause, as a client's does; "no answer within 2.01 s" did not show whether the expert was
    slow.
    """
    moe = MixtureOfExpertBackends([backend("a", mlp())], top_k=1, forward_timeout=0.05)
    with pytest.raises(TooFewAnswersError, match=r"a: GivenUp: no answer within .* s; no Runtime serves the pool"):
        moe(torch.ones(2, WIDTH, dtype=torch.float64))


def test_requests_for_a_full_pool_wait_on_one_thread_and_never_run_once_they_are_given_up() -> None:
    """Each wait looked for room every 2 ms; a thread for each request would stay for as long as the expert hangs."""
    stuck = Stuck()
    backends = scaled(None, stuck, capacity=1, max_batch_size=1)
    moe = mixture(backends, gate=Logits([0.0, 0.0]), timeout_after_k_min=SOON, rest_after=None)
    pool = backends[1].forward_pool
    with Runtime(backends, num_workers=2):
        held = [pool.submit_task(ONES[:1])]
        assert stuck.begun.wait(LONG)
        held.append(pool.submit_task(ONES[:1]))
        for _ in range(5):
            moe(ONES[:1])
        assert sum(one.name == "pymoe-room" for one in threading.enumerate()) == 1
        assert not pool._line._waiting  # they stayed there with their tensors for as long as the expert hung
        stuck.open.set()
        for request in held:
            request.result()
        deadline = time.monotonic() + LONG
        while any(one.name == "pymoe-room" for one in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        submitted = pool._statistics()["submitted"]
        moe.rules = moe.rules._replace(timeout_after_k_min=None)
        assert torch.equal(moe(ONES[:1]), 1.5 * ONES[:1])
        assert pool._statistics()["submitted"] == submitted + 1
    assert submitted == len(held)
    assert moe.stats()["e1"].forward.given_up == 5
