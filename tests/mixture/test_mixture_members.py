"""Tests of adding, removing and replacing backends of a mixture while it trains."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from mixtures import LONG, WIDTH, Logits, Scaled, Stuck, backend, mixture, mlp, scaled
from torch import nn

from pymoe.runtime import BatchTensorProto, Runtime

ONES = torch.ones(3, WIDTH, dtype=torch.float64)


def test_a_backend_that_is_added_is_chosen_from_then_on() -> None:
    first, second = scaled(None, None)
    moe = mixture([first], max_experts=3, gate=Logits([0.0, 9.0, math.log(3)]), top_k=2)
    with Runtime([first], num_workers=2) as runtime:
        assert torch.equal(moe(ONES), ONES)
        runtime.add(second)
        assert moe.add_backend(second, slot=2) == 2
        torch.testing.assert_close(moe(ONES), 1.75 * ONES)
        assert moe.remove_backend("e0") is first
        runtime.remove(first)
        assert torch.equal(moe(ONES), 2 * ONES)
        assert moe.slots == {"e1": 2}
        with pytest.raises(KeyError, match="no backend 'e0'"):
            moe.remove_backend(first)


def test_slots_are_counted() -> None:
    first, second, third = scaled(None, None, None)
    moe = mixture([first, second])
    with pytest.raises(ValueError, match="all 2 slots"):
        moe.add_backend(third)
    moe.remove_backend(first)
    with pytest.raises(ValueError, match="slot must be one of the free slots"):
        moe.add_backend(third, slot=1)
    with pytest.raises(ValueError, match="already"):
        moe.add_backend(second)
    other = backend("other", nn.Identity(), None, args_schema=[BatchTensorProto(3)], outputs_schema=BatchTensorProto(3))
    with pytest.raises(ValueError, match="takes"):
        moe.add_backend(other)
    assert moe.add_backend(third) == 0
    assert list(moe.backends) == ["e2", "e1"]


def test_the_gates_column_begins_anew_or_is_kept() -> None:
    first, second, third = scaled(None, None, None)
    moe = mixture([first, second])
    before = moe.gate.weight.detach().clone()
    parameter = moe.gate.weight
    moe.remove_backend(first)
    assert torch.equal(moe.gate.weight, before)
    moe.add_backend(third)
    assert not torch.equal(moe.gate.weight[0], before[0])
    assert torch.equal(moe.gate.weight[1], before[1])
    before = moe.gate.weight.detach().clone()
    again = backend("e1", Scaled(5.0))
    assert moe.replace_backend("e1", again) == 1
    assert moe.backends["e1"] is again
    assert torch.equal(moe.gate.weight, before)
    moe.replace_backend(again, first, keep_gate=False)
    assert not torch.equal(moe.gate.weight[1], before[1])
    assert moe.gate.weight is parameter
    with pytest.raises(ValueError, match="another backend 'e0'"):
        moe.replace_backend("e2", backend("e0", Scaled(1.0)))


def test_a_call_that_is_under_way_goes_on_with_those_that_it_began_with() -> None:
    stuck = Stuck()
    first, second, third = scaled(stuck, None, None)
    moe = mixture([first, second])
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    results = []
    with Runtime([first, second, third], num_workers=2):
        caller = threading.Thread(target=lambda: results.append(moe(x)))
        caller.start()
        assert stuck.begun.wait(LONG)
        weights = moe.gate(x).detach().softmax(1)
        moe.replace_backend(first, third, keep_gate=False)
        stuck.open.set()
        caller.join(LONG)
        (y,) = results
        torch.testing.assert_close(y, (weights[:, :1] + 2 * weights[:, 1:]) * x)
        y.sum().backward()  # although the gate's parameters were changed since the forward
    assert (first.updates, second.updates, third.updates) == (1, 1, 0)


def test_training_goes_on_while_experts_come_and_go() -> None:
    backends = [backend(f"e{i}", mlp(i), lr=0.1) for i in range(3)]
    moe = mixture(backends, max_experts=5)
    opt = torch.optim.Adam(moe.parameters(), 1e-2)
    x = torch.randn(32, WIDTH, dtype=torch.float64)
    target = x.flip(1).tanh()
    losses: list[float] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def come_and_go() -> None:
        try:
            number = 0
            while not done.is_set():
                number += 1
                new = backend(f"n{number}", mlp(number), lr=0.1)
                runtime.add(new)
                moe.add_backend(new)
                newer = backend(f"m{number}", mlp(number), lr=0.1)
                runtime.add(newer)
                moe.replace_backend(new, newer)
                runtime.remove(new)
                moe.remove_backend(newer)
                runtime.remove(newer)
        except BaseException as error:
            errors.append(error)

    with Runtime(backends, num_workers=2) as runtime:
        thread = threading.Thread(target=come_and_go)
        thread.start()
        for _ in range(60):
            loss = nn.functional.mse_loss(moe(x), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        done.set()
        thread.join(LONG)
        assert runtime.pools == tuple(pool for one in backends for pool in one.get_pools())
    assert not errors
    assert list(moe.backends) == ["e0", "e1", "e2"]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
