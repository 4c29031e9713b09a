"""Tests of mixtures in extreme conditions: infinite limits, a gate with invalid outputs, hung queues, changes during a
call.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from mixtures import LONG, WIDTH, Logits, Scaled, Stuck, backend, dead, mixture, scaled
from processes import in_child
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from pymoe.mixture.fan_out import Answers
from pymoe.runtime import (
    BatchTensorProto,
    MixtureOfExpertBackends,
    Runtime,
    TooFewAnswersError,
    map_with_parallel_backward,
)

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


def test_a_hung_backend_with_a_full_queue_takes_one_thread_however_often_it_is_asked() -> None:
    """The test used to compare numbers of threads, so it failed unless another thread happened to end meanwhile."""
    stuck = Stuck()
    backends = scaled(None, stuck, capacity=1, max_batch_size=1)
    moe = mixture(backends, gate=Logits([0.0, 5.0]), forward_timeout=None, timeout_after_k_min=0.0, rest_after=None)
    pool = backends[1].forward_pool
    with Runtime(backends, num_workers=2):
        pool.submit_task(ONES[:1])
        assert stuck.begun.wait(LONG)
        pool.submit_task(ONES[:1])
        before = {*threading.enumerate()}
        try:
            for _ in range(20):
                moe(ONES[:1])
                # Python learns of the runtime's worker threads when one of them looks up its name.
                added = [one for one in threading.enumerate() if one not in before]
                names = [one.name for one in added if not isinstance(one, threading._DummyThread)]
                assert names in ([], ["pymoe-room"])
        finally:
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
                both.wait(0.2)  # two threads that were given the same slot would meet here

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
            assert not [one for one in gc.get_objects() if type(one) is Answers]
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


@pytest.mark.parametrize("died_first", [True, False])
def test_gradient_checkpointing_stands_an_expert_that_answers_only_one_of_both_times(died_first: bool) -> None:
    calls = []

    def flaky(x: torch.Tensor) -> None:
        calls.append(x)
        if len(calls) == (1 if died_first else 2):
            dead(x)

    backends = scaled(None, flaky)
    moe = mixture(backends, gate=Logits([0.0, 0.0]))
    x = ONES.clone().requires_grad_()
    with Runtime(backends):
        checkpoint(moe, x, use_reentrant=False).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert backends[0].updates == 1


def test_a_compiled_model_calls_it_as_it_is() -> None:
    backends = scaled(None, None)
    moe = mixture(backends, gate=Logits([0.0, 0.0]))
    compiled = torch.compile(lambda x: moe(2 * x) + 1, backend="eager")
    with Runtime(backends), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know")
        y = compiled(ONES)
        y.sum().backward()
    assert torch.equal(y, 4 * ONES)
    assert [one.updates for one in backends] == [1, 1]


def test_slots_are_numbers_that_no_two_share() -> None:
    first, second = scaled(None, None)
    moe = mixture([first], max_experts=2)
    for slot in (1.0, True, "1"):
        with pytest.raises(TypeError, match="slot must be an int"):
            moe.add_backend(second, slot=slot)
    with pytest.raises(KeyError, match="no backend 3"):
        moe.remove_backend(3)
    moe.add_backend(second)
    with pytest.raises(ValueError, match="a slot of its own"):
        moe.set_extra_state({"slots": {"e0": 1, "e1": 1}})
    assert moe.slots == {"e0": 0, "e1": 1}


def test_in_the_child_of_a_fork_nobody_answers_and_nothing_hangs() -> None:
    first, second = scaled(None, None)
    moe = mixture([first])
    with Runtime([first]) as runtime:
        moe(ONES)

        def ask() -> None:
            with pytest.raises(TooFewAnswersError) as caught:
                moe(ONES)
            assert "process" in str(caught.value.__cause__)
            for change, one in ((runtime.add, second), (runtime.remove, first)):
                with pytest.raises(RuntimeError, match="process"):
                    change(one)

        assert in_child(ask) == 0


def test_ctrl_c_ends_a_wait_for_an_expert_that_hangs() -> None:
    stuck = Stuck()
    backends = scaled(stuck, None)
    moe = mixture(backends, k_min=2, forward_timeout=None)

    def interrupt() -> None:
        assert stuck.begun.wait(LONG)
        os.kill(os.getpid(), signal.SIGINT)

    with Runtime(backends, num_workers=2):
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            moe(ONES)
        thread.join(LONG)
        stuck.open.set()
    stats = moe.stats()["e0"].forward
    assert (stats.given_up, stats.late) == (1, 1)


def test_what_it_wraps_as_distributed_data_parallel_trains(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        backends = scaled(None, dead, None)
        moe = nn.parallel.DistributedDataParallel(mixture(backends, top_k=3))
        with Runtime(backends):
            for _ in range(3):
                moe(ONES).sum().backward()
    finally:
        distributed.destroy_process_group()
    assert [one.updates for one in backends] == [3, 0, 3]


def test_a_parallel_call_runs_no_slow_expert_itself() -> None:
    """A worker of parallel calls ran the batch of the expert that it asked, so the call's time limits had no effect."""
    callers, runners = set(), set()
    stuck, blocked = Stuck(), Stuck()

    def slow(x: torch.Tensor) -> None:
        runners.add(threading.get_ident())
        stuck(x)

    expert, other = scaled(slow, blocked)
    moe = mixture([expert], top_k=1, forward_timeout=0.1, on_too_few="fallback")

    def call(x: torch.Tensor) -> torch.Tensor:
        callers.add(threading.get_ident())
        return moe(x)

    with Runtime([expert, other], num_workers=1):
        other.forward_pool.submit_task(ONES)  # the only worker cannot run the expert now
        assert blocked.begun.wait(LONG)
        try:
            map_with_parallel_backward(call, (ONES,), (2 * ONES,))
        finally:
            stuck.open.set()
            blocked.open.set()
    assert not callers & runners
