"""Tests of code for CUDA devices that run on machines without one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from limits import LONG

from pymoe.autograd import thread_state as state
from pymoe.parallel import map as parallel_map
from pymoe.runtime import map_with_parallel_backward, parallel_workers


class Cuda(threading.local):
    """Two simulated CUDA devices; each thread has its own current device, as in torch."""

    def __init__(self) -> None:
        self.device = 0
        self.streams = ["default 0", "default 1"]

    def set_stream(self, stream: str) -> None:
        self.device = int(stream[-1])
        self.streams[self.device] = stream

    def set_device(self, device: int) -> None:
        self.device = device


@pytest.fixture
def cuda(monkeypatch: Any) -> Cuda:
    fake = Cuda()
    replaced: dict[str, Callable[..., Any]] = {
        "device_count": lambda: 2,
        "current_device": lambda: fake.device,
        "current_stream": lambda device: fake.streams[device],
        "set_stream": fake.set_stream,
        "set_device": fake.set_device,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(state, "_cuda_is_initialized", lambda: True)
    return fake


def test_calls_get_the_callers_device_and_streams(cuda: Cuda) -> None:
    found: list[Any] = []
    barrier = threading.Barrier(3)

    def look() -> None:
        barrier.wait(LONG)
        found.append((cuda.device, list(cuda.streams)))

    with parallel_workers(3):
        map_with_parallel_backward(look, (), (), ())
        cuda.set_stream("side 1")
        cuda.set_device(0)
        map_with_parallel_backward(look, (), (), ())
        cuda.set_device(1)
        map_with_parallel_backward(look, (), (), ())
    assert (
        found
        == [(0, ["default 0", "default 1"])] * 3
        + [(0, ["default 0", "side 1"])] * 3
        + [(1, ["default 0", "side 1"])] * 3
    )


def test_backward_passes_of_other_devices_wait_for_nobody(monkeypatch: Any) -> None:
    """The thread that the engine has for a device must not wait for calls that need it."""
    threads: set[int] = set()

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            threads.add(threading.get_ident())
            threading.Event().wait(0.02)  # gives workers time to start
            return grad

    monkeypatch.setattr(parallel_map, "is_on_host", lambda tensor: False)
    x = torch.ones(2, requires_grad=True)
    outputs = map_with_parallel_backward(Looking, *[(x,)] * 6)
    sum(o.sum() for (o,) in outputs).backward()
    assert threads == {threading.get_ident()}
    assert x.grad.tolist() == [6.0, 6.0]
