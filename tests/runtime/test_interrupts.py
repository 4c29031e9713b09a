"""Ctrl-C while the main thread runs an update: it is raised, and the update was made once."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch
from limits import LONG
from torch import nn

from pymoe.runtime import BatchTensorProto, ExpertBackend, ExpertClient, Runtime, TaskPool, interrupts
from pymoe.runtime.interrupts import uninterrupted


def press() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_an_interrupt_comes_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "DELAY_S", 1.0)  # a busy machine may be slow to run the next statement
    seen: list[int] = []

    def run() -> None:
        with uninterrupted():
            press()
            seen.append(1)
        seen.append(2)
        time.sleep(LONG)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert seen == [1, 2]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_does_not_wait() -> None:
    def hang() -> None:
        with uninterrupted():
            press()
            press()
            time.sleep(LONG)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        hang()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_is_not_lost_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*all_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(interrupts, "call_later", fails)

    def run() -> None:
        interrupts.interrupt_soon()
        time.sleep(LONG)

    with pytest.raises(KeyboardInterrupt):
        run()


def test_other_threads_and_quiet_blocks_have_nothing_to_do_with_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    handlers: list[Any] = []

    def run() -> None:
        with uninterrupted():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    run()
    assert handlers[0] is before
    assert handlers[1] is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_update_is_made_once() -> None:
    """The only worker is busy, so the main thread runs the batches that it waits for."""
    torch.manual_seed(0)
    expert = nn.Linear(4, 4)
    ran_on: list[threading.Thread] = []

    class Interrupted(ExpertBackend):
        def apply_gradients(self) -> None:
            ran_on.append(threading.current_thread())
            press()
            for _ in range(100):
                super().apply_gradients()

    backend = Interrupted("e", expert, torch.optim.SGD(expert.parameters(), lr=1.0), args_schema=[BatchTensorProto(4)])
    twin = nn.Linear(4, 4)
    twin.load_state_dict(expert.state_dict())
    twin(torch.ones(2, 4)).sum().backward()
    begun, release = threading.Event(), threading.Event()

    def occupy(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        release.wait(LONG)
        return x

    def train() -> None:
        ExpertClient(backend)(torch.ones(2, 4)).sum().backward()
        time.sleep(LONG)

    pool = TaskPool(occupy, name="busy")
    with Runtime([backend, pool], num_workers=1):
        pool.submit_task(torch.ones(1))
        assert begun.wait(LONG)
        with pytest.raises(KeyboardInterrupt):
            train()
        release.set()
    assert ran_on == [threading.main_thread()]
    assert backend.updates == 1
    torch.testing.assert_close(expert.bias, twin.bias - 100 * twin.bias.grad)
