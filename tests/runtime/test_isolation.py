"""Isolation: only a bad request fails, and no request affects another's rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pymoe.runtime import Runtime, TaskPool


def refuse_negative(x: Tensor) -> Tensor:
    if (x < 0).any():
        raise ValueError(f"{int((x < 0).sum())} bad of {len(x)}")
    return x * 2


@pytest.mark.parametrize("bad", [{0}, {7}, {3, 4}, set(range(8)), set()])
def test_bad_requests_fail_alone(bad: set[int]) -> None:
    pool = TaskPool(refuse_negative, name="pool", isolate=True)
    futures = [pool.submit_task(torch.full((1,), -1.0 if i in bad else float(i))) for i in range(8)]
    with Runtime([pool]):
        for i, future in enumerate(futures):
            if i in bad:
                with pytest.raises(ValueError, match="1 bad of 1"):
                    future.result()
            else:
                assert future.result() == 2 * i


def test_without_isolation_a_batch_fails_together() -> None:
    pool = TaskPool(refuse_negative, name="pool")
    futures = [pool.submit_task(torch.full((1,), value)) for value in (1.0, -1.0, 2.0)]
    with Runtime([pool]):
        for future in futures:
            with pytest.raises(ValueError, match="1 bad of 3"):
                future.result()


def test_a_nan_stays_in_its_own_rows() -> None:
    torch.manual_seed(0)
    expert = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    clean = torch.randn(64, 1, 8)
    poisoned = clean.clone()
    poisoned[17, 0, 3] = float("nan")

    def ask(requests: Tensor) -> list[Tensor]:
        pool = TaskPool(torch.no_grad()(expert), name="pool")
        futures = [pool.submit_task(x) for x in requests]
        with Runtime([pool]):
            results = [future.result() for future in futures]
        assert pool._statistics()["batches"] == 1
        return results

    for i, (one, other) in enumerate(zip(ask(clean), ask(poisoned), strict=True)):
        assert other.isnan().all() if i == 17 else torch.equal(one, other)


class Counting(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        Counting,
        functools.partial(torch.autocast, "cpu"),
        functools.partial(torch.device, "meta"),
    ],
)
def test_a_clients_modes_do_not_reach_the_batch(mode: Callable[[], Any]) -> None:
    """Any thread may run the batch: a worker, or a waiting client."""
    seen: list[tuple[bool, ...]] = []

    def process(x: Tensor) -> Tensor:
        seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.empty(0).is_meta,
                torch._C._len_torch_function_stack() > 0,
            )
        )
        return x + 1

    pool = TaskPool(process, name="pool")
    x = torch.ones(1, 2)
    with Runtime([pool]), mode():
        before = torch.is_grad_enabled()
        for _ in range(50):
            assert not pool(x).is_inference()
        assert torch.is_grad_enabled() == before
    assert set(seen) == {(True, False, False, False, False)}
