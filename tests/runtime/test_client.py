"""A served expert inside an ordinary model: what the client returns, trains, refuses and cancels."""

from __future__ import annotations

import asyncio
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from limits import LONG
from torch import Tensor, nn

from pymoe.runtime import BatchTensorProto, ExpertBackend, ExpertClient, NonFiniteGradientError, Runtime

X = BatchTensorProto(4, dtype=torch.float64)


class Call(nn.Module):
    """A module that calls a given function, with a parameter for it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def sgd(module: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=lr)


@contextmanager
def served(expert: nn.Module, *, opt: bool = True, timeout: float | None = LONG, **options: Any) -> Iterator[Any]:
    """Serve the expert, and provide a client of it."""
    options.setdefault("args_schema", [X])
    backend = ExpertBackend("expert", expert, sgd(expert) if opt else None, **options)
    with Runtime([backend], num_workers=2):
        yield ExpertClient(backend, timeout=timeout)


def mlp(*sizes: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers).double()


def close(first: nn.Module, second: nn.Module) -> None:
    for mine, its in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


# --- training ---


def test_a_model_with_a_served_expert_trains_as_with_its_own() -> None:
    inner, outer_before, outer_after = mlp(4, 8, 4), mlp(3, 4, seed=1), mlp(4, 2, seed=2)
    plain = nn.Sequential(mlp(3, 4, seed=1), mlp(4, 8, 4), mlp(4, 2, seed=2))
    plain_opt = sgd(plain)
    with served(inner) as client:
        model = nn.Sequential(outer_before, client, outer_after)
        opt = sgd(model)
        for step in range(20):
            x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            losses = []
            for one, its_opt in ((model, opt), (plain, plain_opt)):
                its_opt.zero_grad()
                loss = one(x).square().sum()
                loss.backward()
                its_opt.step()
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], rel=1e-12)
        assert client.backend.updates == 20
    close(nn.Sequential(outer_before, inner, outer_after), plain)


def test_the_expert_trains_as_the_first_layer_where_no_input_requires_a_gradient() -> None:
    with served(Call(lambda weight, x: weight * x)) as client:
        output = client(torch.ones(3, 4, dtype=torch.float64))
        assert output.requires_grad
        output.sum().backward()
        assert client.backend.updates == 1
        assert torch.equal(client.backend.expert.weight, torch.full((4,), 2 - 0.05 * 3, dtype=torch.float64))


def test_the_client_has_no_parameters_of_its_own() -> None:
    with served(mlp(4, 4)) as client:
        assert list(client.parameters()) == []
        assert list(client.modules()) == [client]
        assert client.state_dict() == {}
        client.eval()
        assert client.backend.expert.training


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_only_computes(context: Any) -> None:
    with served(Call(lambda weight, x: weight * x)) as client:
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        with context():
            output = client(x)
            assert not output.requires_grad
            assert output.grad_fn is None
            torch.testing.assert_close(output, 2 * x)


def test_a_frozen_expert_passes_gradients_on_and_nothing_else() -> None:
    with served(Call(lambda weight, x: weight * x), opt=False) as client:
        x = torch.randn(3, 4, dtype=torch.float64)
        assert not client(x).requires_grad
        client(x.requires_grad_()).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2.0))
        assert client.backend.updates == 0


def test_one_client_may_be_called_several_times_in_a_graph() -> None:
    with served(Call(lambda weight, x: weight * x), opt=False) as client:
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        y = client(client(x)) + client(x)
        torch.testing.assert_close(y, 6 * x)
        y.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 6.0))


def test_a_checkpointed_call() -> None:
    from torch.utils.checkpoint import checkpoint

    with served(Call(lambda weight, x: weight * x * x), opt=False) as client:
        for reentrant in (False, True):
            x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
            y = checkpoint(client, x, use_reentrant=reentrant)
            y.sum().backward()
            torch.testing.assert_close(x.grad, 4 * x)


# --- structures ---


def test_keyword_arguments_nested_structures_and_integers() -> None:
    def function(weight: Tensor, x: Tensor, extra: Any, *, rows: Tensor, mask: Tensor) -> Any:
        product = x * weight * rows[:, None] + extra["a"] * mask
        return {"product": product, "best": (product.argmax(1), None), "same": [extra["a"]]}

    schema = {
        "args_schema": [X, {"a": X}],
        "kwargs_schema": {"rows": BatchTensorProto(dtype=torch.int64), "mask": X},
    }
    expert = Call(function)
    plain = Call(function)
    with served(expert, **schema) as client:
        tensors = [torch.randn(3, 4, dtype=torch.float64) for _ in range(3)]
        rows = torch.tensor([1, 2, 3])
        results = []
        for one in (client, plain):
            x, a, mask = (tensor.clone().requires_grad_() for tensor in tensors)
            out = one(x, {"a": a}, mask=mask, rows=rows)
            assert list(out) == ["product", "best", "same"]
            assert out["best"][0].dtype == torch.int64
            assert not out["best"][0].requires_grad
            assert out["best"][1] is None
            (out["product"].square().sum() + out["same"][0].sum()).backward()
            results.append([out["product"], out["best"][0], x.grad, a.grad, mask.grad])
        for mine, its in zip(*results, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
        assert client.backend.updates == 1


def test_a_part_of_the_outputs_may_go_unused() -> None:
    with served(Call(lambda weight, x: (weight * x, x * 3, x.argmax(1)))) as client:
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        client(x)[1].sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 3.0))
        assert client.backend.updates == 1


def test_only_integers_are_no_part_of_a_graph() -> None:
    with served(Call(lambda weight, x: x.argmax(1))) as client:
        out = client(torch.randn(3, 4, dtype=torch.float64, requires_grad=True))
        assert not out.requires_grad


def test_no_rows() -> None:
    with served(Call(lambda weight, x: weight * x)) as client:
        x = torch.ones(0, 4, dtype=torch.float64, requires_grad=True)
        client(x).sum().backward()
        assert x.grad.shape == (0, 4)
        assert client.backend.updates == 0


def test_outputs_may_be_changed_in_place() -> None:
    """Outputs are views of a batch's result, whose other rows belong to other clients."""
    with served(Call(lambda weight, x: (weight * x, x + 1))) as client:
        x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        first, second = client(x)
        first.mul_(3).add_(second)
        first.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 7.0))


def test_autocast_is_for_the_clients_own_layers() -> None:
    expert = Call(lambda weight, x: x @ torch.diag(weight.float()))
    with served(expert, args_schema=[BatchTensorProto(4)]) as client:
        layer = nn.Linear(4, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = layer(torch.randn(3, 4))
            assert hidden.dtype == torch.bfloat16
            output = client(hidden)
        assert output.dtype == torch.float32
        torch.testing.assert_close(output, 2 * hidden.float())
        output.sum().backward()
        assert layer.weight.grad is not None
        with pytest.raises(TypeError, match="bfloat16"):
            client(hidden)


# --- what is refused, and failures ---


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((), {}, TypeError, "expert: expected 1 positional arguments, got 0"),
        ((torch.ones(2, 4), 1), {}, TypeError, "expert: expected 1 positional arguments, got 2"),
        ((torch.ones(2, 4),), {"y": 1}, TypeError, r"expert: expected the keyword arguments \[\], got \['y'\]"),
        ((torch.ones(2, 4),), {}, TypeError, "float32"),
        (([1.0],), {}, TypeError, "list"),
        ((None,), {}, TypeError, "NoneType"),
        ((torch.ones(2, 5, dtype=torch.float64),), {}, ValueError, r"\(2, 5\)"),
        ((torch.ones(4, dtype=torch.float64),), {}, ValueError, r"\(4,\)"),
    ],
)
def test_a_wrong_call_is_refused_before_it_becomes_a_request(
    args: Any, kwargs: Any, error: type[Exception], message: str
) -> None:
    def function(weight: Tensor, x: Tensor) -> Tensor:
        assert x.shape == (2, 4)
        return x

    with served(Call(function), outputs_schema=X) as client:
        with pytest.raises(error, match=message):
            client(*args, **kwargs)
        assert client(torch.ones(2, 4, dtype=torch.float64)).shape == (2, 4)


def test_arguments_must_be_built_as_the_schema_says() -> None:
    with served(Call(lambda weight, pair: weight * pair["x"]), args_schema=[{"x": X}]) as client:
        x = torch.ones(2, 4, dtype=torch.float64)
        for wrong in (x, [x], {"y": x}, {"x": (x,)}):
            with pytest.raises(TypeError, match="must have the structure"):
                client(wrong)
        assert torch.equal(client({"x": x}), 2 * x)


def test_exceptions_of_either_pass_reach_the_client() -> None:
    def function(weight: Tensor, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.any():
            raise KeyError("in the backward pass")
        if (x == 1).any():
            raise ZeroDivisionError("in the forward pass")
        return weight * x

    with served(Call(function)) as client:
        with pytest.raises(ZeroDivisionError, match="in the forward pass"):
            client(torch.ones(2, 4, dtype=torch.float64))
        output = client(torch.full((2, 4), 2.0, dtype=torch.float64))
        with pytest.raises(KeyError, match="in the backward pass"):
            output.sum().backward()
        client(torch.zeros(2, 4, dtype=torch.float64)).sum().backward()
        assert client.backend.updates == 1


def test_a_nan_is_refused_and_the_expert_lives() -> None:
    with served(Call(lambda weight, x: weight * x)) as client:
        x = torch.ones(2, 4, dtype=torch.float64)
        with pytest.raises(NonFiniteGradientError):
            (client(x) * float("nan")).sum().backward()
        assert client(x).isfinite().all()


def test_inputs_changed_in_place_are_noticed() -> None:
    with served(Call(lambda weight, x: weight * x)) as client:
        x = torch.ones(2, 4, dtype=torch.float64)
        output = client(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
        pending = client.submit(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="changed in place while its request was pending"):
            pending.result()


def test_a_second_derivative_is_refused() -> None:
    with served(Call(lambda weight, x: weight * x * x)) as client:
        x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(client(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            gradient.sum().backward()


# --- time ---


@contextmanager
def busy(backend: ExpertBackend) -> Iterator[None]:
    """Keep every other batch of the expert waiting."""
    begun, release = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        begun.set()
        release.wait(LONG)

    with ExitStack() as stack:
        handle = backend.expert.register_forward_pre_hook(hold)
        future = backend.forward_pool.submit_task(torch.ones(1, 4, dtype=torch.float64))
        assert begun.wait(LONG)
        handle.remove()
        stack.callback(future.result, LONG)
        stack.callback(release.set)
        yield


def test_a_call_that_takes_too_long_is_cancelled() -> None:
    ran: list[int] = []

    def function(weight: Tensor, x: Tensor) -> Tensor:
        ran.append(len(x))
        return weight * x

    with served(Call(function), timeout=LONG) as client:
        x = torch.ones(2, 4, dtype=torch.float64)
        output = ExpertClient(client.backend)(x)
        slow_backward = client(x)
        client.timeout = 0.05
        ran.clear()
        with busy(client.backend):
            with pytest.raises(TimeoutError):
                client(x)
            with pytest.raises(TimeoutError):
                slow_backward.sum().backward()
            assert client.backend.updates == 0
        output.sum().backward()
        assert client.backend.updates == 1
    assert sorted(ran) == [1, 2]


def test_calls_can_be_sent_before_their_answers_are_waited_for() -> None:
    with served(Call(lambda weight, x: weight * x), opt=False) as client:
        inputs = [torch.full((2, 4), float(i), dtype=torch.float64, requires_grad=True) for i in range(20)]
        pending = [client.submit(x) for x in inputs]
        for x, call in zip(inputs, pending, strict=True):
            output = call.result()
            assert call.done()
            assert not call.cancel()
            assert torch.equal(output, 2 * x)
            assert output.requires_grad
        with torch.no_grad():
            assert not pending[0].result().requires_grad  # result() may be called again
        first, second = pending[0].result(), pending[0].result()
        (first + second).sum().backward()
        assert torch.equal(inputs[0].grad, 2 * torch.full_like(inputs[0], 2.0))
        with busy(client.backend):
            call = client.submit(inputs[0])
            assert not call.done()
            assert call.cancel()


def test_calls_in_an_event_loop() -> None:
    with served(Call(lambda weight, x: weight * x), opt=False) as client:
        inputs = [torch.full((2, 4), float(i), dtype=torch.float64, requires_grad=True) for i in range(50)]

        async def main() -> list[Tensor]:
            calls = [client.call_async(x) for x in inputs]
            return [*await asyncio.gather(*calls), await client.submit(inputs[3])]

        outputs = asyncio.run(main())
        for x, output in zip([*inputs, inputs[3]], outputs, strict=True):
            assert torch.equal(output, 2 * x)
            output.sum().backward()
        assert torch.equal(inputs[3].grad, torch.full_like(inputs[3], 4.0))


def test_many_threads_train_one_expert() -> None:
    """Each thread gets the gradients of its own rows, and together they make updates from all rows."""
    expert = Call(lambda weight, x: weight * x)
    rows: list[int] = []

    class Counting(ExpertBackend):
        def apply_gradients(self) -> None:
            rows.append(int(self.expert.weight.grad[0]))  # the inputs and their gradients are ones

    backend = Counting("expert", expert, args_schema=[X])
    errors: list[BaseException] = []

    def trainer(seed: int) -> None:
        try:
            client = ExpertClient(backend, timeout=LONG)
            for i in range(20):
                x = torch.ones(1 + (seed + i) % 3, 4, dtype=torch.float64, requires_grad=True)
                client(x).sum().backward()
                assert torch.equal(x.grad, torch.full_like(x, 2.0))
        except BaseException as error:
            errors.append(error)

    with Runtime([backend], num_workers=2):
        threads = [threading.Thread(target=trainer, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
    assert not errors
    assert sum(rows) == sum(1 + (seed + i) % 3 for seed in range(6) for i in range(20))
    assert backend.updates == len(rows)


def test_only_who_wants_to_train_a_client_is_warned() -> None:
    """DDP asks every module for its own parameters alone, and an optimizer of a whole model asks for none of these."""
    with served(nn.Linear(4, 4).double()) as client:
        model = nn.Sequential(nn.Linear(4, 4), client)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(list(model.parameters())) == 2
            for module in model.modules():
                list(module.parameters(recurse=False))
        with pytest.warns(UserWarning, match="the server updates the expert"):
            assert not list(client.parameters())
