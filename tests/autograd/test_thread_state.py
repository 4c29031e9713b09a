"""Tests that a call on any thread sees the state of the map's caller, and leaves no trace of it on that thread."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from limits import LONG
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pymoe.autograd.thread_state import current, in_state
from pymoe.runtime import map_with_parallel_backward, parallel_workers, run_in_background

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")


class CountingFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads.add(threading.get_ident())
        return func(*args, **(kwargs or {}))


class CountingOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads.add(threading.get_ident())
        return func(*args, **(kwargs or {}))


@contextmanager
def setting(set_it: Callable[[Any], Any], inside: Any, outside: Any) -> Iterator[None]:
    set_it(inside)
    try:
        yield
    finally:
        set_it(outside)


def same(tensor: Any) -> Any:
    return tensor


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "no forward-mode gradients": lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False),
    "no multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "view replay": lambda: torch.autograd._force_original_view_tracking(True),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16, uncached": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "autocast's dtype": lambda: setting(
        lambda dtype: torch.set_autocast_dtype("cpu", dtype), torch.float16, torch.bfloat16
    ),
    "device": lambda: torch.device("meta"),
    "default device": lambda: setting(torch.set_default_device, "meta", None),
    "default dtype": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "function mode": CountingFunctions,
    "two function modes": lambda: both(CountingFunctions(), torch.device("meta")),
    "no torch function": torch._C.DisableTorchFunction,
    "no subclasses": torch._C.DisableTorchFunctionSubclass,
    "dispatch mode": CountingOperators,
    "two dispatch modes": lambda: both(CountingOperators(), CountingOperators()),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(same, same),
    "saved tensors forbidden": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    "context variable": lambda: setting(variable.set, "inside", "nothing"),
    "anomaly mode": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
}


@contextmanager
def both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


def seen() -> Any:
    found = current()
    # In calls, other hooks replace the caller's hooks (test_saved_tensor_hooks.py).
    state = found._replace(saved_tensor_hooks=found.saved_tensor_hooks and (same, same))
    observed = (
        torch.empty(()).dtype,
        torch.empty(()).device.type,
        torch.get_default_device(),
        variable.get(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
    return state, observed


def on_all_threads(func: Callable[[], Any], calls: int = 3) -> list[tuple[int, Any]]:
    """Return (thread, result of ``func``) of calls that run at the same time, and so each on its own thread."""
    barrier = threading.Barrier(calls)
    found: list[tuple[int, Any]] = []

    def call() -> None:
        barrier.wait(LONG)
        found.append((threading.get_ident(), func()))

    with parallel_workers(calls):
        map_with_parallel_backward(call, *[()] * calls)
    assert len({thread for thread, _ in found}) == calls
    return found


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:In CPU autocast")
@pytest.mark.parametrize("name", STATES)
def test_calls_see_the_state_of_the_caller(name: str) -> None:
    before = seen()
    with STATES[name]():
        expected = seen()
        assert (expected != before) == (name != "nothing")
        for _, found in on_all_threads(seen):
            assert found == expected
        assert seen() == expected
    for _, found in on_all_threads(seen):
        assert found == before
    assert seen() == before


@pytest.mark.parametrize("name", ["function mode", "dispatch mode"])
def test_modes_are_asked_on_every_thread(name: str) -> None:
    mode = STATES[name]()
    with mode:
        threads = {thread for thread, _ in on_all_threads(lambda: torch.ones(2) + 1)}
    assert threads <= mode.threads  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:In CPU autocast")
@pytest.mark.parametrize("name", STATES)
def test_backward_passes_see_the_state_of_the_backward_pass(name: str) -> None:
    found: list[Any] = []
    barrier = threading.Barrier(3)

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            barrier.wait(LONG)
            found.append((threading.get_ident(), seen()))
            return grad

    class Alone(Looking):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            found.append((threading.get_ident(), seen()))
            return grad

    x = torch.ones(2, requires_grad=True)
    with parallel_workers(3):
        outputs = map_with_parallel_backward(Looking, (x,), (x,), (x,))
        plain = Alone.apply(x)
        grads = [torch.ones(2)] * 3
        with STATES[name]():
            torch.autograd.backward([o for (o,) in outputs], grads)
            plain.backward(grads[0])
    assert len({thread for thread, _ in found[:3]}) == 3
    *parallel, (_, expected) = found
    for _, one in parallel:
        assert one == expected


def test_states_are_put_back_after_calls_that_leave_traces() -> None:
    def leave_traces() -> None:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_cache_enabled(False)
        torch._C._set_multithreading_enabled(False)
        torch.device("meta").__enter__()
        variable.set("a trace")

    before = seen()
    on_all_threads(leave_traces)
    for _, found in on_all_threads(seen):
        assert found == before
    assert seen() == before


def test_background_calls_see_the_state_of_who_asked() -> None:
    release = threading.Event()
    with parallel_workers(1):
        blocker = run_in_background(release.wait, 60)
        while not blocker.running():
            pass
        with torch.no_grad(), torch.device("meta"), torch.autocast("cpu"):
            expected = seen()
            asked = run_in_background(seen)
            helped = run_in_background(seen)
        with torch.inference_mode(), torch.autograd.graph.saved_tensors_hooks(same, same), CountingOperators():
            assert helped.result() == expected  # on this thread: the only worker is busy
        release.set()
        assert asked.result(LONG) == expected


def test_states_within_each_other() -> None:
    plain = current()
    with torch.inference_mode(), torch.device("meta"), CountingOperators():
        inner = current()
        assert in_state(plain, current) == plain
        assert in_state(plain, in_state, inner, current) == inner
        assert current() == inner
    assert current() == plain


def test_autocast_casts_parameters_and_their_gradients() -> None:
    module = torch.nn.Linear(4, 4)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = map_with_parallel_backward(module, *[(x,)] * 3)
    assert all(o.dtype == torch.bfloat16 for (o,) in outputs)
    sum(o.float().sum() for (o,) in outputs).backward()
    assert module.weight.grad.dtype == torch.float32
    torch.testing.assert_close(module.bias.grad, torch.full((4,), 9.0))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_graph(mode: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with mode():
        ((y,), (z,)) = map_with_parallel_backward(lambda t: t * 2, (x,), (x,))
    assert not y.requires_grad
    assert z.is_inference() == (mode is torch.inference_mode)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_names_the_forward_call(capfd: Any) -> None:
    def the_culprit(x: torch.Tensor) -> torch.Tensor:
        return (x * 0).sqrt() * 0

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.detect_anomaly():
        ((y,), _) = map_with_parallel_backward(the_culprit, (x,), (x,))
        with pytest.warns(UserWarning, match="the_culprit"), pytest.raises(RuntimeError, match="returned nan values"):
            y.sum().backward()
    assert x.grad is None


def test_saved_tensor_hooks_of_the_caller_pack_what_calls_save() -> None:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    x = torch.full((2,), 3.0, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda number: packed[number]):
        ((y,), (z,)) = map_with_parallel_backward(lambda t: t.exp(), (x,), (x,))
    assert len(packed) == 2
    (y + z).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())
