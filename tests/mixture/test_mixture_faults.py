"""Tests of mixtures with dead, slow or faulty experts: their counts, results, errors, and that nothing is left behind.

Slow experts are blocked until the test releases them, so results do not depend on the machine's speed.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import weakref
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch
from mixtures import LONG, WIDTH, Logits, Plain, Scaled, Stuck, backend, dead, mixture, mlp, scaled
from torch import Tensor, nn

from pymoe.mixture import fan_out
from pymoe.runtime import Runtime, TooFewAnswersError

SOON = 0.05  # seconds, for timeouts that are meant to expire
ONES = torch.ones(3, WIDTH, dtype=torch.float64)


def nan(x: Tensor) -> None:
    x.fill_(math.nan)


class OnlyForward(nn.Module):
    """An expert whose backward pass calls ``hook``."""

    def __init__(self, factor: float, hook: Any) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        y = self.factor * x
        if y.requires_grad:
            y.register_hook(self.hook)
        return y


def quiet(moe: Any) -> bool:
    """Return whether every request is accounted for."""
    return all(
        one.requests == one.answered + one.failed + one.anomalous + one.given_up
        for stats in moe.stats().values()
        for one in (stats.forward, stats.backward)
    )


# --- answers that do not come ---


def test_weights_are_those_of_the_answers_that_came() -> None:
    backends = [backend(f"e{i}", mlp(i)) for i in range(4)]
    moe = mixture(backends, top_k=3)
    plain = Plain(moe, out=[1])
    backends[1].expert.register_forward_hook(lambda *_: dead(ONES))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, WIDTH, dtype=torch.float64, generator=generator)
    mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    with Runtime(backends, num_workers=2):
        y, expected = moe(mine), plain(its)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        grad = torch.randn_like(x)
        y.backward(grad)
        expected.backward(grad)
    torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-12)
    for one, other in zip(moe.gate.parameters(), plain.gate.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    stats = moe.stats()["e1"]
    assert (stats.forward.failed, stats.forward.answered, stats.backward.requests) == (1, 0, 0)
    assert quiet(moe)


def test_gradients_of_answers_that_did_not_come_are_zero_and_not_whatever_the_memory_held() -> None:
    """``detect_anomalies`` also checked this uninitialised memory, so training sometimes failed without a reason."""
    backends = scaled(None, dead)
    moe = mixture(backends, gate=Logits([0.0, 0.0]), detect_anomalies=True)
    x = torch.ones(512, WIDTH, dtype=torch.float64)
    with Runtime(backends):
        for _ in range(50):
            nothing = [torch.full((1024, WIDTH), math.nan, dtype=torch.float64) for _ in range(8)]
            y = moe(x).sum()
            del nothing  # the next allocations reuse this memory
            y.backward()


def test_a_late_answer_is_ignored_and_counted() -> None:
    stuck = Stuck()
    backends = scaled(None, stuck)
    moe = mixture(backends, gate=Logits([0.0, 5.0]), timeout_after_k_min=SOON)
    with Runtime(backends, num_workers=2):
        y = moe(ONES)
        assert torch.equal(y, ONES)  # the expert that answered has all of the weight
        assert moe.stats()["e1"].forward.given_up == 1
        stuck.open.set()
    stats = moe.stats()["e1"].forward
    assert (stats.given_up, stats.late, stats.answered) == (1, 1, 0)
    assert quiet(moe)


def test_what_has_not_begun_is_cancelled() -> None:
    stuck = Stuck()
    backends = scaled(None, stuck, max_batch_size=3)
    moe = mixture(backends, gate=Logits([0.0, 5.0]), timeout_after_k_min=SOON)
    with Runtime(backends, num_workers=2) as runtime:
        for _ in range(4):
            moe(ONES)
        assert stuck.begun.wait(LONG)
        stats = runtime.stats()["e1_forward"]
        assert (stats.cancelled, stats.queued) == (3, 0)
        stuck.open.set()
    assert moe.stats()["e1"].forward.late == 1


def test_every_row_gets_its_k_min_before_the_last_seconds_begin() -> None:
    stuck = Stuck()
    backends = scaled(None, None, stuck, None)
    inf = math.inf
    # The second row needs the expert that is held; the other rows have so many answers that each row has two on
    # average.
    gate = Logits([[5.0, 4.0, -inf, 3.0], [-inf, 5.0, 4.0, -inf], [5.0, 4.0, -inf, 3.0]])
    moe = mixture(backends, gate=gate, top_k=3, k_min=2, timeout_after_k_min=0.0)
    results: list[Tensor] = []
    with Runtime(backends, num_workers=2):
        caller = threading.Thread(target=lambda: results.append(moe(ONES)))
        caller.start()
        assert stuck.begun.wait(LONG)
        while caller.is_alive() and any(moe.stats()[f"e{i}"].forward.answered == 0 for i in (0, 1, 3)):
            time.sleep(0.001)
        caller.join(SOON)
        assert caller.is_alive()
        stuck.open.set()
        caller.join(LONG)
    assert results[0][1, 0] > 2
    assert all(one.forward.given_up == 0 for one in moe.stats().values())


def test_too_few_answers_raise_the_experts_own_error_as_the_cause() -> None:
    backends = scaled(None, dead, dead)
    gate = Logits([[5.0, 4.0, -9.0], [-9.0, 5.0, 4.0], [-9.0, 5.0, 4.0]])
    moe = mixture(backends, gate=gate)
    with Runtime(backends), pytest.raises(TooFewAnswersError, match="2 of 3 rows got fewer than 1 answers") as caught:
        moe(ONES)
    assert caught.value.rows == [1, 2]
    assert set(caught.value.failures) == {"e1", "e2"}
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_the_limit_of_the_whole_pass_ends_a_wait_for_k_min() -> None:
    stuck = Stuck()
    backends = scaled(None, stuck)
    moe = mixture(backends, k_min=2, forward_timeout=SOON)
    with Runtime(backends, num_workers=2):
        with pytest.raises(TooFewAnswersError) as caught:
            moe(ONES)
        assert isinstance(caught.value.__cause__, TimeoutError)
        stuck.open.set()
    assert quiet(moe)


@pytest.mark.parametrize("fallback", ["zeros", "input", "function", "module"])
def test_rows_with_too_few_answers_fall_back(fallback: str) -> None:
    backends = scaled(None, dead)
    gate = Logits([[5.0, -9.0], [-9.0, 5.0], [5.0, -9.0]])
    spare = Scaled(7.0)
    choices = {"function": lambda x: x * 10, "module": spare}
    moe = mixture(backends, gate=gate, top_k=1, on_too_few="fallback", fallback=choices.get(fallback, fallback))
    x = ONES.clone().requires_grad_()
    expected = {"zeros": 0.0, "input": 1.0, "function": 10.0, "module": 7.0}[fallback]
    with Runtime(backends):
        y = moe(x)
        assert y[:, 0].tolist() == [1.0, expected, 1.0]
        y.sum().backward()
    assert x.grad[:, 0].tolist() == [1.0, expected, 1.0]
    assert (spare.factor.grad is not None) == (fallback == "module")
    assert backends[0].updates == 1
    assert backends[1].updates == 0


def test_a_row_that_falls_back_trains_nobody() -> None:
    seen = []
    backends = [backend("e0", OnlyForward(1.0, lambda grad: seen.append(len(grad)))), *scaled(None, dead)[1:]]
    gate = Logits([[5.0, -torch.inf], [4.0, 5.0], [5.0, -torch.inf]])
    moe = mixture(backends, gate=Logits([5.0, 5.0]), k_min=2, on_too_few="fallback")
    with Runtime(backends):
        moe(ONES).sum().backward()
        assert not seen
        moe = mixture(backends, gate=gate, k_min=1)
        moe(ONES).sum().backward()
    assert seen == [3]


def test_rows_beside_one_that_falls_back_keep_their_answers_and_gradients() -> None:
    backends = scaled(None, dead, None, lr=None)
    inf = math.inf
    gate = Logits([[0.0, 0.0, -inf], [0.0, -inf, 0.0], [0.0, -inf, 0.0]])
    moe = mixture(backends, gate=gate, k_min=2, on_too_few="fallback")
    x = torch.arange(1.0, 4.0, dtype=torch.float64)[:, None].repeat(1, WIDTH).requires_grad_()
    with Runtime(backends):
        y = moe(x)
        y.square().sum().backward()
    assert y[:, 0].tolist() == [0.0, 4.0, 6.0]
    assert x.grad[:, 0].tolist() == [0.0, 16.0, 24.0]


def test_a_row_needs_no_more_gradients_than_it_had_answers() -> None:
    backends = scaled(None, dead)
    moe = mixture(backends, gate=Logits([0.0, 0.0]), backward_k_min=2)
    with Runtime(backends):
        moe(ONES).sum().backward()
    assert backends[0].updates == 1


def test_without_any_backend_all_rows_fall_back() -> None:
    (only,) = scaled(None)
    moe = mixture([only], on_too_few="fallback", fallback="input")
    strict = mixture([only])
    moe.remove_backend(only)
    strict.remove_backend("e0")
    x = ONES.clone().requires_grad_()
    moe(x).sum().backward()
    assert torch.equal(x.grad, ONES)
    with pytest.raises(TooFewAnswersError, match="there is no backend to ask"):
        strict(x)
    assert strict(x[:0]).shape == (0, WIDTH)


# --- answers that are none ---


@pytest.mark.parametrize("looks", [True, False])
def test_answers_that_are_not_finite_count_as_if_they_had_not_come(looks: bool) -> None:
    backends = scaled(None, None)
    backends[1].expert.register_forward_hook(lambda module, args, output: output * math.nan)
    moe = mixture(backends, gate=Logits([0.0, 0.0]), detect_anomalies=looks)
    with Runtime(backends):
        y = moe(ONES)
    assert bool(torch.isfinite(y).all()) == looks
    assert moe.stats()["e1"].forward.anomalous == int(looks)
    assert quiet(moe)


def test_gradients_that_are_not_finite_count_as_if_they_had_not_come() -> None:
    options: dict[str, Any] = {"nonfinite_gradients": "step"}
    backends = [
        backend("good", OnlyForward(1.0, lambda grad: grad), **options),
        backend("bad", OnlyForward(3.0, lambda grad: grad * math.inf), **options),
    ]
    moe = mixture(backends, gate=Logits([0.0, 0.0]), detect_anomalies=True)
    x = ONES.clone().requires_grad_()
    with Runtime(backends):
        moe(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.5))
    assert moe.stats()["bad"].backward.anomalous == 1


def test_a_callers_values_that_are_not_finite_raise_and_reach_no_expert() -> None:
    backends = scaled(None, None)
    moe = mixture(backends, detect_anomalies=True)
    with Runtime(backends):
        with pytest.raises(ValueError, match="an input holds NaN"):
            moe(ONES * math.nan)
        with pytest.raises(ValueError, match="a gradient that reaches"):
            moe(ONES).backward(ONES * math.inf)
    assert [one.updates for one in backends] == [0, 0]


# --- gradients that do not come ---


def test_missing_gradients_are_zero_where_enough_came() -> None:
    backends = [backend("good", Scaled(1.0)), backend("bad", OnlyForward(3.0, dead))]
    moe = mixture(backends, gate=Logits([0.0, 0.0]))
    x = ONES.clone().requires_grad_()
    with Runtime(backends):
        moe(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.5))
    torch.testing.assert_close(moe.gate.logits.grad.sum(), torch.tensor(0.0, dtype=torch.float64))
    assert moe.gate.logits.grad[1] > 0  # the gradient with respect to the answers, both of which arrived
    assert [one.updates for one in backends] == [1, 0]


@pytest.mark.parametrize(("k_min", "on_too_few"), [(2, "raise"), (0, "raise"), (2, "fallback")])
def test_too_few_gradients_raise_unless_it_is_asked_otherwise(k_min: int, on_too_few: str) -> None:
    backends = [backend("good", Scaled(1.0)), backend("bad", OnlyForward(3.0, dead))]
    moe = mixture(backends, gate=Logits([0.0, 0.0]), backward_k_min=k_min, on_too_few=on_too_few)
    x = ONES.clone().requires_grad_()
    with Runtime(backends):
        y = moe(x).sum()
        if (k_min, on_too_few) == (2, "raise"):
            with pytest.raises(TooFewAnswersError, match="3 of 3 rows got fewer than 2 gradients"):
                y.backward()
            assert x.grad is None
        else:
            y.backward()
            assert torch.equal(x.grad, torch.full_like(x, 0.5))


def test_backward_requests_are_all_under_way_at_once() -> None:
    both = threading.Barrier(2)

    def meet(grad: Tensor) -> None:
        both.wait(LONG)

    backends = [backend(f"e{i}", OnlyForward(1.0, meet)) for i in range(2)]
    moe = mixture(backends)
    with Runtime(backends, num_workers=2):
        moe(ONES).sum().backward()
    assert [one.updates for one in backends] == [1, 1]


def test_a_backward_pass_does_not_wait_longer_than_its_limit() -> None:
    stuck = Stuck()
    backends = [backend("good", Scaled(1.0)), backend("slow", OnlyForward(3.0, lambda grad: stuck(grad)))]
    moe = mixture(backends, gate=Logits([0.0, 0.0]), backward_timeout=SOON)
    x = ONES.clone().requires_grad_()
    with Runtime(backends, num_workers=2):
        moe(x).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 0.5))
        stuck.open.set()
    assert moe.stats()["slow"].backward.late == 1
    assert backends[1].updates == 1  # it had begun


# --- pools ---


def test_a_full_queue_is_no_answer_and_holds_nobody_up() -> None:
    for on_full in ("wait", "raise"):
        stuck = Stuck()
        backends = scaled(None, stuck, capacity=1, max_batch_size=1, on_full=on_full)
        moe = mixture(backends, gate=Logits([0.0, 5.0]), timeout_after_k_min=SOON)
        pool = backends[1].forward_pool
        with Runtime(backends, num_workers=2):
            first = pool.submit_task(ONES[:1])
            assert stuck.begun.wait(LONG)
            second = pool.submit_task(ONES[:1])
            assert torch.equal(moe(ONES[:1]), ONES[:1])
            stats = moe.stats()["e1"].forward
            assert (stats.given_up, stats.failed) == ((1, 0) if on_full == "wait" else (0, 1))
            stuck.open.set()
            assert len(first.result(LONG)) == len(second.result(LONG)) == 1
        assert quiet(moe)


def test_room_that_comes_in_time_is_used() -> None:
    stuck = Stuck()
    backends = scaled(None, stuck, capacity=1, max_batch_size=1)
    moe = mixture(backends, gate=Logits([0.0, 0.0]), k_min=2)
    pool = backends[1].forward_pool
    with Runtime(backends, num_workers=2):
        held = [pool.submit_task(ONES[:1])]
        assert stuck.begun.wait(LONG)
        held.append(pool.submit_task(ONES[:1]))
        threading.Timer(SOON, stuck.open.set).start()
        assert torch.equal(moe(ONES[:1]), 1.5 * ONES[:1])
    assert moe.stats()["e1"].forward.answered == 1


def test_a_backend_whose_runtime_has_gone_gives_no_answer() -> None:
    alive, gone = scaled(None, None)
    moe = mixture([alive, gone], gate=Logits([0.0, 5.0]))
    with Runtime([alive]):
        with Runtime([gone]):
            assert moe(ONES)[0, 0] > 1.9
            y = moe(ONES)
        y.sum().backward()  # one of the two gradients arrives
        assert torch.equal(moe(ONES), alive.expert.factor * ONES)
    assert (alive.updates, gone.updates) == (1, 0)
    assert quiet(moe)


def test_silence_is_logged_once_a_backend_and_period(caplog: pytest.LogCaptureFixture) -> None:
    backends = scaled(None, dead)
    moe = mixture(backends)
    with caplog.at_level(logging.WARNING, "pymoe.runtime"), Runtime(backends):
        for _ in range(5):
            moe(ONES)
    lines = [record.message for record in caplog.records if "e1" in record.message]
    assert len(lines) == 1
    assert "ConnectionError: the expert has gone" in lines[0]


def test_an_interrupted_wait_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck()
    backends = scaled(stuck, None, max_batch_size=3)
    moe = mixture(backends, k_min=2)
    with Runtime(backends, num_workers=2) as runtime:
        blocker = backends[0].forward_pool.submit_task(ONES)
        assert stuck.begun.wait(LONG)

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(fan_out, "outcome_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            moe(ONES)
        assert runtime.stats()["e0_forward"].queued == 0
        stuck.open.set()
        blocker.result(LONG)
    assert quiet(moe)


def test_the_future_of_a_request_that_was_cancelled_goes_without_the_collector() -> None:
    """A frame in the traceback of the error from result() held both that error and the future."""
    future = backend("e0", mlp(0)).forward_pool.submit_task(torch.ones(1, WIDTH, dtype=torch.float64))
    future.cancel()
    gone = weakref.ref(future)
    gc.disable()
    try:
        why, results = fan_out.outcome_of(future)
        del future
        assert isinstance(why, CancelledError)
        assert results == ()
        del why
        assert gone() is None
    finally:
        gc.enable()


# --- training through all of it ---


def test_training_goes_on_with_one_expert_dead_and_one_that_never_answers_in_time() -> None:
    stuck = Stuck()
    torch.manual_seed(0)
    experts = [mlp(i) for i in range(4)]
    backends = [backend(f"e{i}", expert, lr=0.3) for i, expert in enumerate(experts)]
    experts[2].register_forward_pre_hook(lambda module, args: dead(args[0]))
    experts[3].register_forward_pre_hook(lambda module, args: stuck(args[0]))
    moe = mixture(backends, top_k=3, forward_timeout=30, timeout_after_k_min=0.02, backward_timeout=30, max_experts=4)
    opt = torch.optim.Adam(moe.parameters(), 1e-2)
    x = torch.randn(32, WIDTH, dtype=torch.float64)
    target = x.flip(1).tanh()
    losses = []
    with Runtime(backends, num_workers=3) as runtime:
        for _ in range(100):
            loss = nn.functional.mse_loss(moe(x), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        stuck.open.set()
    assert losses[-1] < 0.5 * losses[0]
    stats = moe.stats()
    assert [stats[f"e{i}"].forward.answered for i in (2, 3)] == [0, 0]
    assert stats["e2"].forward.failed > 0
    assert stats["e3"].forward.given_up > 0
    assert stats["e0"].forward.answered + stats["e1"].forward.answered > 100
    assert quiet(moe)
    for one in runtime.stats().values():  # nothing lost, nothing hanging
        assert one.submitted == one.completed + one.failed + one.cancelled + one.expired
        assert one.queued == one.running == 0
