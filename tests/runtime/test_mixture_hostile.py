"""What a mixture must stand: endless limits, a gate that goes mad, hung queues, changes in the middle of a call."""

from __future__ import annotations

import gc
import math
import threading
from contextlib import suppress

import pytest
import torch
from mixtures import LONG, WIDTH, Logits, Scaled, Stuck, backend, dead, mixture, scaled
from torch import nn

from pymoe.runtime import BatchTensorProto, MixtureOfExpertBackends, Runtime

ONES = torch.ones(3, WIDTH, dtype=torch.float64)


def test_limits_may_be_infinite() -> None:
    backends = scaled(None, None)
    moe = mixture(backends, forward_timeout=math.inf, backward_timeout=math.inf, timeout_after_k_min=math.inf, k_min=2)
    with Runtime(backends):
        moe(ONES).sum().backward()
    assert [one.updates for one in backends] == [1, 1]


@pytest.mark.parametrize("logit", [math.nan, math.inf])
def test_anomalies_of_the_gate_raise_and_reach_no_expert(logit: float) -> None:
    backends = scaled(None, None)
    moe = mixture(backends, gate=Logits([logit, 0.0]), detect_anomalies=True)
    with Runtime(backends), pytest.raises(ValueError, match="a logit of the gate is NaN or infinite"):
        moe(ONES)
    assert moe.stats()["e0"].forward.requests == 0


def test_minus_infinity_of_the_gate_is_no_anomaly() -> None:
    backends = scaled(None, None)
    moe = mixture(backends, gate=Logits([0.0, -math.inf]), detect_anomalies=True)
    with Runtime(backends):
        assert torch.equal(moe(ONES), ONES)


def test_a_hung_backend_with_a_full_queue_takes_no_threads() -> None:
    stuck = Stuck()
    backends = scaled(None, stuck, capacity=1, max_batch_size=1)
    moe = mixture(backends, gate=Logits([0.0, 5.0]), forward_timeout=None, timeout_after_k_min=0.0)
    pool = backends[1].forward_pool
    with Runtime(backends, num_workers=2):
        pool.submit_task(ONES[:1])
        assert stuck.begun.wait(LONG)
        pool.submit_task(ONES[:1])
        before = threading.active_count()
        for _ in range(20):
            moe(ONES[:1])
            assert threading.active_count() <= before
        stuck.open.set()
    assert moe.stats()["e1"].forward.given_up == 20


def test_a_backend_that_is_removed_while_it_is_asked_still_learns() -> None:
    stuck = Stuck()
    first, second = backend("trained", Scaled(1.0, stuck)), backend("fixed", Scaled(1.0), lr=None)
    moe = mixture([first, second])
    moe.gate.requires_grad_(False)
    results = []
    with Runtime([first, second], num_workers=2):
        caller = threading.Thread(target=lambda: results.append(moe(ONES)))
        caller.start()
        assert stuck.begun.wait(LONG)
        moe.remove_backend(first)
        stuck.open.set()
        caller.join(LONG)
        results[0].sum().backward()
    assert first.updates == 1


def test_threads_that_add_at_once_get_slots_of_their_own() -> None:
    both = threading.Barrier(2)

    class Slow(Logits):
        def reset_slot(self, slot: int) -> None:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # two who think that they have the same slot meet here

    first, second, third = scaled(None, None, None)
    moe = mixture([first], gate=Slow([0.0, 0.0, 0.0]), max_experts=3)
    slots = []
    threads = [threading.Thread(target=lambda one=one: slots.append(moe.add_backend(one))) for one in (second, third)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert sorted(slots) == [1, 2]
    assert sorted(moe.slots.values()) == [0, 1, 2]


def test_a_refusing_pool_leaves_no_cycle_that_holds_the_tensors_of_a_call() -> None:
    alive, gone = scaled(None, None)
    moe = mixture([alive, gone])
    with Runtime([alive]):
        with Runtime([gone]):
            pass
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                moe(ONES)
            assert not [one for one in gc.get_objects() if type(one).__name__ == "Answers"]
        finally:
            gc.enable()


def test_a_module_that_is_the_fallback_runs_under_autocast() -> None:
    proto = BatchTensorProto(WIDTH)
    gone = backend("gone", Scaled(2.0, dead).float(), args_schema=[proto], outputs_schema=proto)
    moe = MixtureOfExpertBackends([gone], top_k=1, on_too_few="fallback", fallback=nn.Linear(WIDTH, WIDTH))
    with Runtime([gone]), torch.autocast("cpu", dtype=torch.bfloat16):
        y = moe(ONES.float())
        y.sum().backward()
    assert y.dtype == torch.float32
    assert moe.fallback.weight.grad is not None
