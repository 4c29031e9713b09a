"""Tests of bugs that were found and fixed in clients that run batches while they wait. Docstrings describe the bugs."""

from __future__ import annotations

import concurrent.futures
import contextvars
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from limits import LONG
from torch import nn

from pymoe.runtime import Runtime, TaskPool, parallel_workers, run_in_background

WATCHED: contextvars.ContextVar[str] = contextvars.ContextVar("watched", default="nothing")


@torch.library.custom_op("pymoe_tests::call", mutates_args=())
def call(x: torch.Tensor) -> torch.Tensor:
    return calls.pop()(x)


@call.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


calls: list[Callable[[torch.Tensor], torch.Tensor]] = []


def inside_custom_op(wait: Callable[[], Any]) -> None:
    calls.append(lambda x: (wait(), x.clone())[1])
    call(torch.ones(1))


def inside_deep_calls(wait: Callable[[], Any]) -> None:
    def down(depth: int) -> None:
        down(depth - 1) if depth else wait()

    frame: Any = sys._getframe()
    used = 0
    while frame is not None:
        frame, used = frame.f_back, used + 1
    down(sys.getrecursionlimit() - used - 60)


def with_variable(wait: Callable[[], Any]) -> None:
    token = WATCHED.set("a client's")
    wait()
    WATCHED.reset(token)


def within(manager: Callable[[], AbstractContextManager[Any]]) -> Callable[[Callable[[], Any]], None]:
    def run(wait: Callable[[], Any]) -> None:
        with manager():
            wait()

    return run


CLIENTS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "plain": within(nullcontext),
    "hooks": within(lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0, lambda t: t)),
    "no hooks": within(lambda: torch.autograd.graph.disable_saved_tensors_hooks("a client says no")),
    "torch.func": lambda wait: torch.func.grad(lambda x: (wait(), x.sum())[1])(torch.ones(2)),
    "vmap": lambda wait: torch.func.vmap(lambda x: (wait(), x + 1)[1])(torch.ones(2)),
    "no forward gradients": within(lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False)),
    "no torch functions": within(torch._C.DisableTorchFunctionSubclass),
    "custom operator": inside_custom_op,
    "depth": inside_deep_calls,
    "context variable": with_variable,
}


@pytest.mark.parametrize("nested", [False, True], ids=["client", "batch"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_that_helps_keeps_its_state_to_itself(client: str, nested: bool) -> None:
    """A client that ran a batch while it waited ran other clients' requests under its own hooks, transforms and depth:
    two thirds of their gradients were wrong, or failed. Context variables were visible, too. The same happened with a
    batch that waits for another pool, which must help in any state.
    """
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def deep(x: torch.Tensor, depth: int = 80) -> torch.Tensor:
        return deep(x, depth - 1) if depth else net(x)

    def train(x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
        x = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if client != "plain" else nullcontext():
            y = deep(x)
        (gradient,) = torch.autograd.grad(torch.func.jvp(torch.tanh, (y,), (torch.ones_like(y),))[1].sum(), x)
        return gradient, [WATCHED.get()]

    want, _ = train(torch.ones(1, 4))
    pool = TaskPool(train, name="pool", linger=0)
    outer = TaskPool(lambda x: (CLIENTS[client](futures[-1].result), x)[1], name="outer", linger=0)
    with Runtime([pool] if not nested else [pool, outer], num_workers=1):
        for _ in range(10):
            futures = [pool.submit_task(torch.ones(1, 4)) for _ in range(4)]
            if nested:
                outer(torch.ones(1, 1))
            else:
                CLIENTS[client](futures[-1].result)
            for future in futures:
                gradient, seen = future.result()
                torch.testing.assert_close(gradient, want)  # rows of a batch may round differently
                assert seen == ["nothing"]


def test_a_worker_of_parallel_calls_that_helps_keeps_its_state_to_itself() -> None:
    """A worker must help while it waits, since a batch may wait for it, but it ran that batch under the autocast of
    the caller it was working for.
    """
    seen: list[Any] = []
    taken, release = threading.Event(), threading.Event()

    def hold(x: torch.Tensor) -> torch.Tensor:
        taken.set()
        release.wait(LONG)
        return x

    def see(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
        return x

    holds, sees = TaskPool(hold, name="holds", linger=0), TaskPool(see, name="sees", linger=0)
    with Runtime([holds, sees], num_workers=1), parallel_workers(1):
        holding = holds.submit_task(torch.ones(1, 1))
        assert taken.wait(LONG)  # so that no other thread can run the other pool's batch
        for manager in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()):
            with manager:
                future = run_in_background(lambda: sees.submit_task(torch.ones(1, 1)).result())
            concurrent.futures.wait([future], LONG)
            assert future.done()
        release.set()
        holding.result(LONG)
    assert seen == [(False, False)] * 2
