"""Defines the functions of random maps; the first argument of a call determines what it does, never its timing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

Mapper = Callable[..., tuple[tuple[Any, ...], ...]]


@dataclass(frozen=True)
class Made:
    """A function to map, and the tensors that it uses without having them as arguments."""

    function: Any
    parameters: dict[str, Tensor] = field(default_factory=dict)
    only_tensors: bool = False
    changes_first: bool = False


def jitter() -> None:
    """Sleep for a random time, so that calls end in another order each time."""
    time.sleep(random.random() * 5e-4)


# --- steps: each keeps values small ---

STEPS: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    torch.tanh,
    lambda x: x * x * 0.3,
    lambda x: x.to(torch.complex128 if x.is_complex() else torch.float64),
    lambda x: x.reshape(-1),
    lambda x: x[..., 1:] if x.dim() and x.shape[-1] > 1 else x,
    lambda x: x.mT if x.dim() > 1 else x,
    lambda x: torch.view_as_real(x).sum(-1) if x.is_complex() else x,
    lambda x: x.clone().mul_(0.7),
    lambda x: x.flip(0) if x.dim() else x,
    lambda x: x.detach() + x,
]


def mixed(recipe: int, *values: Any) -> Any:
    """Apply steps to every tensor, and return sums over several of them and outputs of all kinds."""
    rng = random.Random(recipe)
    jitter()
    found = [value for value in _pytree.tree_leaves(list(values)) if isinstance(value, Tensor)]
    numbers = [value for value in found if value.is_floating_point() or value.is_complex()]
    scale = sum(value for value in values if isinstance(value, (int, float)))
    results: list[Any] = []
    for value in numbers:
        for _ in range(rng.randint(1, 3)):
            value = rng.choice(STEPS)(value)
        results.append(value * (1 + scale))
    for index in found:
        if index.dtype == torch.int64:
            flat = results[0].reshape(-1)
            results.append(flat[index % len(flat)])
    while len(results) > 1 and rng.random() < 0.6:
        one, other = rng.sample(results, 2)
        results.append(one.mean() * other)
    if rng.random() < 0.3:
        results.append(numbers[0])  # an argument, returned unchanged
    if rng.random() < 0.3:
        results.append(numbers[0][..., :1])  # a view of one
    if rng.random() < 0.3:
        results.append(results[0].detach())
    if rng.random() < 0.4:
        results += [None, 7, torch.arange(3)]
    rng.shuffle(results)
    jitter()
    if rng.random() < 0.25:
        return next(value for value in results if isinstance(value, Tensor))
    return tuple(results[: rng.randint(1, len(results))])


def make_callable(mapper: Mapper, leaves: dict[str, Tensor], generator: torch.Generator) -> Made:
    return Made(mixed)


def make_closure(mapper: Mapper, leaves: dict[str, Tensor], generator: torch.Generator) -> Made:
    """Return calls that use leaves from a closure, not from their arguments."""
    tensors = list(leaves.values())

    def closure(recipe: int, *values: Any) -> Any:
        return mixed(recipe, *values, *tensors[recipe % 2 : 2], tensors[0] * 2)

    return Made(closure)


class Layers(torch.nn.Module):
    """Two layers that share their weight, one frozen parameter, one that is never used, one that is used sometimes."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator))

        self.weight = parameter(4, 4)
        self.second = torch.nn.Module()
        self.second.weight = self.weight
        self.bias = parameter(4)
        self.frozen = parameter(4).requires_grad_(False)
        self.unused = parameter(2)

    def forward(self, recipe: int, *values: Any) -> Any:
        inner = torch.tanh(self.weight @ self.second.weight) + self.frozen
        return mixed(recipe, *values, inner, *([self.bias] if recipe % 3 else []))


def make_module(mapper: Mapper, leaves: dict[str, Tensor], generator: torch.Generator) -> Made:
    module = Layers(generator)
    return Made(module, {name: value for name, value in module.named_parameters() if value.requires_grad})


def make_nested(mapper: Mapper, leaves: dict[str, Tensor], generator: torch.Generator) -> Made:
    """Return calls that map again; some of their inner calls map once more."""

    def outer(recipe: int, *values: Any) -> Any:
        rng = random.Random(recipe)
        inner = mixed if rng.random() < 0.7 else outer_once
        results = mapper(inner, *[(rng.getrandbits(30), *values) for _ in range(rng.randint(1, 3))])
        return tuple(value for result in results for value in result)

    def outer_once(recipe: int, *values: Any) -> Any:
        results = mapper(mixed, (recipe, *values), (recipe + 1, *values))
        return tuple(value for result in results for value in result)

    return Made(outer)


def make_in_place(mapper: Mapper, leaves: dict[str, Tensor], generator: torch.Generator) -> Made:
    """Return calls that each change their own first tensor in place."""

    def change(recipe: int, first: Tensor, *values: Any) -> Any:
        jitter()
        first.mul_(0.5)
        rest = mixed(recipe, first * first, *values)
        return (first, *(rest if isinstance(rest, tuple) else (rest,)))

    return Made(change, changes_first=True)


# --- autograd functions: outputs, and gradients for whatever tensors they are given ---


def products(recipe: int, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor * tensor * (1 + (recipe + i) % 3) for i, tensor in enumerate(tensors)]


def product_grads(ctx: Any, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Return a gradient per tensor: None if it is ignored, not needed, or if the output's gradient is missing."""
    jitter()
    results: list[Tensor | None] = []
    for i, (tensor, grad) in enumerate(zip(ctx.saved_tensors, grads, strict=True)):
        ignored = (ctx.recipe >> i) % 5 == 0
        skip = grad is None or ignored or not ctx.needs_input_grad[1 + i]
        results.append(None if skip else 2 * (1 + (ctx.recipe + i) % 3) * tensor.conj() * grad)
    return results


class Products(torch.autograd.Function):
    """A Function whose forward takes the context."""

    @staticmethod
    def forward(ctx: Any, recipe: int, *tensors: Tensor) -> Any:
        jitter()
        ctx.save_for_backward(*tensors)
        ctx.recipe = recipe
        ctx.set_materialize_grads(recipe % 2 == 0)
        rounded = torch.arange(len(tensors))
        ctx.mark_non_differentiable(rounded)
        return (*products(recipe, list(tensors)), rounded, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, *product_grads(ctx, grads[:-2]))


class ProductsWithSetup(torch.autograd.Function):
    """A Function with ``setup_context``, differentiable once."""

    @staticmethod
    def forward(recipe: int, *tensors: Tensor) -> Any:
        jitter()
        results = products(recipe, list(tensors))
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.recipe, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, *product_grads(ctx, grads))


def make_function(mapper: Mapper, leaves: dict[str, Tensor], generator: torch.Generator) -> Made:
    return Made(Products, only_tensors=True)


def make_function_with_setup(mapper: Mapper, leaves: dict[str, Tensor], generator: torch.Generator) -> Made:
    return Made(ProductsWithSetup, only_tensors=True)


FUNCTIONS = [
    make_callable,
    make_module,
    make_function,
    make_nested,
    make_closure,
    make_function_with_setup,
    make_in_place,
]
