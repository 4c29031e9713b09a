"""Ownership of memory: no pass changes a caller's tensors, and no client gets memory that a function keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from limits import LONG
from torch import Tensor, nn

from pymoe.runtime import BatchTensorProto, ExpertBackend, ExpertClient, Runtime, TaskPool

X = BatchTensorProto(4)


# --- inputs ---

# Edits, each with arguments: the tensor, whether the module trains, and the number of the call.
EDITS: dict[str, Callable[[Tensor, bool, int], Any]] = {
    "in every call": lambda x, trains, call: x.mul_(0.5),
    "from the third call on": lambda x, trains, call: x.mul_(0.5) if call > 2 else None,
    "in training mode": lambda x, trains, call: x.mul_(0.5) if trains else None,
    "by its values": lambda x, trains, call: x.clamp_(max=0.75) if x.max() > 0.75 else None,
    "dropout, in training mode": lambda x, trains, call: F.dropout(x, 0.5, trains, inplace=True),
    "through data": lambda x, trains, call: x.data.mul_(0.5),
    "through numpy": lambda x, trains, call: x.detach().numpy().__imul__(0.5),
}


class Edits(nn.Module):
    def __init__(self, edit: Callable[[Tensor, bool, int], Any]) -> None:
        super().__init__()
        self.layer, self.edit, self.calls = nn.Linear(4, 4), edit, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.edit(x, self.training, self.calls)
        return self.layer(x)


@pytest.mark.parametrize("edit", EDITS)
def test_no_pass_changes_a_callers_tensors(edit: str) -> None:
    expert = Edits(EDITS[edit]).eval()
    backend = ExpertBackend("e", expert, args_schema=[X])
    x, gradient = torch.ones(3, 4), torch.ones(3, 4)
    for _ in range(4):
        backend.forward(x)
        backend.train()
        backend.backward(x, gradient)
    assert torch.equal(x, torch.ones(3, 4))
    with Runtime([backend]):
        leaf = torch.ones(3, 4, requires_grad=True)
        ExpertClient(backend)(leaf).sum().backward()
    assert torch.equal(leaf, torch.ones(3, 4))
    assert torch.equal(gradient, torch.ones(3, 4))


def test_an_expert_that_begins_to_work_in_place_is_differentiated_as_before() -> None:
    """In-place changes of inputs were detected only in the first pass; later, every backward request failed for
    ever.
    """
    expert = Edits(EDITS["in training mode"]).eval()
    backend = ExpertBackend("e", expert, args_schema=[X])
    backend.forward(torch.ones(2, 4))
    backend.train()
    (gradient,) = backend.backward(torch.ones(2, 4), torch.ones(2, 4))
    torch.testing.assert_close(gradient, 0.5 * torch.ones(2, 4) @ expert.layer.weight)


# --- results ---


class Keeps:
    """Batch functions that return, in some form, memory that they keep."""

    def __init__(self) -> None:
        self.table = torch.zeros(8, 3)
        self.array = self.table.clone().numpy()
        self.parameter = nn.Parameter(torch.zeros(8, 3))
        self.kept: list[Any] = []

    def keep(self, value: Any) -> Any:
        self.kept.append(value)
        return value

    def memory(self) -> list[Any]:
        tensors = [part for value in self.kept for part in (value if isinstance(value, tuple) else (value,))]
        return copy.deepcopy([self.table, self.array.tolist(), self.parameter, *tensors])


FORMS: dict[str, Callable[[Keeps, Tensor], Any]] = {
    "a row, expanded": lambda own, x: own.table[:1].expand(len(x), 3),
    "rows": lambda own, x: own.table[: len(x)],
    "columns, overlapping": lambda own, x: own.table.as_strided((len(x), 3), (1, 1)),
    "a tensor": lambda own, x: own.keep(torch.zeros(len(x), 3)),
    "an array": lambda own, x: torch.from_numpy(own.array[: len(x)]),
    "a parameter": lambda own, x: own.parameter.detach()[: len(x)],
    "its input": lambda own, x: own.keep(x),
    "a view of its input": lambda own, x: own.keep(x)[:, :1],
    "a structure": lambda own, x: {"a": own.table[: len(x)], "b": [x * 2, own.keep((x + 1,))[0]]},
}


def tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in (result.values() if isinstance(result, dict) else result) for tensor in tensors_of(part)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_no_client_gets_memory_that_the_function_keeps(form: str, count: int) -> None:
    own = Keeps()
    pool = TaskPool(lambda x: FORMS[form](own, x), name="pool", min_batch_size=2 * count)
    with Runtime([pool]):
        requests = [pool.submit_task(torch.zeros(2, 3)) for _ in range(count)]
        results = [request.result(LONG) for request in requests]
        before = own.memory()
        for number, result in enumerate(results):
            for place, tensor in enumerate(tensors_of(result)):
                tensor.fill_(10.0 * number + place + 1)
        assert str(own.memory()) == str(before)
        for number, result in enumerate(results):
            for place, tensor in enumerate(tensors_of(result)):
                assert (tensor == 10.0 * number + place + 1).all()


def test_no_client_gets_an_experts_cache() -> None:
    """An expert returned a tensor that it kept, so one client's in-place change appeared in the next client's
    result.
    """

    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.cache = nn.Linear(4, 4), torch.zeros(2, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.cache

    backend = ExpertBackend("e", Caches(), args_schema=[X], outputs_schema=(X, X))
    with Runtime([backend]), torch.no_grad():
        client = ExpertClient(backend)
        client(torch.ones(2, 4))[1].add_(5)
        assert (client(torch.ones(2, 4))[1] == 0).all()


# --- what a pool does not take ---


OTHERS: dict[str, Callable[[], Tensor]] = {
    "torch.sparse_coo on cpu": lambda: torch.eye(3).to_sparse(),
    "torch.sparse_csr on cpu": lambda: torch.eye(3).to_sparse_csr(),
    "torch.strided on meta": lambda: torch.eye(3, device="meta"),
}


@pytest.mark.parametrize("got", OTHERS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_tensor_without_strides_or_values_is_refused_in_one_sentence(got: str) -> None:
    tensor = OTHERS[got]()
    pool = TaskPool(lambda x: x, name="pool")
    with pytest.raises(TypeError, match=f"expected a dense tensor with values, got {got}") as refused:
        pool.submit_task(tensor)
    assert "\n" not in str(refused.value)
    assert pool.empty
