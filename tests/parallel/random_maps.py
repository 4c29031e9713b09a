"""Makes random maps: a function, the arguments of some calls and a loss over their outputs, determined by a seed.

    expected = outcome(seed, serial)
    found = outcome(seed, pymoe.map_with_parallel_backward)

Leaves are shared between calls, directly and as views of different shapes; calls have different numbers of arguments
and outputs, of mixed dtypes, some None, some not tensors, some without gradients; some outputs have no part in the
loss. random_calls.py has the functions that are mapped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from random_calls import FUNCTIONS, Made, Mapper
from torch import Tensor
from torch.utils import _pytree

ROWS, COLUMNS = 5, 4


def serial(func: Any, *args_per_call: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
    """Return the results of a loop over the calls, which a map must equal."""
    call = func.apply if isinstance(func, type) and issubclass(func, torch.autograd.Function) else func
    results = [call(*args) for args in args_per_call]
    return tuple(result if isinstance(result, tuple) else (result,) for result in results)


@dataclass(frozen=True)
class Outcome:
    """The results of a map."""

    outputs: list[Any]
    needs_grad: list[bool]
    gradients: dict[str, Tensor | None]


class Leaves:
    """The leaves of a random map, and arguments computed from them."""

    def __init__(self, rng: random.Random, generator: torch.Generator) -> None:
        self.rng = rng
        self.named: dict[str, Tensor] = {}
        dtypes = [torch.float64, torch.float64, torch.float32, torch.complex128]
        for number, dtype in enumerate(dtypes[: rng.randint(1, 4)]):
            shape = (ROWS, COLUMNS) if rng.random() < 0.8 else (COLUMNS,)
            leaf = torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()
            self.named[f"leaf {number}"] = leaf
        self.constant = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=generator)
        self.index = torch.randint(0, 7, (6,), generator=generator)

    def tensor(self) -> Tensor:
        """Return a leaf, a value computed from a leaf, or a view of one of these."""
        leaf = self.rng.choice(list(self.named.values()))
        if self.rng.random() < 0.2:
            leaf = leaf * 1.5
        makes: list[Callable[[Tensor], Tensor]] = [
            lambda x: x,
            lambda x: x,
            lambda x: x[1:],
            lambda x: x[..., ::2],
            lambda x: x.reshape(-1),
            lambda x: x.mT if x.dim() > 1 else x,
            lambda x: x.unsqueeze(0).expand(2, *x.shape),
            lambda x: x.detach(),
        ]
        return self.rng.choice(makes)(leaf)

    def argument(self) -> Any:
        others = [None, 0.5, 3, "text", True, self.constant, self.constant[2:], self.index, [self.tensor(), 1]]
        return self.tensor() if self.rng.random() < 0.65 else self.rng.choice(others)

    def arguments(self) -> tuple[Any, ...]:
        values = [self.argument() for _ in range(self.rng.randint(0, 3))]
        if values and self.rng.random() < 0.2:
            values.append(values[0])  # the same twice in one call
        values.insert(self.rng.randint(0, len(values)), self.tensor())
        return tuple(values)


def outcome(seed: int, mapper: Mapper) -> Outcome:
    """Make all inputs from the seed, run the map and its backward pass, and return the results."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    leaves = Leaves(rng, generator)
    made: Made = FUNCTIONS[seed % len(FUNCTIONS)](mapper, leaves.named, generator)
    results = mapper(made.function, *[call_of(leaves, made) for _ in range(rng.randint(1, 6))])
    outputs = [results]
    if rng.random() < 0.3:  # a map over the results of a map
        again = [value for value in tensors(results) if value.is_floating_point()]
        if again:
            calls = [(rng.getrandbits(30), value.sin(), leaves.tensor()) for value in again[:3]]
            outputs.append(mapper(FUNCTIONS[0](mapper, leaves.named, generator).function, *calls))
    gradients = go_backward(rng, outputs, {**leaves.named, **made.parameters})
    flat = _pytree.tree_leaves(outputs)
    return Outcome(
        [value.detach().clone() if isinstance(value, Tensor) else value for value in flat],
        [isinstance(value, Tensor) and value.requires_grad for value in flat],
        gradients,
    )


def call_of(leaves: Leaves, made: Made) -> tuple[Any, ...]:
    """Return the arguments of a call; the first argument decides what the function does."""
    arguments = leaves.arguments()
    if made.only_tensors:
        arguments = tuple(value for value in arguments if isinstance(value, Tensor) and value.dtype != torch.int64)
    if made.changes_first:
        arguments = (leaves.tensor().clone() * 1.25, *arguments)
    return (leaves.rng.getrandbits(30), *arguments)


def tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors that require a gradient."""
    for value in _pytree.tree_leaves(values):
        if isinstance(value, Tensor) and value.requires_grad:
            yield value


def go_backward(rng: random.Random, outputs: Any, named: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Return gradients of a random loss over some outputs, computed in one of several ways."""
    terms: list[Tensor] = []
    for value in tensors(outputs):
        weight, kind = rng.uniform(-2, 2), rng.random()
        if kind < 0.25:
            continue
        size = (value.abs() ** 2 if value.is_complex() else value.sin()).double().sum() * weight
        terms.append(size * terms[-1] if terms and kind > 0.85 else size)
    way = rng.random()
    if not terms:
        return dict.fromkeys(named)
    loss = torch.stack(terms).sum()
    if way < 0.3:
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return dict(zip(named, found, strict=True))
    if way < 0.5:
        for tensor in named.values():
            tensor.grad = torch.ones_like(tensor)
    loss.backward()
    return {name: tensor.grad for name, tensor in named.items()}
