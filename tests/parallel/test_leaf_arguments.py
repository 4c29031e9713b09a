"""Tests of leaves that require gradients: calls get them unchanged if no other argument has a history."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from limits import LONG

from pymoe.runtime import map_with_parallel_backward, parallel_workers, run_isolated_backward, run_isolated_forward


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_calls_get_leaves_themselves_unless_another_argument_has_a_history() -> None:
    x, parameter, data = leaf(1, 2), torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    h = x * 2
    found: list[tuple[torch.Tensor, ...]] = []
    arguments = (x, parameter, data), (x, parameter, data, h)
    map_with_parallel_backward(lambda *tensors: found.append(tensors), *arguments)
    same = [
        [one is other for one, other in zip(*pair, strict=True)]
        for pair in zip(arguments, sorted(found, key=len), strict=True)
    ]
    assert same == [[True, True, False], [False] * 4]
    for one, other in zip(arguments[1], max(found, key=len), strict=True):
        assert one.data_ptr() == other.data_ptr()


def test_a_leaf_that_a_call_returns_or_looks_at_through_a_view() -> None:
    x = leaf(1, 2, 3)
    ((same, part), (product,)) = map_with_parallel_backward(
        lambda t, part: (t, t[:2]) if part else t * t, (x, True), (x, False)
    )
    assert same is x
    (part.sum() * 5 + product.sum()).backward()
    assert x.grad.tolist() == [7.0, 9.0, 6.0]
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        part.mul_(2)


def test_a_leaf_and_what_was_made_of_it_have_gradients_of_their_own() -> None:
    """A call's backward pass must not continue into the history of its arguments."""
    x = leaf(1, 2)
    h = x * 3
    seen: list[Any] = []
    h.register_hook(lambda grad: seen.append(grad.tolist()))
    ((y,), (z,)) = map_with_parallel_backward(lambda a, b: a * b, (x, h), (h, x))
    (y + z).sum().backward()
    assert seen == [[2.0, 4.0]]
    assert x.grad.tolist() == [12.0, 24.0]


def test_hooks_of_leaves_see_the_sum_once() -> None:
    x = leaf(1, 2)
    seen: list[Any] = []
    x.register_hook(lambda grad: seen.append(("gradient", grad.tolist())))
    x.register_post_accumulate_grad_hook(lambda tensor: seen.append(("accumulated", tensor.grad.tolist())))
    ((y,), (z,)) = map_with_parallel_backward(lambda a, n: a * n, (x, 2), (x, 3))
    (y + z).sum().backward()
    assert seen == [("gradient", [5.0, 5.0]), ("accumulated", [5.0, 5.0])]


def test_a_write_to_what_shares_memory_with_a_leaf_is_refused() -> None:
    x = leaf(1, 2, 3)
    with pytest.raises(RuntimeError, match="shares its memory with another argument"):
        map_with_parallel_backward(lambda a, b: (b.mul_(a.sum()) * a).sum(), (x, x.detach()))


def test_leaves_that_need_no_gradient_in_one_call_and_do_in_another() -> None:
    x, y = leaf(1, 2), leaf(3, 4)
    (one, two) = map_with_parallel_backward(lambda a, b: (a * 1, b.detach() * 1), (x, y), (y, x))
    (one[0] + two[0] * 10).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
    assert y.grad.tolist() == [10.0, 10.0]
    assert not one[1].requires_grad


def test_an_isolated_call_tells_a_leaf_that_it_is_given_twice_apart() -> None:
    x = leaf(2)
    context, (y,) = run_isolated_forward(lambda a, b: a * a * b, x, x)
    gradients = run_isolated_backward(context, torch.ones_like(y))
    assert [gradient.tolist() for gradient in gradients] == [[8.0], [4.0]]
    assert context.leaves == ()


def test_many_threads_go_through_one_leaf_at_once() -> None:
    """Each call waits for all others in backward, with the same leaf among its arguments."""
    barrier = threading.Barrier(4)

    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, n: int) -> torch.Tensor:
            ctx.n = n
            return x * n

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            barrier.wait(LONG)
            return grad * ctx.n, None

    x = leaf(1, 2)
    with parallel_workers(4):
        for _ in range(20):
            x.grad = None
            outputs = map_with_parallel_backward(Meeting, *[(x, n) for n in range(4)])
            torch.stack([y for (y,) in outputs]).sum().backward()
            assert x.grad.tolist() == [6.0, 6.0]
