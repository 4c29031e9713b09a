"""Tests of bugs that were found and fixed in requests, pools and runtimes. Docstrings describe the bugs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import io
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from limits import LONG
from torch import nn

from pymoe.runtime import (
    BatchTensorProto,
    ExpertBackend,
    ExpertClient,
    NonFiniteGradientError,
    Runtime,
    TaskPool,
    as_completed,
    nested_pack,
)
from pymoe.runtime.client import detached, overlap
from pymoe.runtime.expert_device import ExpertDevice
from pymoe.runtime.monitoring.statistics import ServedPools, StatsReader
from pymoe.runtime.numbered import numbered_backward_pool
from pymoe.runtime.top import drawing


class Asks(nn.Module):
    """A module that uses a layer, and also calls a served expert that consists of the same layer."""

    def __init__(self, layer: nn.Module, backend: ExpertBackend) -> None:
        super().__init__()
        self.layer, self.client = layer, ExpertClient(backend)

    def forward(self, x: torch.Tensor) -> Any:
        return self.client(self.layer(x))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_expert_asks_one_that_it_shares_parameters_with(workers: int) -> None:
    """The outer pass held the parameters' lock while it waited, and the worker that ran the inner pass waited for that
    lock: both hung for ever, and so did the shutdown. With one worker there was no hang, since it held the lock itself.
    """
    layer = nn.Linear(4, 4)
    inner = ExpertBackend(
        "inner", nn.Sequential(layer), torch.optim.SGD(layer.parameters(), 0.0), args_schema=[BatchTensorProto(4)]
    )
    outer = ExpertBackend(
        "outer", Asks(layer, inner), args_schema=[BatchTensorProto(4)], outputs_schema=BatchTensorProto(4)
    )
    x = torch.randn(1, 4)
    with torch.no_grad():
        want = layer(layer(x))
    wrong: list[Any] = []

    def ask() -> None:
        for _ in range(50):
            (got,) = outer.forward_pool.submit_task(x).result(LONG)
            inner.backward_pool.submit_task(x, x).result(LONG)
            if not torch.allclose(got, want):
                wrong.append(got)

    with Runtime([inner, outer], num_workers=workers):
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LONG)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("count", [2, 3])
def test_pools_that_wait_for_each_other_say_so(count: int) -> None:
    """Batches of two pools that each waited for the other pool hung for ever, and so did the shutdown."""
    together = threading.Barrier(count)
    pools: list[TaskPool] = []

    def asking(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def ask(x: torch.Tensor) -> torch.Tensor:
            if not x.any():
                return x
            together.wait(LONG)
            answer: torch.Tensor = pools[(number + 1) % count].submit_task(torch.zeros(1, 1)).result()
            return answer + x

        return ask

    pools += [TaskPool(asking(number), name=f"pool {number}", linger=0) for number in range(count)]
    with Runtime(pools, num_workers=count):
        futures = [pool.submit_task(torch.ones(1, 1)) for pool in pools]
        errors = [error for future in futures if (error := future.exception(LONG)) is not None]
    assert len(errors) == 1  # after one request failed, the others can continue
    assert isinstance(errors[0], RuntimeError)
    assert all(f"'pool {number}'" in str(errors[0]) for number in range(count))


class Shares(nn.Module):
    """A module that returns the same features twice, in two halves, and a part of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.zeros(16, 4))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        left, right = self.layer(2 * x).chunk(2, -1)
        return y, y.view(len(y), 2, 2), left, right, self.table.detach()[: len(x)]


def test_outputs_in_the_same_memory() -> None:
    """Each output was detached separately, so autograd did not know that two outputs shared memory: after an in-place
    edit of one, the gradient of the other was computed with old values. An edit of a returned part of a parameter
    changed the server's parameter.
    """
    expert = Shares()
    backend = ExpertBackend(
        "shares", expert, torch.optim.SGD(expert.parameters(), 0.0), args_schema=[BatchTensorProto(4)]
    )
    x = torch.randn(2, 4, requires_grad=True)
    with Runtime([backend]):
        client = ExpertClient(backend)
        whole, halves, *_ = client(x)
        whole.mul_(3)
        with pytest.raises(RuntimeError, match="modified inplace"):
            (whole * halves.flatten(1)).sum().backward()

        _, _, left, right, part = client(x)
        left.mul_(3)
        (left * right).sum().backward()
        found, x.grad = x.grad, None
        _, _, left, right, _ = expert(x)
        (3 * left * right).sum().backward()
        torch.testing.assert_close(found, x.grad)

        part.add_(5)
        assert not expert.table.any()
        with torch.inference_mode():
            client(x)[-1].add_(5)
        assert not expert.table.any()


def test_gradients_in_the_same_memory() -> None:
    """An expert that is not trained and adds its inputs had one gradient for both. Autograd keeps the tensor it gets as
    ``.grad`` and adds the next gradient to it in place: every gradient of either input counted for both.
    """

    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    backend = ExpertBackend("adds", Adds(), args_schema=[BatchTensorProto(2), BatchTensorProto(2)])
    x, y = torch.ones(1, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    with Runtime([backend]):
        client = ExpertClient(backend)
        client(x, y).sum().backward()
        client(x, torch.ones(1, 2)).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.tolist() == [[2.0, 2.0]]
    assert y.grad.tolist() == [[1.0, 1.0]]


def test_a_shutdown_before_start_has_returned_ends_run() -> None:
    """``start`` discarded an earlier shutdown, so ``run`` waited for another one, and ``ready`` stayed set."""
    runtime = Runtime(TaskPool(lambda x: x, name="pool"))
    runtime._observers.start = runtime.shutdown  # type: ignore[method-assign]
    runs = threading.Thread(target=runtime.run, daemon=True)
    runs.start()
    runs.join(LONG)
    assert not runs.is_alive()
    assert not runtime.ready.is_set()


def test_outputs_in_one_memory_that_read_it_otherwise() -> None:
    """Each output became a view of the first, with its dtype and sign: values were wrong, or an internal error was
    raised.
    """
    pairs = (
        (torch.view_as_real, torch.tensor([1 + 2j, 3 - 1j])),
        (torch.conj, torch.tensor([1 + 2j, 3 - 1j])),
        (lambda x: x.view(torch.int32), torch.ones(2, 3)),
        (lambda x: x.view(torch.int16)[1:, 2:], torch.ones(2, 3)),
    )
    for read, x in pairs:
        first, other = detached((x, read(x)))
        assert torch.equal(first, x)
        assert other.dtype == read(x).dtype
        assert torch.equal(other, read(x))
        assert overlap(x, read(x))
    assert not overlap(torch.ones(8)[:2], torch.ones(8)[:2].view(torch.int16))
    x = torch.zeros(8)
    assert overlap(x[6:], x.view(torch.float64)[3:])
    assert not overlap(x[6:], x.view(torch.float64)[:3])


def test_rows_in_the_same_memory() -> None:
    """A function that returned one row expanded for all gave its clients the same memory to change."""
    pool = TaskPool(lambda x: x.sum(0, keepdim=True).expand(len(x), -1), name="sums", min_batch_size=3, linger=0)
    futures = [pool.submit_task(torch.ones(1, 2)) for _ in range(3)]
    with Runtime([pool]):
        first, *others = [future.result() for future in futures]
        first.zero_()
        assert all(other.tolist() == [[3.0, 3.0]] for other in others)


def test_a_backend_that_overrides_backward_has_its_gradients_cleared() -> None:
    """Only the backend's own backward pass cleared gradients. A backward pass in the style of older packages, which
    calls ``apply_gradients`` itself, added up the gradients of all its batches.
    """

    class Own(ExpertBackend):
        def backward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            (args, kwargs), grads = nested_pack(inputs, self.backward_schema)
            leaves = [x.detach().requires_grad_() for x in args]
            with torch.enable_grad():
                torch.autograd.backward(self.expert(*leaves, **kwargs), grads)
            self.apply_gradients()
            return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)

    expert = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(expert.weight)
    backend = Own("own", expert, torch.optim.SGD(expert.parameters(), 1.0), args_schema=[BatchTensorProto(1)])
    with Runtime([backend]):
        for step in range(1, 4):
            backend.backward_pool.submit_task(torch.ones(1, 1), torch.ones(1, 1)).result()
            assert expert.weight.item() == -step
    assert backend.updates == 3


def test_as_completed_keeps_nothing() -> None:
    """Every future that was handed out stayed alive to the end, and so did the batch that its result is a view of."""
    pool = TaskPool(lambda x: x, name="pool", max_batch_size=1)
    with Runtime([pool]):
        futures = [pool.submit_task(torch.ones(1, 1)) for _ in range(20)]
        seen = []
        ended = as_completed(futures, LONG)
        del futures
        for future in ended:
            future.result()
            seen.append(weakref.ref(future))
            del future
            assert seen[-1]() is None
    assert len(seen) == 20


@pytest.mark.parametrize("end", ["shutdown", "remove", "cancel"])
def test_a_request_of_many_batches_can_be_ended(end: str) -> None:
    """A request that had begun could not be cancelled, and a shutdown without draining ran all its thousand batches."""
    begun, go = threading.Event(), threading.Event()
    ran: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        ran.append(len(x))
        begun.set()
        go.wait(LONG)
        return x

    pool = TaskPool(run, name="pool", max_batch_size=1)
    runtime = Runtime([pool], num_workers=1)
    runtime.start()
    try:
        future = pool.submit_task(torch.ones(1000, 1))
        assert begun.wait(LONG)
        ways: dict[str, Callable[[], Any]] = {
            "shutdown": lambda: runtime.shutdown(drain=False),
            "remove": lambda: runtime.remove(pool, drain=False),
            "cancel": future.cancel,
        }
        ender = threading.Thread(target=ways[end])
        ender.start()
        while pool._statistics()["queued"]:
            time.sleep(0.001)
        go.set()
        ender.join(LONG)
        with pytest.raises(CancelledError):
            future.result(LONG)
        assert future.cancelled()
        assert len(ran) == 1
        counts = pool._statistics()
        assert (counts["cancelled"], counts["running"], counts["queued_rows"], counts["failed"]) == (1, 0, 0, 0)
        if end == "cancel":
            assert pool(torch.ones(1, 1)).item() == 1
    finally:
        runtime.shutdown()


def test_rows_without_elements_are_bounded() -> None:
    """A tensor of 2**40 rows without elements takes no memory, but it kept a pool busy for ever."""
    pool = TaskPool(lambda x: x, name="pool")
    with Runtime([pool]):
        assert pool(torch.empty(4096, 0)).shape == (4096, 0)
        with pytest.raises(ValueError, match="at most max_batch_size rows"):
            pool.submit_task(torch.empty(2**40, 0))


def test_a_copy_without_memory_is_a_memory_error() -> None:
    """When there was no memory for a contiguous copy of a tensor, the error said that the tensor had no strides."""
    pool = TaskPool(lambda x: x, name="pool")
    with pytest.raises(MemoryError, match="tensor 0"):
        pool.submit_task(torch.ones(1, 1).expand(2**32, 2**20))


def test_shutdown_from_two_threads_with_a_monitor(tmp_path: Path) -> None:
    """Both threads removed the monitor's socket, and the second one found None in its place."""
    for _ in range(20):
        runtime = Runtime([TaskPool(lambda x: x, name="pool")], monitor=tmp_path / "monitor")
        runtime.start()
        together = threading.Barrier(3)
        errors: list[BaseException] = []

        def end(runtime: Runtime = runtime, together: Any = together, errors: list[BaseException] = errors) -> None:
            together.wait(LONG)
            try:
                runtime.shutdown()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=end) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        assert not errors
        assert not list((tmp_path / "monitor").iterdir())


def test_a_monitor_outlives_a_lack_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the system ran out of file descriptors for a new connection, the monitor's thread ended."""
    refused = threading.Event()
    accept = socket.socket.accept

    def fail_once(listener: socket.socket) -> Any:
        if not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    runtime = Runtime([TaskPool(lambda x: x, name="pool")], monitor=tmp_path / "monitor")
    with runtime, socket.socket(socket.AF_UNIX) as viewer:
        viewer.settimeout(LONG)
        viewer.connect(str(runtime._observers.socket))
        viewer.sendall(b"\n")
        assert b'"pool"' in viewer.recv(1 << 16)
    assert refused.is_set()


def test_a_request_serves_as_a_future_of_the_standard_library() -> None:
    """``asyncio.wrap_future`` and ``concurrent.futures.wait`` refused futures of requests: the futures lacked the type
    and the lock that these functions use.
    """
    pool = TaskPool(lambda x: x / x.sum().item(), name="pool", max_batch_size=1)
    one, zero = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    futures = [pool.submit_task(one) for _ in range(10)]
    assert isinstance(futures[0], concurrent.futures.Future)
    assert isinstance(futures[0], type(futures[0]))
    assert repr(futures[0]) == "<RequestFuture of pool 'pool': pending>"
    cancelled = pool.submit_task(one)
    done, waiting = concurrent.futures.wait([*futures, cancelled], 0.01)
    assert not done
    assert len(waiting) == 11
    cancelled.cancel()
    assert repr(cancelled) == "<RequestFuture of pool 'pool': cancelled>"
    assert concurrent.futures.wait([*futures, cancelled], LONG, "FIRST_COMPLETED").done == {cancelled}
    failing = TaskPool(lambda x: x.no_such_thing, name="failing")
    with Runtime([pool, failing]):
        bad = failing.submit_task(zero)
        mixed = [*futures, cancelled, bad, *(pool.submit_task(one) for _ in range(10))]
        assert set(concurrent.futures.as_completed(mixed, LONG)) == set(mixed)
        assert concurrent.futures.wait(mixed, LONG).done == set(mixed)
        more = [pool.submit_task(one) for _ in range(100)]
        assert concurrent.futures.wait(more, LONG).done == set(more)
        assert repr(bad) == "<RequestFuture of pool 'failing': failed>"

        async def wrap() -> Any:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wrap_future(cancelled)
            with pytest.raises(CancelledError):
                await cancelled
            return await asyncio.gather(asyncio.wrap_future(pool.submit_task(one)), pool.submit_task(one))

        assert asyncio.run(wrap()) == [one, one]


def test_who_waits_for_an_idle_pool_is_told() -> None:
    """Waiting for a result of a pool that no runtime served lasted for ever, without any message."""
    pool = TaskPool(lambda x: x, name="idle pool")
    future = pool.submit_task(torch.ones(1, 1))
    with pytest.raises(TimeoutError, match="no Runtime serves the pool 'idle pool'"):
        future.result(0.01)
    told = threading.Event()
    served = Runtime([pool])

    def serve() -> None:
        assert told.wait(LONG)
        served.start()

    server = threading.Thread(target=serve)
    server.start()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: (messages.append(str(message)), told.set())[0]  # type: ignore[assignment]
        messages: list[str] = []
        assert future.result().item() == 1
    server.join(LONG)
    served.shutdown()
    assert len(messages) == 1
    assert "'idle pool'" in messages[0]
    assert "Runtime([pool])" in messages[0]


def test_top_says_once_that_there_is_nothing() -> None:
    """Without a terminal, the line saying that there is no runtime was repeated every second for ever."""
    written = io.StringIO()
    with drawing(written) as draw:
        for _ in range(3):
            draw([])
    assert len(written.getvalue().splitlines()) == 1


def test_numbers_are_shown_in_a_line() -> None:
    """The repr of a runtime was an address, and its statistics printed pages of buckets."""
    pool = TaskPool(lambda x: x, name="pool")
    with Runtime([pool]) as runtime:
        pool(torch.ones(1, 1))
        shown = repr(runtime.stats()["pool"])
        assert repr(runtime) == "<Runtime of pool: running, num_workers=1>"
    assert shown.startswith("<PoolStats of pool: 0 queued")
    assert len(shown) < 120


def test_a_penalty_of_gradients_does_not_lose_the_experts_part() -> None:
    """With ``create_graph=True``, gradients of a client's inputs had no history if those of its outputs had none, as
    under a sum: the second derivative of the expert was left out of a penalty, silently.
    """
    expert = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    backend = ExpertBackend("expert", expert, args_schema=[BatchTensorProto(4)])
    x = torch.randn(3, 4, requires_grad=True)
    with Runtime([backend]):
        (gradient,) = torch.autograd.grad(ExpertClient(backend)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"a served expert: its backward pass cannot be differentiated again"):
        (gradient + x).square().sum().backward()


def test_a_request_that_its_pool_ended_says_that_no_runtime_serves_the_pool() -> None:
    """Client and pool both watch a request's time limit. If the client asked after the pool's limit, which is some
    microseconds later, the pool ended the request, and its error did not say that no runtime was there.
    """
    client = ExpertClient(ExpertBackend("expert", nn.Linear(4, 4), args_schema=[BatchTensorProto(4)]), timeout=0.01)
    call = client.submit(torch.ones(1, 4))
    time.sleep(0.05)
    with pytest.raises(TimeoutError, match="had not started in time; no Runtime serves the pool"):
        call.result()


def test_a_callback_waits_for_a_request_that_expires_together_with_its_own() -> None:
    """A request's callbacks ran before other requests that expired at the same moment had ended. One that asked for
    the result of such a request waited for ever.
    """
    pool = TaskPool(lambda x: x, name="pool", min_batch_size=8)
    first, second = (pool.submit_task(torch.ones(1, 1), timeout=0.05) for _ in range(2))
    seen: list[BaseException | None] = []
    first.add_done_callback(lambda _: seen.append(second.exception(LONG)))
    second.add_done_callback(lambda _: seen.append(first.exception(LONG)))
    time.sleep(0.1)
    with pytest.raises(TimeoutError, match="had not started in time"):
        first.result()
    assert [type(one) for one in seen] == [TimeoutError, TimeoutError]
    assert all("had not started in time" in str(one) for one in seen)


def test_a_callback_of_an_expired_request_waits_for_the_next_batch() -> None:
    """Requests that had expired were taken from the queue together with a batch, and their callbacks ran before it. One
    that asked for a result of this batch was told that a batch waits for its own expert.
    """
    pool = TaskPool(lambda x: x + 1, name="pool")
    late = pool.submit_task(torch.ones(1, 1), timeout=0.05)
    following = pool.submit_task(torch.ones(1, 1))
    seen: list[Any] = []

    def ask(_: object) -> None:
        try:
            seen.append(following.result(LONG).item())
        except Exception as error:
            seen.append(error)

    late.add_done_callback(ask)
    time.sleep(0.1)
    with Runtime([pool], num_workers=1):
        assert isinstance(late.exception(LONG), TimeoutError)
        assert following.result(LONG).item() == 2
    assert seen == [2]


@pytest.mark.parametrize("count", [1, 2])
def test_a_callback_waits_for_a_request_that_is_cancelled_together_with_its_own(count: int) -> None:
    """``shutdown(drain=False)`` cancelled one request after the other, and ran the callbacks of each in between. One
    that asked for the result of a later one kept the shutdown waiting for ever.
    """
    pools = [TaskPool(lambda x: x, name=f"pool {i}", min_batch_size=8) for i in range(count)]
    runtime = Runtime(pools)
    runtime.start()
    requests = [pool.submit_task(torch.ones(1, 1)) for pool in pools for _ in range(2)]
    seen: list[str] = []

    def ask(_: object) -> None:
        for request in requests:
            try:
                request.result(LONG)
            except (CancelledError, TimeoutError) as error:
                seen.append(type(error).__name__)

    for request in requests:
        request.add_done_callback(ask)
    if count == 1:
        runtime.remove(pools[0], drain=False)
    runtime.shutdown(drain=False)
    assert seen == ["CancelledError"] * len(requests) ** 2


NEGATED: dict[str, Callable[[], torch.Tensor]] = {
    "dense view": lambda: torch.tensor([1 + 2j]).conj().imag.as_strided((2,), (1,), 0),
    "negated": lambda: torch._neg_view(torch.arange(6.0).view(3, 2)),
    "one element": lambda: torch.tensor([[1 + 2j]]).conj().imag,
    "conjugated": lambda: torch.tensor([[1 + 2j], [3 + 4j]]).conj(),
}


@pytest.mark.parametrize("kind", NEGATED)
def test_negated_tensors_of_inference_mode_keep_their_sign(kind: str) -> None:
    """In inference mode, views do not know their base. A dense one of several elements whose memory held the negatives
    of its values was taken for a tensor of its own, and the batch got the negatives, silently.
    """
    pool = TaskPool(lambda x: x.clone(), name="pool")
    with torch.inference_mode():
        x = NEGATED[kind]()
        expected = (x * 1).resolve_neg().resolve_conj()
    with Runtime([pool]):
        for _ in range(2):
            assert torch.equal(pool.submit_task(x).result(LONG), expected)
        with torch.inference_mode():
            assert torch.equal(pool.submit_task(x).result(LONG), expected)


@pytest.mark.parametrize("bad", ["the norm of two batches", "the norm of one batch", "a gradient"])
def test_a_batch_with_which_accumulated_gradients_were_dropped_is_not_run_again(bad: str) -> None:
    """If the norm of the gradients of two batches overflowed, those of the first were dropped, too, but the second
    batch ran again in halves. The halves made the update without the first batch, and nobody saw an error.

    A batch with which nothing else is dropped still runs again in halves, so that only the bad request fails.
    """
    expert = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(expert.weight)
    backend = ExpertBackend(
        "expert",
        expert,
        torch.optim.SGD(expert.parameters(), 1.0),
        args_schema=[BatchTensorProto(2)],
        accumulate_steps=1 if bad == "the norm of one batch" else 2,
        clip_grad_norm=1.0,
        isolate=True,
    )
    one, most = torch.ones(1, 1), torch.finfo(torch.float32).max
    huge = {
        "the norm of two batches": [0.0, 0.9 * most],
        "the norm of one batch": [0.9 * most] * 2,
        "a gradient": [0.0, float("nan")],
    }[bad]
    first = [0.9 * most, 0.0] if bad == "the norm of two batches" else [3.0, 0.0]
    if backend._rule.accumulate_steps == 2:
        backend.backward(torch.tensor([first]), one)
    requests = [backend.backward_pool.submit_task(torch.tensor([x]), one) for x in (huge, [0.0, 4.0])]
    with Runtime([backend]):  # takes both requests as one batch
        errors = [request.exception(LONG) for request in requests]
    assert isinstance(errors[0], NonFiniteGradientError)
    if bad == "the norm of two batches":
        assert errors[1] is errors[0]
        assert "2 batches" in str(errors[0])
        assert expert.weight.tolist() == [[0.0, 0.0]]
    else:
        assert errors[1] is None
        moved = [[-0.6, -0.8]] if bad == "a gradient" else [[0.0, -1.0]]
        torch.testing.assert_close(expert.weight.detach(), torch.tensor(moved))


def test_a_prototype_without_a_layout_is_refused() -> None:
    """``layout=None`` was accepted, although no tensor matches it: every request failed."""
    with pytest.raises(TypeError, match=r"expected layout to be a torch\.layout, got None"):
        BatchTensorProto(3, layout=None)  # type: ignore[arg-type]


def test_the_first_rate_of_an_added_pool_counts_from_its_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests since a pool was added were divided by the seconds since the monitor's previous report, or since its
    start: a pool that was added after an hour showed a few requests per second.
    """
    now = 0.0
    monkeypatch.setattr("pymoe.runtime.monitoring.statistics.time", SimpleNamespace(monotonic=lambda: now))
    old, new = (TaskPool(lambda x: x, name=name) for name in ("old", "new"))
    served = ServedPools([old])
    reader = StatsReader(served)
    now = 3600.0
    served.add([new])
    with Runtime([old, new]):
        for pool in (old, new):
            pool(torch.ones(5, 1))
    now = 3602.0
    stats = reader.read()
    assert (stats["new"].requests_per_second, stats["new"].rows_per_second) == (0.5, 2.5)
    assert stats["old"].requests_per_second == pytest.approx(1 / 3602)


def test_numbered_requests_for_a_gpu_are_gathered_in_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool of a server's backward requests did not have the default of the other pools of an expert on a GPU."""
    backend = ExpertBackend("expert", nn.Linear(4, 4), args_schema=[BatchTensorProto(4)])
    monkeypatch.setattr(ExpertDevice, "device", torch.device("cuda"))
    made = []
    monkeypatch.setattr("pymoe.runtime.numbered.TaskPool", lambda *_, **options: made.append(options["pin_memory"]))
    numbered_backward_pool(backend)
    backend._pool_options["pin_memory"] = False
    numbered_backward_pool(backend)
    assert made == [True, False]
