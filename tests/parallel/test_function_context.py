"""Tests that an autograd.Function has the same features within a map as outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

from pymoe.runtime import map_with_parallel_backward, run_isolated_backward, run_isolated_forward


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad * ctx.scale, None


@pytest.mark.parametrize("func", [Square, Square.apply], ids=["class", "apply"])
def test_saved_tensors_and_attributes(func: Any) -> None:
    x, y = leaf(1.0, 2.0), leaf(3.0)
    ((a,), (b,)) = map_with_parallel_backward(func, (x,), (y, 10.0))
    assert (a.tolist(), b.tolist()) == ([1.0, 4.0], [90.0])
    (a.sum() + b.sum()).backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([2.0, 4.0], [60.0])


def test_saved_tensors_have_version_checks() -> None:
    h = leaf(1.0) * 2
    ((y,),) = map_with_parallel_backward(Square, (h,))
    h.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    x = torch.tensor([1.0], requires_grad=True)
    context, _ = run_isolated_forward(Square, x)
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_isolated_backward(context, torch.ones(1))


class Setup(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        assert isinstance(output, torch.Tensor)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


def test_setup_context() -> None:
    x, y = leaf(2.0), leaf(3.0)
    ((a,), (b,)) = map_with_parallel_backward(Setup, (x, y), (y, y))
    (a + b).backward()
    assert (x.grad.item(), y.grad.item()) == (3.0, 8.0)


def test_needs_input_grad() -> None:
    seen: dict[str, Any] = {}

    class Needs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, name: str, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.name = name
            return sum(tensors)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            seen[ctx.name] = ctx.needs_input_grad
            return None, *[grad if needed else None for needed in ctx.needs_input_grad[1:]]

    x, y = leaf(1.0), torch.ones(1, dtype=torch.float64)
    ((a,), (b,), (c,)) = map_with_parallel_backward(Needs, ("a", x, y), ("b", y, x), ("c", y, y))
    assert not c.requires_grad
    (a + b).backward()
    assert seen == {"a": (False, True, False), "b": (False, False, True)}
    assert x.grad.item() == 2.0


def test_mark_non_differentiable_and_integer_outputs() -> None:
    class Sort(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            values, order = x.sort()
            extra = x * 2
            ctx.mark_non_differentiable(order, extra)
            ctx.save_for_backward(order)
            return values, order, extra

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> torch.Tensor:
            (order,) = ctx.saved_tensors
            return torch.empty_like(grad).scatter_(0, order, grad)

    x = leaf(3.0, 1.0, 2.0)
    ((values, order, extra), _) = map_with_parallel_backward(Sort, (x,), (x,))
    assert [t.requires_grad for t in (values, order, extra)] == [True, False, False]
    assert order.tolist() == [1, 2, 0]
    values.backward(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert x.grad.tolist() == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("materialize", [True, False])
def test_set_materialize_grads(materialize: bool) -> None:
    seen: list[Any] = []

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            ctx.set_materialize_grads(materialize)
            return x * 1, x * 2

        @staticmethod
        def backward(ctx: Any, one: Any, two: Any) -> Any:
            seen.append((one, two))
            return two * 2

    x = leaf(1.0)
    ((_, b), _) = map_with_parallel_backward(Two, (x,), (x,))
    b.backward()
    ((one, two),) = seen  # the other call has no gradient at all, so its backward does not run
    assert (one is None) == (not materialize)
    assert two.item() == 1.0
    assert x.grad.item() == 2.0


def test_none_gradients_and_none_outputs() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            return x * 1, None, y * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, grads[2]

    x, y = leaf(1.0), leaf(2.0)
    ((a, none, b), _) = map_with_parallel_backward(Nothing, (x, y), (y, x))
    assert none is None
    (a + b).backward()
    assert x.grad is None
    assert y.grad.item() == 1.0


def test_mark_dirty() -> None:
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            x.mul_(3)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3

    x = leaf(1.0, 2.0)
    h = x * 1
    ((y,),) = map_with_parallel_backward(Triple, (h,))
    assert y is h
    assert h.tolist() == [3.0, 6.0]
    (h * torch.tensor([1.0, 10.0])).sum().backward()
    assert x.grad.tolist() == [3.0, 30.0]
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        map_with_parallel_backward(Triple, (x,))


def test_a_wrong_number_of_gradients_is_torchs_error() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad, grad

    ((y,),) = map_with_parallel_backward(Wrong, (leaf(1.0),))
    with pytest.raises(RuntimeError, match="incorrect number of gradients"):
        y.backward()


def test_saved_tensors_are_gone_after_the_backward_pass() -> None:
    x = leaf(1.0)
    ((y,), (z,)) = map_with_parallel_backward(Square, (x,), (x,))
    (y + z).backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()
