"""Timers: every function is called once its time has come, not earlier, and not after a cancel or reset."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from limits import LONG, rounds
from processes import in_child, run_python

from pymoe.runtime import timers
from pymoe.runtime.timers import TimerHandle, call_later, call_soon


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def fires(seconds: float = 0.0) -> bool:
    """Return whether a new timer is called."""
    done = threading.Event()
    call_later(seconds, done.set)
    return done.wait(LONG)


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Pretend that the process cannot start another thread."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


def test_timers_are_called_by_their_own_times_alone() -> None:
    called: dict[str, threading.Event] = {
        name: threading.Event() for name in ("late", "soon", "cancelled", "postponed")
    }
    late = call_later(2 * LONG, called["late"].set)
    with timers._changed:  # no call can begin before both are taken back
        cancelled = call_later(0.05, called["cancelled"].set)
        assert cancelled.cancel()
        postponed = call_later(0.05, called["postponed"].set)
        assert postponed.reset(2 * LONG)
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
        assert not timer.reset(0.0)
        assert calls.acquire(timeout=LONG)
    assert not calls.acquire(timeout=0.05)
    assert not timer.cancel()


def test_an_exception_is_reported_and_delays_no_other_timer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception in a hook of the program ended the thread of all timers."""
    reported: list[Any] = []

    def report(error: Any) -> None:
        reported.append(error.exc_type)
        raise ValueError("of the hook")

    monkeypatch.setattr(threading, "excepthook", report)
    call_later(0.0, lambda: [][0])
    until(lambda: "of the hook" in capsys.readouterr().err)
    assert fires(0.02)
    assert reported == [IndexError]


# --- cancel and reset while the time comes ---


def test_a_timer_whose_time_has_come_can_be_cancelled_or_reset_until_its_call_begins() -> None:
    """Several due timers were taken together. Those behind a slow one were called even if they had been cancelled or
    reset meanwhile: a request with 30 s left timed out immediately.
    """
    called: list[str] = []
    cancelled, postponed = TimerHandle(called.append, "cancelled"), TimerHandle(called.append, "postponed")
    with timers._changed:  # no thread can begin a call
        cancelled.reset(0.0)
        postponed.reset(0.0)
        time.sleep(0.05)
        assert cancelled.cancel()
        assert postponed.reset(2 * LONG)
    assert fires(0.05)
    assert called == []
    assert postponed.cancel()
    assert not postponed.cancel()


@pytest.mark.parametrize("way", ["cancel", "reset"])
def test_a_call_that_has_begun_is_neither_taken_back_nor_made_twice(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, go_on, calls = threading.Event(), threading.Event(), threading.Semaphore(0)
    real = TimerHandle._call

    def call(self: TimerHandle) -> None:
        if self is timer and not taken.is_set():
            taken.set()
            assert go_on.wait(LONG)
        real(self)

    monkeypatch.setattr(TimerHandle, "_call", call)
    timer = TimerHandle(calls.release)
    timer.reset(0.0)
    assert taken.wait(LONG)
    assert not (timer.cancel() if way == "cancel" else timer.reset(0.0))
    if way == "reset":  # due again before the first call has ended
        assert calls.acquire(timeout=LONG)
    go_on.set()
    assert calls.acquire(timeout=LONG)
    assert not calls.acquire(timeout=0.05)


@pytest.mark.parametrize("seed", range(rounds(3, 30)))
def test_every_time_that_was_set_is_called_once_or_taken_back_once(seed: int) -> None:
    """Threads set and cancel a few timers at random, mostly close to their times."""
    lock, called, set_, taken_back = threading.Lock(), [0], [0], [0]

    def count(counter: list[int], number: int = 1) -> None:
        with lock:
            counter[0] += number

    shared = [TimerHandle(count, called) for _ in range(4)]

    def use(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(300):
            timer = choose.choice(shared)
            if choose.random() < 0.5:
                count(set_)
                count(taken_back, timer.reset(choose.choice([0.0, 0.0005, 0.002])))
            else:
                count(taken_back, timer.cancel())
            time.sleep(choose.choice([0.0, 0.0, 0.0003, 0.001]))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=use, args=(4 * seed + i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
    finally:
        sys.setswitchinterval(before)
    until(lambda: called[0] + taken_back[0] >= set_[0])
    assert fires(0.02)
    assert called[0] + taken_back[0] == set_[0]
    assert called[0] > 0
    assert taken_back[0] > 0


# --- functions that block ---


def test_a_function_that_waits_for_other_timers_holds_up_none() -> None:
    """All functions ran on one thread, so one that waited for a deadline stopped every deadline of the process."""
    go_on, ended = threading.Event(), threading.Event()

    def wait(depth: int) -> None:
        if depth == 0:
            return ended.set()
        call_later(0.001, wait, depth - 1)
        assert go_on.wait(LONG)
        return None

    wait_too = call_later(2 * LONG, lambda: None)  # some thread must wait for this one
    call_later(0.0, wait, 5)
    assert ended.wait(LONG)
    assert fires(0.01)
    go_on.set()
    assert wait_too.cancel()


def test_a_function_that_blocks_holds_up_no_timer_that_was_set_before_it() -> None:
    def check() -> None:  # in a fork no other thread of timers waits
        called = [threading.Event() for _ in range(3)]
        for i, event in enumerate(called):
            call_later(0.3 + 0.001 * i, event.set)
        call_later(0.0, threading.Event().wait)
        assert all(event.wait(LONG / 2) for event in called)

    assert in_child(check) == 0


def test_threads_that_are_not_needed_any_more_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "IDLE_S", 0.02)

    def named() -> int:
        return sum(one.name == "pymoe-timers" for one in threading.enumerate())

    def check() -> None:
        go_on = threading.Event()
        for _ in range(3):
            call_later(0.0, go_on.wait, LONG)
            assert fires()
        assert named() > 1
        last = call_later(2 * LONG, lambda: None)
        go_on.set()
        until(lambda: named() == 1)  # one thread waits for the last timer
        assert fires()
        assert last.cancel()
        for _ in range(2):
            assert fires()
            until(lambda: named() == 0)

    assert in_child(check) == 0


def test_what_a_timer_held_is_freed_after_its_call() -> None:
    """The thread kept the last timer, and everything that its function held, until the next one was due."""

    class Held:
        def call(self) -> None:
            pass

    late = call_later(2 * LONG, lambda: None)
    held = Held()
    ref = weakref.ref(held)
    call_later(0.0, held.call)
    del held
    until(lambda: ref() is None)
    assert late.cancel()


# --- no thread, another process, the end ---


def test_where_no_thread_can_be_started_the_timer_is_not_set_and_the_next_one_tries_again() -> None:
    """The thread counted as started for ever, and no timer was called any more."""

    def check() -> None:  # in a fork no thread of timers runs yet
        called: list[str] = []
        with no_new_threads():
            timer = TimerHandle(called.append, "timer")
            with pytest.raises(RuntimeError, match="can't start new thread"):
                timer.reset(0.0)
            assert not timer.cancel()
            call_soon(called.append, "soon")
            assert called == ["soon"]
        assert fires(0.01)
        assert called == ["soon"]

    assert in_child(check) == 0


def test_timers_are_called_although_ctrl_c_came_just_before_a_thread_was_started() -> None:
    """A thread that was never started counted as waiting, and no timer of the process was called any more."""

    class Interrupted(set[Any]):
        def add(self, thread: Any) -> None:
            super().add(thread)
            raise KeyboardInterrupt

    def check() -> None:  # in a fork no thread of timers runs yet
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timers, "_watching", watching := Interrupted())
            with pytest.raises(KeyboardInterrupt):
                call_later(0.0, lambda: None)
            assert not watching
        assert fires(0.01)

    assert in_child(check) == 0


def test_a_thread_that_can_start_no_other_looks_after_all_timers_itself() -> None:
    begun, go_on, called = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        assert go_on.wait(LONG)

    def check() -> None:
        first = call_later(2 * LONG, block)  # which starts the thread
        with no_new_threads():
            with timers._changed:
                first.reset(0.0)
                call_later(0.001, called.set)
            assert begun.wait(LONG)
            with pytest.raises(RuntimeError, match="can't start new thread"):  # no thread might wait for it in time
                call_later(0.0, called.set)
            assert not called.is_set()
            go_on.set()
            assert called.wait(LONG)

    assert in_child(check) == 0


def test_a_fork_has_timers_of_its_own() -> None:
    """The parent's threads do not exist in the child, and the parent's timers are not called twice."""
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


def test_a_fork_while_other_threads_use_timers() -> None:
    """One of the threads may hold the lock during the fork, and it would never be released in the child."""
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            call_later(0.0, lambda: None).reset(0.001)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                own = threading.Event()
                call_later(0.001, own.set)
                os._exit(0 if own.wait(LONG) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(LONG)


def test_a_program_ends_with_pending_timers_and_with_functions_that_have_not_returned() -> None:
    done = run_python(
        """
        import threading
        from pymoe.runtime.timers import call_later

        begun = threading.Event()
        call_later(3600, print, "called")
        call_later(0, lambda: (begun.set(), threading.Event().wait()))
        assert begun.wait(60)
        print("end")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
