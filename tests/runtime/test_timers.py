"""Timers: every function is called once its time has come, not before, and not after it was cancelled."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
from limits import LONG

from pymoe.runtime import timers
from pymoe.runtime.timers import TimerHandle, call_later


def test_timers_are_called_by_their_own_times_alone() -> None:
    called: dict[str, threading.Event] = {
        name: threading.Event() for name in ("late", "soon", "cancelled", "postponed")
    }
    late = call_later(2 * LONG, called["late"].set)
    cancelled = call_later(0.05, called["cancelled"].set)
    cancelled.cancel()
    postponed = call_later(0.05, called["postponed"].set)
    postponed.reset(2 * LONG)
    call_later(0.1, called["soon"].set)
    assert called["soon"].wait(LONG)
    assert [name for name, event in called.items() if event.is_set()] == ["soon"]
    postponed.reset(0.0)
    assert called["postponed"].wait(LONG)
    assert not called["late"].is_set()
    late.cancel()


def test_no_timer_is_called_before_its_time() -> None:
    begun, found = time.monotonic(), []
    done = threading.Semaphore(0)

    def note(seconds: float) -> None:
        found.append(time.monotonic() - begun - seconds)
        done.release()

    times = [0.3, 0.02, 0.15, 0.001, 0.08]
    for seconds in times:
        call_later(seconds, note, seconds)
    for _ in times:
        assert done.acquire(timeout=LONG)
    assert min(found) >= 0


def test_a_timer_is_called_once_and_may_be_set_again() -> None:
    calls = threading.Semaphore(0)
    timer = TimerHandle(calls.release)
    for _ in range(3):
        timer.reset(0.0)
        assert calls.acquire(timeout=LONG)
    assert not calls.acquire(timeout=0.05)
    timer.cancel()  # has no effect


def test_an_exception_is_reported_and_delays_no_other_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    done = threading.Event()
    call_later(0.0, lambda: [][0])
    call_later(0.02, done.set)
    assert done.wait(LONG)
    assert [one.exc_type for one in reported] == [IndexError]


def test_the_thread_ends_when_it_has_nothing_to_do_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "IDLE_S", 0.05)
    for _ in range(2):
        done = threading.Event()
        call_later(0.0, done.set)
        assert done.wait(LONG)
        deadline = time.monotonic() + LONG
        while timers._due or timers._thread is not None:
            call_later(0.0, lambda: None)  # wakes a thread that began to wait with the usual time
            time.sleep(0.1)
            assert time.monotonic() < deadline


def test_a_fork_has_timers_of_its_own() -> None:
    """Its parent's thread does not run there, and its parent's timers are not called twice."""
    called = threading.Event()
    of_parent = call_later(LONG, called.set)
    child = os.fork()
    if child == 0:
        own = threading.Event()
        of_parent.cancel()  # has no effect
        call_later(0.01, own.set)
        os._exit(0 if own.wait(LONG) and not called.is_set() else 1)
    of_parent.reset(0.0)
    assert called.wait(LONG)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
