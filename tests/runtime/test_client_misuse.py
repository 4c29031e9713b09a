"""Uses of a client that failed silently: constants, copies, expired timeouts, no runtime."""

from __future__ import annotations

import asyncio
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from limits import LONG
from torch import Tensor, nn

import pymoe.runtime.client
from pymoe.runtime import BatchTensorProto, ExpertBackend, ExpertClient, Runtime, TaskPool

X = BatchTensorProto(4)


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Any = None, more: Any = ()) -> Tensor:
        return x * scale


def make(**options: Any) -> ExpertBackend:
    return ExpertBackend("expert", Scaled(), args_schema=(X, 2.0), kwargs_schema={"mask": None}, **options)


def plain() -> ExpertBackend:
    return ExpertBackend("expert", Scaled(), args_schema=(X,))


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((3.0,), {"mask": None}, ValueError, r"expert: args\[1\] is the constant 2.0 in the schema, got 3.0"),
        ((torch.tensor(2.0),), {"mask": None}, TypeError, r"args\[1\] is the constant 2.0 in the schema, got a tensor"),
        ((2.0,), {"mask": torch.ones(3, 4)}, TypeError, "mask is the constant None in the schema, got a tensor"),
        ((2.0,), {"mask": 0}, ValueError, "mask is the constant None in the schema, got 0"),
    ],
)
def test_another_value_than_the_schemas_constant_is_refused(
    args: Any, kwargs: Any, error: type[Exception], message: str
) -> None:
    x = torch.ones(3, 4)
    backend = make()
    with Runtime([backend]):
        client = ExpertClient(backend, timeout=LONG)
        with pytest.raises(error, match=message):
            client(x, *args, **kwargs)
        assert torch.equal(client(x, 2, mask=None), 2 * x)
        assert torch.equal(copy.deepcopy(client)(x, 2.0, mask=None), 2 * x)


def test_a_constant_inside_a_structure_is_named() -> None:
    backend = ExpertBackend("expert", Scaled(), args_schema=(X,), kwargs_schema={"more": {"a": [X, 1]}})
    with Runtime([backend]):
        client = ExpertClient(backend, timeout=LONG)
        with pytest.raises(ValueError, match=r"more\['a'\]\[1\] is the constant 1"):
            client(torch.ones(3, 4), more={"a": [torch.ones(3, 4), 2]})


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_model_asks_the_same_expert(duplicate: Callable[[Any], Any]) -> None:
    backend = plain()
    model = nn.Sequential(nn.Linear(4, 4), ExpertClient(backend, timeout=LONG))
    twin = duplicate(model)
    assert duplicate(model[1]) is not model[1]
    assert duplicate(model[1]).backend is backend
    assert twin[1].backend is backend
    twin.eval()
    with Runtime([backend]):
        assert torch.equal(twin(torch.ones(3, 4)), model(torch.ones(3, 4)))


def test_a_client_cannot_be_pickled_and_says_why() -> None:
    client = ExpertClient(plain())
    with pytest.raises(TypeError, match="'expert' cannot be pickled: it asks a backend of this process"):
        pickle.dumps(client)
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(nn.Sequential(client), io.BytesIO())


async def awaited(client: ExpertClient, x: Tensor) -> Any:
    return await client.submit(x)


FORMS: dict[str, Callable[[ExpertClient, Tensor], Any]] = {
    "call": lambda client, x: client(x),
    "submit": lambda client, x: client.submit(x).result(),
    "await submit": lambda client, x: asyncio.run(awaited(client, x)),
    "call_async": lambda client, x: asyncio.run(client.call_async(x)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_timeout_bounds_every_way_to_wait(form: str) -> None:
    """The pool is not served, so nothing else ends the wait. The request is withdrawn by whichever sees first that the
    time has passed: its client, or the pool.
    """
    backend = plain()
    client = ExpertClient(backend, timeout=0.5)
    with pytest.raises(TimeoutError) as caught:
        FORMS[form](client, torch.ones(3, 4))
    assert str(caught.value) in (
        f"expert_forward: the request is not done within 0.5 s; {backend.forward_pool.why_unserved}",
        "TaskPool 'expert_forward': the request had not started in time; no Runtime serves the pool",
    )
    counts = backend.forward_pool._statistics()
    assert counts["cancelled"] + counts["expired"] == 1
    with Runtime([backend]):
        client.timeout = LONG
        assert torch.equal(FORMS[form](client, torch.ones(3, 4)), torch.ones(3, 4))


def test_the_timeout_bounds_the_wait_for_room() -> None:
    backend = ExpertBackend("expert", Scaled(), args_schema=(X,), capacity=1)
    backend.forward_pool.submit_task(torch.ones(1, 4))
    with pytest.raises(TimeoutError, match="room for the request in time"):
        asyncio.run(ExpertClient(backend, timeout=0.02).call_async(torch.ones(3, 4)))
    assert backend.forward_pool._statistics()["queued"] == 1


def test_a_timeout_that_the_expert_raises_is_its_own() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise TimeoutError("the expert's own")

    backend = ExpertBackend("expert", Late(), args_schema=(X,), outputs_schema=X)
    with Runtime([backend]):
        for form in FORMS.values():
            with pytest.raises(TimeoutError, match=r"^the expert's own$"):
                form(ExpertClient(backend, timeout=LONG), torch.ones(3, 4))


def test_a_client_without_a_timeout_says_that_nobody_serves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pymoe.runtime.client, "UNSERVED_WARNING_DELAY_S", 0.01)
    backend = plain()
    runtime = Runtime([backend])
    said: list[str] = []

    def starts(message: Any, category: type[Warning], *place: Any) -> None:
        said.append(f"{category.__name__}: {message}")
        runtime.start()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", starts)
        client = ExpertClient(backend)
        assert torch.equal(client(torch.ones(3, 4)), torch.ones(3, 4))
        assert torch.equal(client(torch.ones(3, 4)), torch.ones(3, 4))
    runtime.shutdown()
    (warned,) = said
    assert warned.startswith(
        "RuntimeWarning: expert_forward: a client waits for an answer, but no Runtime serves the pool"
    )


def test_a_pool_knows_whether_it_is_served() -> None:
    pool = TaskPool(lambda x: x, name="pool")
    assert not pool.served
    with Runtime([pool]):
        assert pool.served
    assert not pool.served
