"""Tests that a pipe starts no threads for short actions, nor for long ones that threads make slower."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from pymoe.pipe import Pipe
from pymoe.pipe.execution import plan
from pymoe.pipe.execution.plan import InlinePolicy, calls_threads

LONG, SHORT = 2 * plan.INLINE_LIMIT_S, plan.INLINE_LIMIT_S / 10


def test_one_long_action_calls_nobody_and_several_do() -> None:
    long: list[float] = []
    assert not calls_threads(long, 100 * plan.LONG_ACTIONS_S)  # a single action that another process delayed
    assert not calls_threads(long, SHORT)
    assert not calls_threads(long, LONG)
    assert calls_threads(long, LONG)


def test_several_that_are_hardly_longer_call_nobody() -> None:
    long: list[float] = []
    assert not any([calls_threads(long, 1.01 * plan.INLINE_LIMIT_S) for _ in range(plan.LONG_ACTIONS + 1)])


def test_threads_are_called_at_once_when_a_quarter_of_the_actions_was_long() -> None:
    policy = InlinePolicy()
    assert not policy.uses_threads
    policy.saw_threads(1.0, [LONG, SHORT, SHORT, SHORT])
    assert not policy.uses_threads
    policy.saw_threads(1.0, [LONG, LONG, SHORT, SHORT])
    assert policy.uses_threads


def test_actions_that_are_long_because_of_the_threads_do_not_keep_them() -> None:
    policy = InlinePolicy()
    policy.saw_inline(0.5)
    policy.saw_threads(0.6, [LONG] * 8)
    assert not policy.uses_threads


def test_an_old_time_of_smaller_batches_is_forgotten() -> None:
    policy = InlinePolicy()
    policy.saw_inline(0.5)
    runs = 0
    while not policy.uses_threads:
        policy.saw_threads(5.0, [LONG] * 8)
        runs += 1
    assert runs == 5


class Clock:
    """A fake clock that gives actions their durations, whatever the load of the machine."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()

    def perf_counter(self) -> float:
        with self._lock:
            return self._now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


class Recorded(nn.Module):
    """Records its thread; slow in one step, and from then on in threads other than the caller's."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.seen: set[int] = set()
        self.is_slow = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(threading.get_ident())
        if self.is_slow or threading.current_thread() is not threading.main_thread():
            self.clock.sleep(0.1)
        return x


def test_a_pipe_that_was_held_up_once_comes_back_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(plan, "time", clock)
    layers = [Recorded(clock), Recorded(clock)]
    pipe = Pipe(nn.Sequential(*layers), 6)
    x = torch.randn(6, 2)
    with torch.no_grad():
        for slow, threads in [(False, 1), (True, 2), (False, 1)]:
            for layer in layers:
                layer.seen, layer.is_slow = set(), slow
            pipe(x)
            assert len(layers[0].seen | layers[1].seen) == threads
