"""The host's part of pools and experts on a GPU: which thread works, and what it tells torch about streams. The GPU is
simulated (tests/pretended.py): its tensors are in host memory, and the tests provide their operators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from limits import LONG
from pretended import cuda_tensor
from torch import Tensor, nn

from pymoe.runtime import Runtime, TaskPool
from pymoe.runtime.expert_device import ExpertDevice

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="operators of a GPU that is there stay its own"),
    pytest.mark.filterwarnings("ignore:Warning only once for all operators"),  # the one that refuses CUDA is overridden
]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Record the calls to the simulated GPU, in order."""
    seen: list[Any] = []
    asked: list[tuple[int, str]] = []

    class Current(torch.Stream):
        def synchronize(self) -> None:
            seen.append(("synchronize", asked[-1][0]))

    def current_stream(device: Any) -> torch.Stream:
        index = device if isinstance(device, int) else torch.device(device).index
        asked.append((index, threading.current_thread().name))
        return Current(device="cpu")

    def record_stream(tensor: Tensor, stream: torch.Stream) -> None:
        seen.append(("record", tensor.data_ptr(), asked[-1]))

    def gather(tensors: list[Tensor]) -> Tensor:
        seen.append(("gather", [tensor.data_ptr() for tensor in tensors], threading.current_thread().name))
        return torch.cat([memory(tensor) for tensor in tensors])

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    with (
        torch.library._scoped_library("aten", "IMPL") as aten,
        torch.library._scoped_library("pymoe", "IMPL") as pymoe,
    ):
        aten.impl("record_stream", record_stream, "CUDA")
        aten.impl("_to_copy", lambda tensor, **options: memory(tensor).clone(), "CUDA")
        pymoe.impl("gather_batch", gather, "CUDA", allow_override=True)
        yield seen


def memory(tensor: Tensor) -> Tensor:
    return tensor.memory  # type: ignore[attr-defined]


@pytest.mark.parametrize("on_gpu", [(0,), (1,), (2,), (0, 1, 2), ()], ids=str)
def test_a_client_helps_with_a_batch_that_is_the_cpus_alone(on_gpu: tuple[int, ...], events: list[Any]) -> None:
    """A waiting client has its own device and stream. It looked only at a request's first tensor, and gathered
    others on its own stream even if they were on a GPU.
    """
    taken, release, threads = threading.Event(), threading.Event(), []

    def hold(x: Tensor) -> Tensor:
        taken.set()
        assert release.wait(LONG)
        return x

    def see(x: Tensor, *_: Tensor) -> Tensor:
        threads.append(threading.get_ident())
        return torch.ones(x.shape)

    holds, sees = TaskPool(hold, name="holds", linger=0), TaskPool(see, name="sees", linger=0)
    with Runtime([holds, sees], num_workers=1):
        holding = holds.submit_task(torch.ones(1, 1))
        assert taken.wait(LONG)  # the only worker
        tensors = [torch.ones(1, 2) for _ in range(3)]
        client = threading.Thread(
            target=lambda: sees.submit_task(
                *(cuda_tensor(one) if i in on_gpu else one for i, one in enumerate(tensors))
            ).result()
        )
        client.start()
        client.join(0.2)  # to help, which it must not do
        release.set()
        client.join(LONG)
        holding.result(LONG)
    assert (threads == [client.ident]) == (on_gpu == ())


def test_memory_of_another_stream_is_kept_until_the_gather_has_read_it(events: list[Any]) -> None:
    """A request is done when its gather is queued. Its tensors were then released, and the allocator reused memory
    from a side stream in that stream while the gather had still to read it.
    """
    pool = TaskPool(lambda x, y: (x, y), name="pool", min_batch_size=5, timeout=LONG, linger=0)
    with Runtime([pool], num_workers=1):
        given = [(torch.rand(rows, 2), torch.rand(rows, 3)) for rows in (2, 3)]
        futures = [pool.submit_task(cuda_tensor(x, 1), cuda_tensor(y)) for x, y in given]
        for future, (x, y) in zip(futures, given, strict=True):
            assert all(map(torch.equal, future.result(LONG), (x, y)))
    (worker,) = {event[2] for event in events if event[0] == "gather"}
    expected = []
    for position, device in enumerate((1, 0)):
        places = [tensors[position].data_ptr() for tensors in given]
        expected += [("record", place, (device, worker)) for place in places] + [("gather", places, worker)]
    assert events == expected


@pytest.mark.parametrize("expert", [nn.ReLU(), nn.Linear(1, 1)], ids=["no parameters", "parameters"])
def test_a_result_that_comes_from_another_gpu_has_come_when_it_is_handed_out(
    expert: nn.Module, events: list[Any]
) -> None:
    """The function continues while copies to the host run. Only copies from the expert's device were waited for,
    but an expert may return tensors on another one: clients then read memory before it was written.
    """
    function: Callable[[Any], tuple[Any, ...]] = lambda tensors: (cuda_tensor(tensors[0], 3), "no tensor")  # noqa: E731
    x = torch.rand(2, 2)
    y, text = ExpertDevice(expert).run(function, [x])
    assert text == "no tensor"
    assert y.device.type == "cpu"
    assert torch.equal(y, x)
    assert events == [("synchronize", 3)]
