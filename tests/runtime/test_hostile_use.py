"""Misuse by clients and functions raises an error, and never affects the process or other clients' results."""

from __future__ import annotations

import concurrent.futures
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from limits import LONG
from torch import Tensor

from pymoe.runtime import Runtime, TaskPool


def run_in_a_process_of_its_own(body: str) -> str:
    """Return the script's output; it must not crash."""
    preamble = "import torch\nfrom pymoe.runtime import Runtime, TaskPool\n"
    done = subprocess.run([sys.executable, "-c", preamble + body], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    return done.stdout.strip()


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize(
    "change",
    [
        "x.data = torch.empty(0, 16)",
        "x.data = torch.zeros_like(x)",
        "x.resize_(1 << 21, 16)",
        "x.untyped_storage().resize_(0)",
        "x.set_()",
    ],
)
def test_memory_that_is_taken_away_before_the_batch_is_an_error_and_no_crash(change: str) -> None:
    assert "changed its memory" in run_in_a_process_of_its_own(
        f"""
pool = TaskPool(lambda x: x * 2, name="pool")
x = torch.ones(1 << 20, 16)
future = pool.submit_task(x)
{change}
with Runtime([pool], num_workers=1):
    print(repr(future.exception(timeout=300)))
"""
    )


@pytest.mark.parametrize("change", [lambda x: x.t_(), lambda x: x.resize_(2, 4), lambda x: x.resize_(3, 4)])
@pytest.mark.parametrize("rows", [1, 1 << 16])
def test_only_the_request_whose_tensor_changed_fails_where_requests_are_isolated(
    change: Callable[[Tensor], Any], rows: int
) -> None:
    pool = TaskPool(lambda x: x + 1, name="pool", isolate=True)
    changed = torch.arange(16.0).view(4, 4)
    futures = [pool.submit_task(tensor) for tensor in (torch.ones(rows, 4), changed, torch.full((2, 4), 2.0))]
    change(changed)
    with Runtime([pool]):
        with pytest.raises(RuntimeError, match=r"TaskPool 'pool': .* changed its memory or its shape"):
            futures[1].result(timeout=300)
        assert torch.equal(futures[0].result(timeout=300), torch.full((rows, 4), 2.0))
        assert torch.equal(futures[2].result(timeout=300), torch.full((2, 4), 3.0))


def test_tensors_that_nobody_touched_are_not_taken_for_changed() -> None:
    pool = TaskPool(lambda x, y: (x, y), name="pool")
    inputs = [
        (torch.ones(2, 3).t(), torch.ones(3, 1)),
        (torch.ones(1, 2), torch.ones(1, 1)),
        (torch.ones(0, 2), torch.ones(0, 1)),
        (torch.ones(2, 2, requires_grad=True), torch.nn.Parameter(torch.ones(2, 1))),
        (torch.ones(4, 2)[1:3], torch.complex(torch.zeros(2, 1), -torch.ones(2, 1)).conj().imag),
    ]
    futures = [pool.submit_task(x, y) for x, y in inputs]
    with Runtime([pool]):
        for (x, y), future in zip(inputs, futures, strict=True):
            got_x, got_y = future.result(timeout=300)
            assert torch.equal(got_x, x)
            assert torch.equal(got_y, y)


def test_a_large_request_whose_parts_do_not_fit_together_fails_alone() -> None:
    # The function's first batch is the large request's first slice, to which the last slice's result cannot be
    # appended.
    assert (
        run_in_a_process_of_its_own(
            """
import threading
started, go = threading.Event(), threading.Event()
calls = []
def function(x):
    calls.append(len(x))
    if len(calls) > 1:
        return {"b": x}
    started.set()
    go.wait()
    return {"a": x}
pool = TaskPool(function, name="pool", max_batch_size=1 << 14, isolate=True, linger=0.0)
with Runtime([pool], num_workers=1):
    large = pool.submit_task(torch.ones((1 << 14) + 10, 64))
    started.wait()
    others = [pool.submit_task(torch.full((3000, 64), float(i)), priority=100.0) for i in range(3)]
    go.set()
    for i, other in enumerate(others):
        assert torch.equal(other.result(timeout=300)["b"], torch.full((3000, 64), float(i)))
    print(type(large.exception(timeout=300)).__name__)
"""
        )
        == "KeyError"
    )


def test_a_slice_that_is_run_again_counts_once() -> None:
    def function(x: Tensor) -> Tensor:
        if len(x) > 1 and x[-1, 0] < 0 <= x[0, 0]:
            raise ValueError("mixed")
        return x * 2

    pool = TaskPool(function, name="pool", max_batch_size=4, isolate=True)
    large, negative = torch.arange(10.0).view(10, 1), -torch.ones(1, 1)
    futures = [pool.submit_task(large), pool.submit_task(negative)]
    with Runtime([pool]):
        assert torch.equal(futures[0].result(timeout=300), large * 2)
        assert torch.equal(futures[1].result(timeout=300), negative * 2)


def test_finalizers_that_submit_while_a_request_is_refused_do_not_hang() -> None:
    assert (
        run_in_a_process_of_its_own(
            """
import faulthandler, gc
from pymoe.runtime import BatchTensorProto
faulthandler.dump_traceback_later(60, exit=True)
pool = TaskPool(lambda x: x, name="pool", schema=(BatchTensorProto(4),), capacity=100_000)
good, bad = torch.ones(1, 4), torch.ones(1, 5)
class Submits:
    def __del__(self):
        pool.submit_task(good)
for _ in range(300):
    for _ in range(3):
        cycle = Submits()
        cycle.me = cycle
    try:
        raise KeyError
    except KeyError:
        gc.set_threshold(1)
        try:
            pool.submit_task(bad)
        except ValueError:
            pass
        gc.set_threshold(700)
print("done")
"""
        )
        == "done"
    )


class OddItems(dict[str, Tensor]):
    def items(self) -> Any:
        return [1, 2, 3]


class OddShape(Tensor):
    @property
    def shape(self) -> Any:
        return [int(self.size(0))]

    @shape.setter
    def shape(self, value: Any) -> None:
        raise AttributeError


class OddRows(Tensor):
    @property
    def shape(self) -> Any:
        return ("two",)

    @shape.setter
    def shape(self, value: Any) -> None:
        raise AttributeError


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda x: OddItems(a=x), TypeError),
        (lambda x: x.as_subclass(OddShape), TypeError),
        (lambda x: x.as_subclass(OddRows), ValueError),
    ],
    ids=["items", "shape", "rows"],
)
def test_outputs_that_lie_about_themselves_are_errors(function: Callable[[Tensor], Any], error: type) -> None:
    pool = TaskPool(function, name="pool")
    futures = [pool.submit_task(torch.ones(1, 4)) for _ in range(2)]
    with Runtime([pool]):
        for future in futures:
            with pytest.raises(error, match="TaskPool 'pool': "):
                future.result(timeout=300)


def test_a_list_that_shrinks_while_it_is_cut_is_cut_as_it_was() -> None:
    output: list[Any] = []

    class Clears(tuple[Any, ...]):
        def __new__(cls, values: Any) -> Any:
            output.clear()
            gc.collect()
            return tuple.__new__(cls, values)

    def function(x: Tensor) -> list[Any]:
        output[:] = [tuple.__new__(Clears, (x,)), *[x + 1 for _ in range(1000)]]
        return output

    pool = TaskPool(function, name="pool")
    futures = [pool.submit_task(torch.full((1, 4), float(i))) for i in range(2)]
    with Runtime([pool]):
        for i, future in enumerate(futures):
            result = future.result(timeout=300)
            assert len(result) == 1001
            assert torch.equal(result[-1], torch.full((1, 4), i + 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_tensors_without_memory_of_their_own_are_refused_at_submit(dtype: torch.dtype) -> None:
    pool = TaskPool(lambda x: x, name="pool")
    with pytest.raises(TypeError, match="TaskPool 'pool': tensor 1 "):
        pool.submit_task(torch.ones(2, 3), torch.ones(2, 3, device="meta", dtype=dtype))


def test_the_error_is_how_the_request_ended_and_not_what_an_earlier_run_raised() -> None:
    # The batch of two raises ValueError. Then the main thread, which helps, is interrupted in the halves, and the
    # requests return to the queue, where the runtime's end finds them.
    main = threading.get_ident()
    busy, go, may_run = threading.Event(), threading.Event(), threading.Event()

    def function(x: Tensor) -> Tensor:
        if threading.get_ident() != main:
            may_run.wait(300)
            return x
        if len(x) > 1:
            raise ValueError("two rows")
        raise KeyboardInterrupt

    def block(x: Tensor) -> Tensor:
        busy.set()
        go.wait(300)
        return x

    pool = TaskPool(function, name="pool", isolate=True, min_batch_size=2)
    blocker = TaskPool(block, name="blocker")
    runtime = Runtime([pool, blocker], num_workers=1)
    runtime.start()
    stopper = threading.Thread(target=runtime.shutdown, kwargs={"drain": False})
    try:
        blocker.submit_task(torch.ones(1, 1))
        assert busy.wait(300)
        futures = [pool.submit_task(torch.ones(1, 1)) for _ in range(2)]
        with pytest.raises(KeyboardInterrupt):
            futures[0].result()
        stopper.start()
        for future in futures:
            with pytest.raises(concurrent.futures.CancelledError):
                future.result(timeout=300)
    finally:
        go.set()
        may_run.set()
        runtime.shutdown(drain=False)
        if stopper.ident is not None:
            stopper.join(300)
