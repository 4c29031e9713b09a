"""Tests that a map computes the same as a loop, in both passes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pymoe
from pymoe.runtime import map_with_parallel_backward, parallel_workers


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def serial(func: Any, *args_per_call: Any) -> Any:
    outputs = [func(*args) for args in args_per_call]
    return tuple(tuple(o) if isinstance(o, (tuple, list)) else (o,) for o in outputs)


def grads_of(run: Callable[..., Any], func: Any, calls: Any, tensors: list[torch.Tensor]) -> list[Any]:
    for tensor in tensors:
        tensor.grad = None
    outputs = [o for out in run(func, *calls) for o in out if isinstance(o, torch.Tensor) and o.requires_grad]
    loss = sum((o * torch.linspace(1, 2, o.numel(), dtype=o.dtype).view_as(o)).sum() for o in outputs)
    loss.backward()
    return [*(o.detach().clone() for o in outputs), *(t.grad for t in tensors)]


def agree(func: Any, calls: Any, tensors: list[torch.Tensor]) -> None:
    expected = grads_of(serial, func, calls, tensors)
    seen = grads_of(map_with_parallel_backward, func, calls, tensors)
    for one, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_exported_at_the_top() -> None:
    assert pymoe.map_with_parallel_backward is map_with_parallel_backward
    assert pymoe.run_in_background is pymoe.runtime.run_in_background


def test_no_calls() -> None:
    assert map_with_parallel_backward(torch.sin) == ()


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_module_and_its_parameters(workers: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    xs = [double(3, 4) for _ in range(5)]
    with parallel_workers(workers):
        agree(module, [(x,) for x in xs], [*xs, *module.parameters()])


def test_tensors_shared_between_calls_and_within_one() -> None:
    x, y = double(3), double(3)
    agree(lambda a, b: a * b.exp(), [(x, y), (y, x), (x, x), (x, x)], [x, y])


def test_different_numbers_of_arguments_and_outputs() -> None:
    x, y, z = double(3), double(3), double(3)

    def func(*args: torch.Tensor) -> Any:
        return tuple(arg * sum(args) for arg in args) if len(args) > 1 else args[0].sin()

    agree(func, [(x,), (x, y), (x, y, z), [z]], [x, y, z])
    assert [len(out) for out in map_with_parallel_backward(func, (x,), (x, y), (x, y, z))] == [1, 2, 3]


def test_arguments_that_are_no_tensors_or_need_no_gradient() -> None:
    x, constant, index = double(4), torch.randn(4, dtype=torch.float64), torch.tensor([3, 0])

    def func(tensor: torch.Tensor, scale: float, name: str, none: None, other: torch.Tensor, at: torch.Tensor) -> Any:
        assert name == "name"
        assert none is None
        assert not other.requires_grad
        return (tensor * scale + other)[at]

    agree(func, [(x, 2.0, "name", None, constant, index), (x, 3.0, "name", None, constant, index)], [x])


def test_outputs_that_are_none_numbers_integers_or_constants() -> None:
    x = double(4)

    def func(tensor: torch.Tensor) -> Any:
        values, indices = tensor.sort()
        return values, None, indices, 7, "text", tensor.detach(), torch.ones(2)

    (out,) = map_with_parallel_backward(func, (x,))
    assert out[1] is None
    assert out[3:5] == (7, "text")
    assert [isinstance(o, torch.Tensor) and o.requires_grad for o in out] == [True] + [False] * 6
    agree(func, [(x,), (x,)], [x])


def test_outputs_in_containers() -> None:
    x = double(4)
    (out,) = map_with_parallel_backward(lambda t: {"a": t.sin(), "b": [t.cos(), None]}, (x,))
    assert len(out) == 1
    (out[0]["a"] + out[0]["b"][0]).sum().backward()
    torch.testing.assert_close(x.grad, (x.cos() - x.sin()).detach())


def test_outputs_that_are_returned_twice_or_handed_through() -> None:
    x = double(4)

    def func(tensor: torch.Tensor) -> Any:
        y = tensor.sin()
        return y, y, tensor

    agree(func, [(x,), (x,)], [x])
    (out,) = map_with_parallel_backward(func, (x,))
    assert out[0] is out[1]
    assert out[2] is x


def test_closures_over_leaves_and_over_tensors_with_a_history() -> None:
    weight, x = double(4), double(4)
    before = weight.exp()  # one history for all calls and other users

    def func(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * before * weight

    calls = [(x,), (x,), (x.sin(),)]

    def loss(run: Any) -> torch.Tensor:
        return sum(o.sum() for (o,) in run(func, *calls)) + (before * 3).sum()

    expected = torch.autograd.grad(loss(serial), [weight, x], retain_graph=True)
    seen = torch.autograd.grad(loss(map_with_parallel_backward), [weight, x], retain_graph=True)
    torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)


def test_inputs_with_a_history_and_what_follows() -> None:
    x = double(3, 3)

    def loss(run: Any) -> torch.Tensor:
        h = x @ x
        outputs = run(lambda t, k: t.matmul(t) * k, (h, 2), (h.t(), 3), (x, 4))
        return torch.stack([o for (o,) in outputs]).logsumexp(0).sum()

    expected = torch.autograd.grad(loss(serial), x)
    torch.testing.assert_close(torch.autograd.grad(loss(map_with_parallel_backward), x), expected, rtol=1e-12, atol=0)


def test_mixed_dtypes_views_and_complex_numbers() -> None:
    x, y, z = (
        torch.randn(4, 4, requires_grad=True),
        double(4, 4),
        torch.randn(4, dtype=torch.cdouble, requires_grad=True),
    )
    agree(lambda t: t[1:].t() * 2, [(x,), (y,), (x.t(),), (y[::2],)], [x, y])
    agree(lambda t: (t * t).abs(), [(z,), (z.conj(),)], [z])


def test_some_outputs_without_gradient_and_some_calls() -> None:
    x, y = double(3), double(3)
    (a, b), (_, _), (c,) = map_with_parallel_backward(lambda *ts: tuple(t.sin() for t in ts), (x, y), (y, x), (y,))
    assert torch.autograd.grad(a.sum(), [x, y], allow_unused=True)[1] is None
    (a2, b2), (_, _), (c2,) = map_with_parallel_backward(lambda *ts: tuple(t.sin() for t in ts), (x, y), (y, x), (y,))
    (b2.sum() + c2.sum()).backward()
    assert x.grad is None
    torch.testing.assert_close(y.grad, 2 * y.detach().cos())
    assert a2.requires_grad
    assert b.requires_grad
    assert c.requires_grad


def test_gradients_are_equal_bit_for_bit_every_time() -> None:
    torch.manual_seed(3)
    weight = torch.randn(64, 64, requires_grad=True)
    xs = [torch.randn(16, 64) for _ in range(9)]
    seen = set()
    for workers in (1, 2, 8):
        with parallel_workers(workers):
            for _ in range(17):
                weight.grad = None
                sum(
                    o.sum() for (o,) in map_with_parallel_backward(lambda x: (x @ weight).tanh(), *[(x,) for x in xs])
                ).backward()
                seen.add(weight.grad.numpy().tobytes())
    assert len(seen) == 1


def test_nested_maps_in_one_worker() -> None:
    x = double(3)

    def nested(run: Any, depth: int, tensor: torch.Tensor) -> torch.Tensor:
        if depth == 0:
            return tensor.sin()
        return sum(o for (o,) in run(functools.partial(nested, run, depth - 1), (tensor * 2,), (tensor * 3,), (x,)))

    with parallel_workers(1):
        seen = torch.autograd.grad(nested(map_with_parallel_backward, 3, x).sum(), x)
    torch.testing.assert_close(seen, torch.autograd.grad(nested(serial, 3, x).sum(), x), rtol=1e-12, atol=0)


def test_retained_graphs_and_second_backward_passes() -> None:
    x = double(3)
    ((y,), (z,)) = map_with_parallel_backward(torch.exp, (x,), (x * 2,))
    loss = (y + z).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, x)[0], first[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, x)


def test_differentiating_twice_is_an_error() -> None:
    x = double(3)
    ((y,),) = map_with_parallel_backward(lambda t: t**3, (x,))
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(gradient.detach(), 3 * x.detach() ** 2)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        gradient.sum().backward()


def test_a_gradient_within_a_call() -> None:
    x, y = double(3), double(3)

    def penalty(tensor: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad((tensor**3).sum(), tensor, create_graph=True)
        return gradient.pow(2)

    agree(penalty, [(x,), (y,)], [x, y])


def test_saved_tensors_go_after_the_backward_pass() -> None:
    alive: list[Any] = []

    def func(tensor: torch.Tensor) -> torch.Tensor:
        saved = tensor * 2
        alive.append(weakref.ref(saved))
        return saved * saved

    x = double(3)
    ((y,), (z,)) = map_with_parallel_backward(func, (x,), (x,))
    loss = (y + z).sum()
    loss.backward()
    assert [ref() for ref in alive] == [None, None]


def test_arguments_that_no_graph_has_saved_are_let_go_of() -> None:
    x = double(3) * 1
    ref = weakref.ref(x)
    ((y,), (z,)) = map_with_parallel_backward(lambda t: t * 2, (x,), (x,))
    del x
    kept = ref()  # alive only if the outputs' history holds it
    assert kept is None
    (y + z).sum().backward()


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="must be a tuple or a list, got Tensor for call 1"):
        map_with_parallel_backward(torch.sin, (torch.ones(1),), torch.ones(1))
    with pytest.raises(TypeError, match="a module or another callable, got int"):
        map_with_parallel_backward(7)


def test_inside_functional_transforms() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return sum(o.sum() for (o,) in map_with_parallel_backward(torch.sin, (x,), (x * 2,)))

    x = torch.randn(3)
    torch.testing.assert_close(torch.func.grad(loss)(x), x.cos() + 2 * (2 * x).cos())
    torch.testing.assert_close(torch.vmap(loss)(x), x.sin() + (2 * x).sin())
