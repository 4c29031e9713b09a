"""Tests of in-place writes: within a call to its arguments, and outside to a call's arguments and results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pymoe.runtime import map_with_parallel_backward


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_an_edit_of_an_argument_after_the_call_is_noticed() -> None:
    x = leaf(1.0, 2.0)
    h = x * 1
    ((y,), (z,)) = map_with_parallel_backward(lambda t: t * t, (h,), (x,))
    h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (y + z).sum().backward()
    assert x.grad is None


def test_an_edit_of_an_output_that_was_saved_is_noticed() -> None:
    x = leaf(1.0, 2.0)
    ((y,),) = map_with_parallel_backward(torch.exp, (x,))
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_edit_of_an_output_that_was_not_saved_is_fine() -> None:
    x = leaf(1.0, 2.0)
    ((y,),) = map_with_parallel_backward(lambda t: (t * 3).view(2, 1), (x,))
    y.mul_(2)
    y.sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]


def test_a_call_that_writes_to_its_argument() -> None:
    def loss(run: Any, x: torch.Tensor) -> torch.Tensor:
        h, k = x * 1, x * 2

        def func(tensor: torch.Tensor, factor: float) -> torch.Tensor:
            tensor.mul_(factor)
            return tensor + 1

        outputs = run(func, (h, 3.0), (k, 4.0))
        return (h * h).sum() + k.sum() + sum(o.sum() for (o,) in outputs)

    x, twin = leaf(1.0, 2.0), leaf(1.0, 2.0)
    loss(map_with_parallel_backward, x).backward()
    loss(lambda func, *calls: [(func(*args),) for args in calls], twin).backward()
    assert torch.equal(x.grad, twin.grad)


def test_a_call_that_writes_what_needs_gradients_into_what_did_not() -> None:
    x, buffer = leaf(1.0, 2.0), torch.zeros(2, dtype=torch.float64)
    map_with_parallel_backward(lambda t, b: b.add_(t * 3).sum(), (x, buffer))
    assert buffer.tolist() == [3.0, 6.0]
    assert buffer.requires_grad
    buffer.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_two_calls_that_write_to_one_tensor_are_refused() -> None:
    h = leaf(1.0) * 1
    with pytest.raises(RuntimeError, match="modified in place by more than one call"):
        map_with_parallel_backward(lambda t: t.mul_(2), (h,), (h,))


def test_writing_to_an_output_that_shares_memory_is_refused() -> None:
    """After such a write, the histories of the other views could not be updated."""
    x = leaf(1.0, 2.0, 3.0, 4.0)
    h = x * 1
    ((part,),) = map_with_parallel_backward(lambda t: t[:2], (h,))
    ((one, other),) = map_with_parallel_backward(lambda t: (t * 2).split(2), (x,))
    for view in (part, one, other):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            view.mul_(2)
    (part.sum() + one.sum() + 3 * other.sum()).backward()
    assert x.grad.tolist() == [3.0, 3.0, 6.0, 6.0]


def test_calls_do_not_make_the_callers_tensors_require_gradients() -> None:
    x = torch.ones(2)
    map_with_parallel_backward(lambda t: t.requires_grad_().sin(), (x,))
    assert not x.requires_grad
    assert x.grad_fn is None


@pytest.mark.parametrize("edited", [False, True])
def test_a_call_may_save_what_it_has_written_to_and_later_edits_are_still_noticed(edited: bool) -> None:
    x = leaf(1.0, 2.0)
    h = x * 1
    ((y,),) = map_with_parallel_backward(lambda t: t.mul_(0.5).pow(2), (h,))
    if edited:
        h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert x.grad.tolist() == [0.5, 1.0]
