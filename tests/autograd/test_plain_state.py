"""Tests that a client's thread settings do not affect a batch that the client runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pymoe.autograd.plain_state import in_plain_state


class CountingMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the client's mode saw {func}")


def refuse(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the client's hook saw a tensor")


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "dispatch mode": CountingMode,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(refuse, refuse),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("grad", [False, True])
def test_a_function_sees_a_plain_state(state: str, grad: bool) -> None:
    def function(number: int) -> Any:
        x = torch.ones(2, 2, requires_grad=True)
        y = x @ x
        if grad:
            (y * y).sum().backward()
        return number, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), y.dtype, y.device.type, y.grad_fn

    with STATES[state]():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        number, saw_grad, saw_inference, dtype, device, grad_fn = in_plain_state(grad, function, 7)
        after = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    assert (number, saw_grad, saw_inference, dtype, device) == (7, grad, False, torch.float32, "cpu")
    assert (grad_fn is not None) == grad
    assert after == before


@pytest.mark.parametrize("state", STATES)
def test_exceptions_pass_and_the_state_comes_back(state: str) -> None:
    error = ZeroDivisionError("planted")

    def fail() -> None:
        raise error

    with STATES[state]():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with pytest.raises(ZeroDivisionError) as caught:
            in_plain_state(not before[0], fail)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert caught.value is error


def test_states_within_each_other() -> None:
    def seen() -> Any:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.empty(0).device.type

    with torch.autocast("cpu"), torch.inference_mode(), torch.device("meta"):
        assert in_plain_state(True, seen) == (True, False, "cpu")
        assert in_plain_state(True, in_plain_state, False, seen) == (False, False, "cpu")


def test_an_interrupt_waits_for_the_function() -> None:
    """The function runs on another thread; the interrupt is raised only after the function has ended."""
    ended = threading.Event()

    def interrupted() -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        ended.wait(0.2)
        ended.set()

    with torch.device("meta"), pytest.raises(KeyboardInterrupt):
        in_plain_state(False, interrupted)
    assert ended.is_set()
