"""TaskPool: the contents of batches, the form of results, and what is refused."""

from __future__ import annotations

import collections
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

import pytest
import torch
from limits import LONG
from torch import Tensor

from pymoe.runtime import BatchTensorProto, QueueFull, Runtime, TaskPool


def answers(process: Callable[..., Any], *requests: tuple[Tensor, ...], **options: Any) -> list[Any]:
    """Return a pool's answers to requests that were all queued before its runtime started."""
    pool = TaskPool(process, name="pool", **options)
    futures = [pool.submit_task(*tensors) for tensors in requests]
    with Runtime([pool]):
        return [future.result() for future in futures]


# --- batches ---


def test_rows_of_all_requests_reach_the_function_at_once_in_order() -> None:
    seen: list[Tensor] = []

    def process(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return x * 2

    requests = [(torch.randn(rows, 3),) for rows in (2, 1, 0, 4, 1)]
    results = answers(process, *requests)
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.cat([x for (x,) in requests]))
    for (x,), result in zip(requests, results, strict=True):
        assert torch.equal(result, x * 2)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_every_dtype_comes_through_bit_for_bit(dtype: torch.dtype) -> None:
    xs = [torch.randint(0, 2, (rows, 2, 3)).to(dtype) for rows in (1, 3)]
    for x, result in zip(xs, answers(lambda x: x, *[(x,) for x in xs]), strict=True):
        assert result.dtype == dtype
        assert torch.equal(result.view(torch.uint8), x.view(torch.uint8))


def test_several_positions_are_gathered_each_for_itself() -> None:
    requests = [(torch.randn(n, 3), torch.randint(9, (n,)), torch.randn(n, 2, 2)) for n in (1, 5, 2)]
    results = answers(lambda a, b, c: (c, a, b), *requests)
    for (a, b, c), result in zip(requests, results, strict=True):
        assert isinstance(result, tuple)
        assert all(torch.equal(one, other) for one, other in zip(result, (c, a, b), strict=True))


def test_more_positions_than_few() -> None:
    requests = [tuple(torch.full((2, 1), float(10 * n + i)) for i in range(9)) for n in range(3)]
    for tensors, result in zip(requests, answers(lambda *xs: sum(xs), *requests), strict=True):
        assert torch.equal(result, sum(tensors))


def test_requests_of_different_kinds_never_share_a_batch() -> None:
    shapes: list[tuple[torch.Size, torch.dtype]] = []

    def process(x: Tensor) -> Tensor:
        shapes.append((x.shape, x.dtype))
        return x

    requests = [(torch.ones(1, 3),), (torch.ones(1, 4),), (torch.ones(1, 3).double(),), (torch.ones(2, 3),)]
    answers(process, *requests)
    assert sorted(map(str, shapes)) == sorted(
        map(
            str,
            [
                (torch.Size([3, 3]), torch.float32),
                (torch.Size([1, 4]), torch.float32),
                (torch.Size([1, 3]), torch.float64),
            ],
        )
    )


def test_more_shapes_than_are_remembered() -> None:
    requests = [(torch.full((1, 1 + i % 700), float(i)),) for i in range(1400)]
    for (x,), result in zip(requests, answers(lambda x: x + 1, *requests, linger=0), strict=True):
        assert torch.equal(result, x + 1)


ODD: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(5, 3).t(),
    "stepped": lambda: torch.randn(6, 5)[::2],
    "expanded": lambda: torch.randn(1, 5).expand(3, 5),
    "with an offset": lambda: torch.randn(7, 5)[4:],
    "flipped": lambda: torch.randn(3, 5).flip(0),
    "requiring gradients": lambda: torch.randn(3, 5, requires_grad=True),
    "a result with a graph": lambda: torch.randn(3, 5, requires_grad=True) * 2,
    "a parameter": lambda: torch.nn.Parameter(torch.randn(3, 5)),
    "conjugated": lambda: torch.randn(3, 5, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(3, 5, dtype=torch.complex64).conj().imag,
    "negated and contiguous": lambda: torch._neg_view(torch.randn(3, 5)),
    "one negated element": lambda: torch.randn(1, 1, dtype=torch.complex64).conj().imag,
    "empty rows": lambda: torch.randn(3, 0),
    "made in inference mode": lambda: torch.inference_mode()(lambda: torch.randn(3, 5))(),
}


@pytest.mark.parametrize("kind", ODD)
def test_values_count_not_how_they_lie_in_memory(kind: str) -> None:
    x = ODD[kind]()
    first, second = answers(lambda x: x.clone(), (x,), (x,))
    assert torch.equal(first, x.detach().resolve_neg().resolve_conj())
    assert torch.equal(second, first)
    assert not first.requires_grad


class Tagged(torch.Tensor):
    pass


def test_a_subclass_without_a_mind_of_its_own_is_a_tensor() -> None:
    x = torch.randn(2, 3)
    (result,) = answers(lambda x: x + 1, (x.as_subclass(Tagged),))
    assert type(result) is Tensor
    assert torch.equal(result, x + 1)


def test_a_batch_belongs_to_the_function() -> None:
    x, y = torch.ones(2, 3), torch.ones(1, 3)
    for requests in ([(x,)], [(x,), (y,)]):
        for result in answers(lambda x: x.add_(1), *requests):
            assert torch.equal(result, torch.full_like(result, 2.0))
    assert torch.equal(x, torch.ones(2, 3))


def test_results_may_be_changed_in_place_and_are_each_clients_own() -> None:
    results = answers(lambda x: x * 1, (torch.ones(2, 3),), (torch.ones(2, 3),))
    results[0] += 5
    assert torch.equal(results[1], torch.ones(2, 3))


def test_a_batch_may_outlive_everything() -> None:
    kept: list[Tensor] = []

    def process(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    expected = [torch.randn(4, 5) for _ in range(20)]
    for x in expected:
        answers(process, (x,))
    gc.collect()
    assert all(torch.equal(one, other) for one, other in zip(kept, expected, strict=True))


@pytest.mark.parametrize("rows", [7, 8, 9, 20])
def test_a_request_larger_than_a_batch_is_split_and_put_together(rows: int) -> None:
    sizes: list[int] = []

    def process(x: Tensor) -> dict[str, Any]:
        sizes.append(len(x))
        return {"doubled": x * 2, "pair": (x[:, 0], [x.long()]), "what": "constant"}

    x, y = torch.randn(rows, 3), torch.randn(2, 3)
    for request, result in zip((x, y), answers(process, (x,), (y,), max_batch_size=4), strict=True):
        assert torch.equal(result["doubled"], request * 2)
        assert torch.equal(result["pair"][0], request[:, 0])
        assert torch.equal(result["pair"][1][0], request.long())
        assert result["what"] == "constant"
    assert max(sizes) <= 4
    assert sum(sizes) == rows + 2


# --- structures ---


class Pair(NamedTuple):
    left: Any
    right: Any


STRUCTURES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x + 1),
    "one in a tuple": lambda x: (x,),
    "empty tuple": lambda x: (),
    "list": lambda x: [x, None, 3],
    "named tuple": lambda x: Pair(x, {"inner": x - 1}),
    "dict": lambda x: {"b": x, "a": (x, [x])},
    "ordered dict": lambda x: collections.OrderedDict(b=x, a=x + 1),
    "torch's named tuple": lambda x: x.sort(dim=1),
    "none": lambda x: None,
    "text": lambda x: "text",
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_results_mirror_the_output(kind: str) -> None:
    make = STRUCTURES[kind]
    requests = [torch.randn(n, 3) for n in (1, 2, 3)]
    results = answers(make, *[(x,) for x in requests])
    for x, result in zip(requests, results, strict=True):
        expected = make(x)
        assert type(result) is type(expected)
        torch.testing.assert_close(result, expected, rtol=0, atol=0) if kind not in ("text", "none") else None
        assert str(result) == str(expected)


def test_a_structure_that_holds_itself_is_refused() -> None:
    def process(x: Tensor) -> list[Any]:
        endless: list[Any] = []
        endless.append(endless)
        return endless

    with pytest.raises(RecursionError):
        answers(process, (torch.ones(1, 1),), (torch.ones(1, 1),))


@pytest.mark.parametrize("process", [lambda x: x[:-1], lambda x: x.sum(), lambda x: (x, torch.cat([x, x]))])
def test_an_output_with_the_wrong_number_of_rows_is_an_error(process: Callable[[Tensor], Any]) -> None:
    for requests in ([(torch.ones(2, 3),)], [(torch.ones(2, 3),), (torch.ones(1, 3),)]):
        with pytest.raises(ValueError, match=r"TaskPool 'pool': the output for a batch of \d rows has shape"):
            answers(process, *requests)


def test_gradients_may_flow_from_a_result_to_the_functions_own_tensors() -> None:
    weight = torch.ones(3, requires_grad=True)
    first, second = answers(lambda x: x * weight, (torch.ones(2, 3),), (torch.ones(1, 3),))
    second.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(3))
    assert first.requires_grad


# --- refusals ---


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_part_of_a_batch_is_refused() -> None:
    pool = TaskPool(lambda x: x, name="pool")
    x = torch.randn(2, 3)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2, 3)
    sparse = x.to_sparse()
    quantised = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    for bad in (3, None, [x], x.numpy(), sparse, quantised, torch.ones(2, 3, device="meta"), fake):
        with pytest.raises(TypeError, match="TaskPool 'pool'"):
            pool.submit_task(bad)
        with pytest.raises(TypeError, match=r"(argument|tensor) 1"):
            pool.submit_task(x, bad)
    with pytest.raises(TypeError, match="TaskPool 'pool'"):
        torch.vmap(lambda y: pool.submit_task(y) and y)(x)
    with pytest.raises(ValueError, match="at least one tensor"):
        pool.submit_task()
    with pytest.raises(ValueError, match="no dimension of rows"):
        pool.submit_task(torch.ones(()))
    with pytest.raises(ValueError, match="as many rows as the first, 2, got 3 in tensor 1"):
        pool.submit_task(x, torch.ones(3))
    with pytest.raises(TypeError, match="timeout and priority"):
        pool.submit_task(x, colour=3)
    with pytest.raises(TypeError):
        pool.submit_task(x, timeout="soon")
    for options in ({"timeout": float("nan")}, {"priority": float("inf")}, {"priority": float("nan")}):
        with pytest.raises(ValueError, match="number of seconds"):
            pool.submit_task(x, **options)
    assert pool._statistics()["submitted"] == 0


def test_a_schema_is_checked_when_a_request_is_submitted() -> None:
    pool = TaskPool(lambda x, y: x, name="pool", schema=(BatchTensorProto(3), BatchTensorProto(dtype=torch.int64)))
    x, y = torch.ones(2, 3), torch.ones(2, dtype=torch.int64)
    pool.submit_task(x, y)
    with pytest.raises(ValueError, match="schema expects 2 tensors, got 1"):
        pool.submit_task(x)
    with pytest.raises(ValueError, match=r"tensor 0: expected shape \(rows, 3\) by the schema, got \(2, 4\)"):
        pool.submit_task(torch.ones(2, 4), y)
    with pytest.raises(ValueError, match=r"tensor 1: expected shape \(rows,\) by the schema, got \(2, 1\)"):
        pool.submit_task(x, y[:, None])
    with pytest.raises(TypeError, match="tensor 1: expected dtype int64 by the schema, got float32"):
        pool.submit_task(x, y.float())
    assert pool._statistics()["submitted"] == 1


@pytest.mark.parametrize(
    "options",
    [
        {"min_batch_size": 0},
        {"max_batch_size": 0},
        {"min_batch_size": 5, "max_batch_size": 4},
        {"capacity": 0},
        {"timeout": -1.0},
        {"timeout": float("nan")},
        {"request_timeout": float("nan")},
        {"linger": -0.1},
        {"priority": float("nan")},
        {"on_full": "explode"},
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="TaskPool"):
        TaskPool(lambda x: x, name="pool", **options)


def test_misuse() -> None:
    with pytest.raises(TypeError, match="must be callable, got int"):
        TaskPool(3, name="pool")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="called twice"):
        TaskPool.__init__(TaskPool(len, name="pool"), len, name="pool")
    with pytest.raises(RuntimeError, match="__init__ was not called"):
        TaskPool.__new__(TaskPool).submit_task(torch.ones(1))
    with pytest.raises(TypeError, match="exclusive_with must be a TaskPool"):
        TaskPool(len, name="pool", exclusive_with=3)  # type: ignore[arg-type]


# --- queues ---


def test_a_full_pool_raises_if_asked_to() -> None:
    pool = TaskPool(lambda x: x, name="pool", capacity=100, on_full="raise")
    futures = [pool.submit_task(torch.ones(1)) for _ in range(100)]
    for _ in range(900):
        with pytest.raises(QueueFull, match="capacity 100"):
            pool.submit_task(torch.ones(1))
    assert pool._statistics()["rejected"] == 900
    with Runtime([pool]):
        assert all(future.result() == 1 for future in futures)


def test_a_full_pool_blocks_until_there_is_room() -> None:
    pool = TaskPool(lambda x: x + 1, name="pool", capacity=3)
    results: list[float] = []

    def client() -> None:
        results.extend(float(pool.submit_task(torch.full((1,), float(i))).result()) for i in range(20))

    clients = [threading.Thread(target=client) for _ in range(8)]
    for thread in clients:
        thread.start()
    with Runtime([pool]):
        for thread in clients:
            thread.join(LONG)
    assert sorted(results) == sorted([i + 1.0 for i in range(20)] * 8)


def test_a_requests_timeout_counts_while_it_waits_for_room() -> None:
    pool = TaskPool(lambda x: x, name="pool", capacity=1)
    first = pool.submit_task(torch.ones(1))
    late = pool.submit_task(torch.ones(1), timeout=0.01)
    with pytest.raises(TimeoutError, match="no room"):
        late.result()
    assert pool._statistics()["rejected"] == 1
    with Runtime([pool]):
        assert first.result() == 1


def test_a_request_that_has_not_started_in_time_never_runs() -> None:
    ran: list[Tensor] = []
    pool = TaskPool(ran.append, name="pool")
    late = pool.submit_task(torch.ones(1), timeout=0.01)
    with pytest.raises(TimeoutError, match="had not started in time"):
        late.result()
    with Runtime([pool]):
        pass
    assert not ran


def test_fewer_rows_than_the_least_run_when_the_pools_timeout_is_over() -> None:
    pool = TaskPool(lambda x: x, name="pool", min_batch_size=4, timeout=0.02)
    with Runtime([pool]):
        assert pool(torch.ones(1)) == 1


def test_exclusive_pools_never_overlap() -> None:
    inside = 0
    worst = 0

    def process(x: Tensor) -> Tensor:
        nonlocal inside, worst
        inside += 1
        worst = max(worst, inside)
        time.sleep(0.001)
        inside -= 1
        return x

    first = TaskPool(process, name="first", max_batch_size=1)
    second = TaskPool(process, name="second", max_batch_size=1, exclusive_with=first)
    futures = [pool.submit_task(torch.ones(1)) for _ in range(20) for pool in (first, second)]
    with Runtime([first, second], num_workers=3):
        for future in futures:
            future.result(LONG)
    assert worst == 1


def test_calling_a_pool_submits_and_waits() -> None:
    pool = TaskPool(lambda x: x + 1, name="pool")
    with Runtime([pool]):
        assert torch.equal(pool(torch.zeros(2, 2), timeout=LONG, priority=1.0), torch.ones(2, 2))


def test_a_pool_may_be_asked_from_a_batch_of_another() -> None:
    inner = TaskPool(lambda x: x + 1, name="inner")
    outer = TaskPool(lambda x: inner(x) * 2, name="outer")
    with Runtime([outer, inner], num_workers=1):
        futures = [outer.submit_task(torch.ones(1)) for _ in range(50)]
        assert all(future.result(LONG) == 4 for future in futures)


def test_a_batch_cannot_wait_for_its_own_pool() -> None:
    pool = TaskPool(lambda x: pool(x), name="pool")
    with Runtime([pool]), pytest.raises(RuntimeError, match="waits for its own expert"):
        pool(torch.ones(1))


# --- objects ---


class Owner:
    def __init__(self) -> None:
        self.pool = TaskPool(self.process, name="pool")

    def process(self, x: Tensor) -> Tensor:
        return x


def test_an_owner_and_its_pool_are_collected_together() -> None:
    owner = Owner()
    with Runtime([owner.pool]):
        assert owner.pool(torch.ones(1)) == 1
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None


def test_requests_of_a_collected_pool_end_with_an_error() -> None:
    owner = Owner()
    future = owner.pool.submit_task(torch.ones(1))
    del owner
    gc.collect()
    with pytest.raises(CancelledError, match="its pool has gone"):
        future.result()


def test_inputs_and_results_are_freed() -> None:
    pool = TaskPool(lambda x: x, name="pool")
    x = torch.ones(2, 3)
    alive = weakref.ref(x)
    with Runtime([pool]):
        future = pool.submit_task(x)
        future.result()
        del x
        assert alive() is None
        result = weakref.ref(future.result())
        del future
        assert result() is None
        pool.submit_task(torch.ones(1))  # the future is dropped at once
    assert pool._statistics()["completed"] == 2
