"""Tests that calls with unusual sharing, caching, hooks and writes have the loop's gradients or raise an error.

Each of these cases used to have wrong gradients without an error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_maps import serial

import pymoe


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


class Box:
    """An object whose contents pymoe does not inspect."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def same_tensor_twice(mapper: Any) -> Any:
    x = leaf(1, 2, 3)

    def func(a: torch.Tensor, b: torch.Tensor) -> Any:
        b.mul_(3)
        return a.sum(), a is b

    h = x * 1
    ((y, same),) = mapper(func, (h, h))
    y.backward()
    return x.grad.tolist(), same


def outputs_in_an_object(mapper: Any) -> Any:
    x = leaf(1, 2)
    ((one,), (other,)) = mapper(lambda a: Box(a * a), (x,), (x * 2,))
    (one.tensor.sum() + other.tensor.sum()).backward()
    return x.grad.tolist()


def losses_that_a_module_keeps(mapper: Any) -> Any:
    class Keeping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))
            self.losses: list[torch.Tensor] = []

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            y = a * self.weight
            self.losses.append(y.square().sum())
            return y

    module, x = Keeping(), leaf(1, 2)
    ((y,), (z,)) = mapper(module, (x,), (x * 2,))
    (y.sum() + z.sum() + torch.stack(module.losses).sum()).backward()
    return x.grad.tolist(), module.weight.grad.tolist()


def losses_kept_by_a_nested_call(mapper: Any) -> Any:
    x, kept = leaf(1, 2), []

    def inner(a: torch.Tensor) -> torch.Tensor:
        kept.append((a * a).sum())
        return a * 3

    def outer(a: torch.Tensor) -> torch.Tensor:
        ((y,), (z,)) = mapper(inner, (a,), (a * 2,))
        return y + z

    ((y,), (z,)) = mapper(outer, (x,), (x,))
    (y.sum() + z.sum() + torch.stack(kept).sum()).backward()
    return x.grad.tolist()


def a_nested_call_that_captures_the_argument_of_the_outer_one(mapper: Any) -> Any:
    x = leaf(1, 2)

    def outer(a: torch.Tensor, k: int) -> torch.Tensor:
        ((y,), (z,)) = mapper(lambda i: a * a * i, (k,), (k + 1,))
        return y + z

    ((y,), (z,)) = mapper(outer, (x, 1), (x * 2, 2))
    (y.sum() + z.sum()).backward()
    return x.grad.tolist()


def a_call_that_goes_backward_itself(mapper: Any) -> Any:
    x = leaf(1, 2)

    def func(a: torch.Tensor) -> torch.Tensor:
        (a * a).sum().backward()
        return a * 3

    ((y,),) = mapper(func, (x,))
    y.sum().backward()
    return x.grad.tolist()


def hooks_of_a_captured_leaf(mapper: Any) -> Any:
    x, weight = leaf(1, 2), leaf(3, 4)
    seen: list[Any] = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad.tolist())
        return grad * 2

    handle = weight.register_hook(double)
    found = []
    for _ in range(2):
        ((y,), (z,)) = mapper(lambda a: a * weight, (x,), (x * 2,))
        (y.sum() + z.sum()).backward()
        found.append(weight.grad.tolist())
        (weight * x).sum().backward()  # without a map
        found.append(weight.grad.tolist())
        handle.remove()
    return found, seen


PROGRAMS = [
    same_tensor_twice,
    outputs_in_an_object,
    losses_that_a_module_keeps,
    losses_kept_by_a_nested_call,
    a_nested_call_that_captures_the_argument_of_the_outer_one,
    a_call_that_goes_backward_itself,
    hooks_of_a_captured_leaf,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_those_of_the_loop(program):
    with pymoe.runtime.parallel_workers(2):
        assert program(pymoe.map_with_parallel_backward) == program(serial)


@pytest.mark.parametrize("written", [0, 1], ids=["base", "view"])
def test_a_write_to_an_argument_that_shares_memory_with_another_is_refused(written):
    x = leaf(1, 2, 3)
    h = x * 1

    def func(*tensors: torch.Tensor) -> torch.Tensor:
        tensors[written].mul_(3)
        return tensors[1 - written].sum()

    with pytest.raises(RuntimeError, match="shares its memory with another argument"):
        pymoe.map_with_parallel_backward(func, (h, h[:1]))


def test_an_error_that_cannot_be_printed_does_not_hide_the_first():
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def func(number: int) -> None:
        raise KeyError("first") if number == 0 else Unprintable

    with pytest.raises(KeyError, match="first") as caught:
        pymoe.map_with_parallel_backward(func, (0,), (1,))
    assert any("Unprintable" in note for note in getattr(caught.value, "__notes__", ["Unprintable"]))
