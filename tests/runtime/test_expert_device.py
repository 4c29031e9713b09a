"""An expert on another device than its requests: tensors are moved there and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from pretended import DEVICE, Pretended, pretended
from torch import Tensor, nn

from pymoe.autograd import plain_state
from pymoe.runtime import BatchTensorProto, ExpertBackend
from pymoe.runtime.expert_device import ExpertDevice

X, IDS = BatchTensorProto(4), BatchTensorProto(dtype=torch.int64)


class Elsewhere(nn.Module):
    """Works only on the pretended device, whose tensors cannot be combined with CPU tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        assert x.device == ids.device == self.weight.device
        return {"y": x * self.weight, "ids": ids + 1, "name": "elsewhere"}


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with pretended():
        yield


def test_tensors_of_requests_go_to_the_expert_and_come_back() -> None:
    expert_device = ExpertDevice(nn.Linear(4, 4).to(DEVICE))
    assert expert_device.device == DEVICE
    here = (torch.randn(3, 4), torch.arange(3))
    assert not expert_device.is_home_of(here)

    def function(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        assert [tensor.device for tensor in tensors] == [DEVICE, DEVICE]
        return tensors[0] * 2, None, tensors[1] + 1

    product, nothing, ids = expert_device.run(function, here)
    assert nothing is None
    assert not isinstance(product, Pretended)
    assert torch.equal(product, here[0] * 2)
    assert torch.equal(ids, here[1] + 1)
    there = [tensor.to(DEVICE) for tensor in here]
    assert expert_device.is_home_of(there)
    assert not expert_device.is_home_of([there[0], here[1]])


def test_an_expert_without_parameters_takes_tensors_where_they_are() -> None:
    expert_device = ExpertDevice(nn.ReLU())
    assert expert_device.device is None
    for tensors in ([torch.ones(2)], [torch.ones(2).to(DEVICE), torch.ones(2)]):
        assert expert_device.is_home_of(tensors)


def test_outputs_of_an_expert_that_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    # The pretended device is a mode of this thread, like the modes from which experts are shielded.
    monkeypatch.setattr("pymoe.runtime.backend.in_plain_state", plain_state._with_grad)
    expert = Elsewhere().to(DEVICE)
    schema = {"y": X, "ids": IDS, "name": "elsewhere"}
    backend = ExpertBackend("e", expert, args_schema=[X, IDS], outputs_schema=schema)
    x, ids = torch.randn(3, 4), torch.arange(3)
    for home in (torch.device("cpu"), DEVICE):
        ids_out, name, y = backend.forward(x.to(home), ids.to(home))
        assert ids_out.device == y.device == home
        assert name == "elsewhere"
        assert torch.equal(y.to("cpu"), x * 2)
        assert torch.equal(ids_out.to("cpu"), ids + 1)


def test_a_backend_that_is_moved_knows_where_it_is() -> None:
    expert = nn.Linear(4, 4)
    backend = ExpertBackend("e", expert, args_schema=[X])
    assert torch.equal(backend.forward(torch.ones(1, 4))[0], expert(torch.ones(1, 4)))
    backend.to("meta")
    assert ExpertDevice(expert).device == torch.device("meta")
    assert backend.forward(torch.ones(1, 4, device="meta"))[0].is_meta
    moved = ExpertBackend("e", nn.Linear(4, 4), args_schema=[X], device="meta")
    assert moved.expert.weight.is_meta
    assert moved.outputs_schema == X.replace(device="meta")
