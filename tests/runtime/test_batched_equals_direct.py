"""Thousands of batched requests get the same results as direct calls, including updates."""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from limits import LONG
from torch import Tensor, nn

from pymoe.runtime import BatchTensorProto, ExpertBackend, NonFiniteGradientError, Runtime

REQUESTS = 2000
CLIENTS = 8
X = BatchTensorProto(6, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _one_thread_an_operator() -> Iterator[None]:
    """Give every operator one thread: threads that run batches would start further threads, which spin while they
    wait.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Rowwise(nn.Module):
    """Outputs and gradients contain no sums over rows or columns, so they are equal bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight) + x.exp()


def matmul() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)).double()


class Recording(ExpertBackend):
    """Records every batch of its passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorded: dict[str, list[tuple[Tensor, ...]]] = {"forward": [], "backward": []}

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        self.recorded["forward"].append(tuple(tensor.clone() for tensor in inputs))
        return super().forward(*inputs)

    def backward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.recorded["backward"].append(tuple(tensor.clone() for tensor in inputs))
        return super().backward(*inputs)


def from_many_clients(requests: list[Any], ask: Callable[[Any], Any]) -> list[Any]:
    """Return the answers to all requests in order; several threads ask, some with several requests at a time."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        chunks = [requests[start : start + 7] for start in range(0, len(requests), 7)]
        answers = clients.map(lambda chunk: [future.result(LONG) for future in [ask(one) for one in chunk]], chunks)
        return [answer for chunk in answers for answer in chunk]


@pytest.mark.parametrize("make", [Rowwise, matmul])
def test_two_thousand_requests_of_random_sizes(make: Callable[[], nn.Module]) -> None:
    expert = make()
    plain = copy.deepcopy(expert)
    backend = Recording("e", expert, args_schema=[X], max_batch_size=64)
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    sizes = [rng.choice([0, 1, 1, 1, 2, 5, 17, 63, 64, 65, 200]) for _ in range(REQUESTS)]
    pairs = [torch.randn(2, size, 6, dtype=torch.float64, generator=generator).unbind() for size in sizes]
    with Runtime([backend], num_workers=2):
        outputs = from_many_clients(pairs, lambda pair: backend.forward_pool.submit_task(pair[0]))
        gradients = from_many_clients(pairs, lambda pair: backend.backward_pool.submit_task(*pair))
    exact = make is Rowwise
    for (x, grad), (output,), (gradient,) in zip(pairs, outputs, gradients, strict=True):
        leaf = x.clone().requires_grad_()
        expected = plain(leaf)
        expected.backward(grad)
        for got, wanted in ((output, expected.detach()), (gradient, leaf.grad)):
            assert got.shape == wanted.shape
            if exact:
                assert torch.equal(got, wanted)
            else:
                torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for batches in backend.recorded.values():
        assert sum(len(batch[0]) for batch in batches) == sum(sizes)
        assert max(len(batch[0]) for batch in batches) == 64
        assert len(batches) < sum(math.ceil(size / 64) for size in sizes) / 1.25  # otherwise nothing was batched


@pytest.mark.parametrize("options", [{}, {"gradient_reduction": "mean", "clip_grad_norm": 0.5, "accumulate_steps": 3}])
def test_the_optimizers_trajectory_is_a_plain_loops_over_the_same_batches(options: dict[str, Any]) -> None:
    served, plain = matmul(), matmul()
    opt, plain_opt = (torch.optim.Adam(one.parameters(), lr=1e-3) for one in (served, plain))
    backend = Recording("e", served, opt, args_schema=[X], max_batch_size=32, **options)
    generator = torch.Generator().manual_seed(2)
    pairs = [torch.randn(2, 1 + i % 9, 6, dtype=torch.float64, generator=generator).unbind() for i in range(REQUESTS)]
    with Runtime([backend], num_workers=2):
        gradients = from_many_clients(pairs, lambda pair: backend.backward_pool.submit_task(*pair))

    steps = options.get("accumulate_steps", 1)
    rows = 0
    of_row: dict[bytes, Tensor] = {}  # all rows differ
    for count, (x, grad) in enumerate(backend.recorded["backward"], start=1):
        leaf = x.requires_grad_()
        plain(leaf).backward(grad)
        of_row |= {row.numpy().tobytes(): gradient for row, gradient in zip(x.detach(), leaf.grad, strict=True)}
        rows += len(x)
        if count % steps == 0:
            if "gradient_reduction" in options:
                for parameter in plain.parameters():
                    parameter.grad /= rows
                nn.utils.clip_grad_norm_(plain.parameters(), options["clip_grad_norm"])
            plain_opt.step()
            plain_opt.zero_grad()
            rows = 0
    assert backend.updates == len(backend.recorded["backward"]) // steps > 10
    for mine, its in zip(served.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
    for (x, _), (gradient,) in zip(pairs, gradients, strict=True):
        expected = torch.stack([of_row[row.numpy().tobytes()] for row in x])
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


# --- one bad request among good ones ---


def together(backend: ExpertBackend, pool: Any, requests: list[Any]) -> list[Any]:
    """Return futures of requests that make one batch, since all are queued before anything can run."""
    begun, release = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        begun.set()
        release.wait(LONG)

    handle = backend.expert.register_forward_pre_hook(hold)
    blocker = backend.forward_pool.submit_task(torch.zeros(1, 6, dtype=torch.float64))
    assert begun.wait(LONG)
    handle.remove()
    futures = [pool.submit_task(*request) for request in requests]
    release.set()
    blocker.result(LONG)
    return futures


def rows(count: int, value: float = 0.5) -> Tensor:
    return torch.full((count, 6), value, dtype=torch.float64)


def test_a_bad_request_fails_alone() -> None:
    class Picky(Rowwise):
        def forward(self, x: Tensor) -> Tensor:
            if (x == 13).any():
                raise ZeroDivisionError("13")
            return super().forward(x)

    backend = Recording("e", Picky(), args_schema=[X], isolate=True)
    with Runtime([backend], num_workers=1):
        inputs = [(rows(2, 13 if i == 5 else i / 10),) for i in range(8)]
        futures = together(backend, backend.forward_pool, inputs)
        for i, future in enumerate(futures):
            if i == 5:
                with pytest.raises(ZeroDivisionError, match="13"):
                    future.result(LONG)
            else:
                assert torch.equal(future.result(LONG)[0], backend.expert(inputs[i][0]))
    assert len(backend.recorded["forward"][1][0]) == 16  # the requests were one batch


def test_a_nan_reaches_neither_the_outputs_nor_the_gradients_nor_the_expert_of_others() -> None:
    expert = Rowwise()
    backend = Recording("e", expert, torch.optim.SGD(expert.parameters(), lr=0.0), args_schema=[X], isolate=True)
    with Runtime([backend], num_workers=1):
        inputs = [rows(2, float("nan") if i == 5 else i / 10) for i in range(8)]
        outputs = [future.result(LONG)[0] for future in together(backend, backend.forward_pool, [(x,) for x in inputs])]
        futures = together(backend, backend.backward_pool, [(x, torch.ones_like(x)) for x in inputs])
        for i, (x, output, future) in enumerate(zip(inputs, outputs, futures, strict=True)):
            if i == 5:
                assert output.isnan().all()
                with pytest.raises(NonFiniteGradientError):
                    future.result(LONG)
                continue
            leaf = x.clone().requires_grad_()
            expected = Rowwise()(leaf)
            expected.sum().backward()
            assert torch.equal(output, expected)
            assert torch.equal(future.result(LONG)[0], leaf.grad)
    assert len(backend.recorded["backward"][0][0]) == 16
    assert expert.weight.isfinite().all()
    assert backend.updates == 3  # four requests, then two, then one


def test_a_batch_whose_update_had_begun_is_never_run_again() -> None:
    expert = Rowwise()
    opt = torch.optim.SGD(expert.parameters(), lr=0.1)
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        raise ZeroDivisionError("in the middle of a step")

    opt.step = step  # type: ignore[method-assign, assignment]
    backend = Recording("e", expert, opt, args_schema=[X], isolate=True)
    with Runtime([backend], num_workers=1):
        futures = together(backend, backend.backward_pool, [(rows(1), rows(1))] * 8)
        for future in futures:
            with pytest.raises(ZeroDivisionError, match="in the middle"):
                future.result(LONG)
    assert len(steps) == len(backend.recorded["backward"]) == 1
